"""What the configurations of families share: reading, checking and writing dataclasses of config.json."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any


def mapping(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object below a key, empty if there is none; raises ValueError for anything else."""
    value = source.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r:.40}, not an object: copy or download the file again")
    return value


def read(cls: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass from those values that it knows; lists become tuples, to be hashable."""
    known = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in known.items()})


def plain(config: Any) -> dict[str, Any]:
    """A dataclass as JSON would hold it."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def over(source: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own`, and at every depth what `source` holds beside it, as it was read."""
    kept = copy.deepcopy(dict(source))
    return kept | {
        key: over(kept[key], value) if isinstance(value, Mapping) and isinstance(kept.get(key), Mapping) else value
        for key, value in own.items()
    }


def positive(config: Any, where: str, zero: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless every integer of a dataclass is at least 1, or 0 where `zero` names it."""
    for field in dataclasses.fields(config):
        value, least = getattr(config, field.name), int(field.name not in zero)
        if field.type == "int" and (not isinstance(value, int) or value < least):
            raise ValueError(f"{where}.{field.name}={value!r} must be an integer >= {least}")
