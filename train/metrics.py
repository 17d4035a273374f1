"""The record of a run: one JSON line per step, and its picture."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


class MetricsLog:
    """Appends records to a JSONL file, one per step, each on disk before the next step starts."""

    def __init__(self, path: pathlib.Path, step: int):
        """Opens the file for a run that has taken `step` steps: records of later steps, and a torn line, go."""
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(part, path)
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a file, in order; [] if there is none. A last line cut short is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def draw_metrics(records: list[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Draws loss and accuracy over steps, of training and of what was held out, as far as there is any."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    steps = [record["step"] for record in records]
    losses, accuracies, exact = (
        [(record["step"], record[f"held_out_{name}"]) for record in records if f"held_out_{name}" in record]
        for name in ("loss", "accuracy", "exact")
    )
    for axes, name, held_out, word in (
        (loss_axes, "loss", losses, "held out"),
        (accuracy_axes, "accuracy", accuracies or exact, "held-out answers"),
    ):
        axes.plot(steps, [record[name] for record in records], color="tab:blue", lw=1, label="training tokens")
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label=word)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)  # above, where no line is
    loss_axes.set(xlabel="step", ylabel="loss (nats per answer token)", ylim=(0, None))
    accuracy_axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def metric_words(name: str) -> str:
    """A held-out metric in words: "held-out loss, chats" for held_out_loss/chats."""
    return name.replace("held_out_", "held-out ", 1).replace("/", ", ", 1)
