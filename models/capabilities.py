"""What each family can do. `python -m cpjax.models.capabilities README.md` writes the table into the README."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from cpjax.mesh import AXES
from cpjax.models import FAMILIES, family

LAYOUTS = ("contiguous", "zigzag", "striped", "packed", "dispatched")
TRANSPORTS = ("ring", "allgather", "ulysses", "ring_ulysses")
YES, CONVERTED, NO = "yes", "converted", "-"

BEGIN, END = "<!-- capabilities -->", "<!-- end -->"


def capabilities(model_type: str) -> dict[str, str]:
    """By layout, transport or feature whether a family has it: yes, no, or converted.

    Layers with a state work in contiguous order: under layouts without runs their tokens change places before them and
    back behind them.
    """
    module = family(model_type)
    config = {field.name for field in dataclasses.fields(module.Config)}
    text = {field.name for field in dataclasses.fields(module.TextConfig)}
    state = any(name.startswith("linear_") for name in text)
    features = {
        "packed documents": True,
        "images": True,
        "video": "video_token_id" in config,
        "sound": "audio" in config,
        "layers over ranks (pp)": "pp" in AXES,
        "experts over ranks (ep)": any("experts" in name for name in text),
        "heads of multi-token prediction": any(name.startswith("mtp_") for name in text),
    }
    return {
        **{name: CONVERTED if state and name not in ("contiguous", "zigzag") else YES for name in LAYOUTS},
        **dict.fromkeys(TRANSPORTS, YES),
        **{name: YES if has else NO for name, has in features.items()},
    }


def table() -> str:
    """The capabilities of all families, in Markdown."""
    columns = {name: capabilities(name) for name in FAMILIES}
    lines = [["", *(f"`{name}`" for name in columns)], ["---"] * (1 + len(columns))]
    for row in next(iter(columns.values())):
        kind = "layout " if row in LAYOUTS else "transport " if row in TRANSPORTS else ""
        lines.append([f"{kind}{row}", *(column[row] for column in columns.values())])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def update(text: str) -> str:
    """A README with the table of today between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    path.write_text(update(path.read_text()))
