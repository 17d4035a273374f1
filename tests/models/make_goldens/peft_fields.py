"""The fields of PEFT's configuration of LoRA, with their defaults."""

from __future__ import annotations

import dataclasses
import json
import pathlib


def peft_fields(root: pathlib.Path) -> None:
    import peft  # only here: tests use the other files of this folder without it

    config = peft.LoraConfig()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    fields = {name: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for name, v in fields.items()}
    text = json.dumps({"peft": peft.__version__, "fields": fields}, indent=2, sort_keys=True)
    (root / "peft-lora-fields.json").write_text(text + "\n")
