"""The table, the file and the picture of the results."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
from typing import Any

import cpjax
from benchmarks.common import Row, Settings, devices

COLUMNS = {
    "seconds": ("ms", lambda x: f"{x * 1e3:.1f}"),
    "ratio": ("ratio", "{:.2f}".format),
    "of_causal": ("of causal", "{:.2f}".format),
    "temp_bytes": ("temp MiB/device", lambda x: f"{x / 2**20:.1f}"),
    "max_error": ("max error", "{:.0e}".format),
    "imbalance": ("max/mean work", "{:.4f}".format),
    "bound": ("at least", "{:.4f}".format),
    "sent_bytes": ("sent MiB/device", lambda x: f"{x / 2**20:.2f}"),
    "sent_of_held": ("of held", "{:.2f}".format),
}
_TIMED = ("seconds", "ratio", "temp_bytes", "max_error")
_SHOWN = {
    "attention": (*_TIMED, "of_causal"),
    "recurrence": _TIMED,
    "train": _TIMED,
    "layouts": ("seconds", "imbalance", "bound", "sent_bytes", "sent_of_held"),
    "compile": ("seconds", "ratio"),
}


def header(part: str) -> str:
    """The titles over the rows of a part."""
    return f"\n{part:32}" + "".join(f"{COLUMNS[key][0]:>16}" for key in _SHOWN[part])


def section(rows: list[Row]) -> str:
    """The rows of one problem, under its name."""
    lines = [rows[0]["problem"]]
    for row in rows:
        cells = [f"{COLUMNS[k][1](row[k]) if row.get(k) is not None else '':>16}" for k in _SHOWN[row["part"]]]
        lines.append((f"  {row['name']:30}" + "".join(cells) + f"   {row['note']}").rstrip())
    return "\n".join(lines)


def record(rows: list[Row], settings: Settings) -> dict[str, Any]:
    """What the file holds."""
    packages = [
        n for n in ("jax", "jaxlib", "numpy", "torch", "transformers", "ringattention") if importlib.util.find_spec(n)
    ]
    first = devices(settings.cp)[0]
    return {
        "versions": {
            "cpjax": cpjax.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "machine": {"devices": settings.cp, "kind": first.device_kind, "cores": os.cpu_count()},
        "rows": rows,
    }


def write(folder: pathlib.Path, rows: list[Row], settings: Settings) -> None:
    """benchmarks.json and benchmarks.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps(record(rows, settings), indent=1) + "\n")
    picture(folder / "benchmarks.png", rows, settings)
    print(f"wrote benchmarks.json and benchmarks.png to {folder}")


def picture(path: pathlib.Path, rows: list[Row], settings: Settings) -> None:
    """Time of every contender relative to the first of its problem: a column for each length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [row for row in rows if "length" in row]
    places: dict[tuple[str, str], float] = {}  # of each bar, the same in every column
    titles: dict[str, float] = {}
    for row in timed:
        if row["case"] not in titles:
            titles[row["case"]] = len(places) + 1.5 * len(titles) + 0.2
        key = (row["case"], row["name"])
        places.setdefault(key, len(places) + 1.5 * len(titles) - 0.5)

    figure, columns = plt.subplots(
        1, len(settings.lengths), sharex=True, sharey=True, squeeze=False, layout="constrained",
        figsize=(3 + 4 * len(settings.lengths), 0.6 + 0.22 * (len(places) + 1.5 * len(titles))),
    )  # fmt: skip
    for axes, length in zip(columns[0], settings.lengths, strict=True):
        axes.set_title(f"{length:,} tokens", fontsize=10)
        axes.axvline(1, color="0.6", linewidth=0.8)
        for row in timed:
            if row["length"] != length:
                continue
            place = places[row["case"], row["name"]]
            if "ratio" not in row:
                axes.text(1.04, place, row["note"], color="0.55", fontsize=7, va="center")
                continue
            ratio = row["ratio"]
            ours = row["name"].startswith("cpjax")
            axes.barh(place, ratio - 1, left=1, height=0.8, color="#3b6fb6" if ours else "#c58b3a")
            label = f"{ratio:.2f}" if ratio != 1 else f"1  =  {row['seconds'] * 1e3:,.0f} ms"
            side = 1 if ratio >= 1 else -1
            axes.annotate(
                label, (ratio, place), (4 * side, 0), textcoords="offset points", fontsize=7,
                va="center", ha="left" if side > 0 else "right",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.tick_params(labelsize=8, length=0)
        axes.spines[:].set_visible(False)
    axes = columns[0, 0]
    axes.margins(x=0.15)
    axes.set_yticks(list(places.values()), [name for _, name in places])
    for case, place in titles.items():
        axes.text(
            0, place, case, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8, weight="bold"
        )
    axes.invert_yaxis()
    kind = devices(settings.cp)[0].platform
    figure.supxlabel(
        f"time of forward + backward relative to the first of each group, {settings.cp} {kind} devices; less is better",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)
