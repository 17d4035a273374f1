"""Rotary positions (arXiv 2104.09864): their kinds, and what config.json says of them, as transformers reads it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cpjax.models.common.hf_config import mapping, report, report_unknown

_REQUIRED = object()

KINDS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": _REQUIRED},
    "proportional": {"factor": 1.0},
    "llama3": {
        "factor": _REQUIRED, "low_freq_factor": _REQUIRED, "high_freq_factor": _REQUIRED,
        "original_max_position_embeddings": _REQUIRED,
    },
    "yarn": {
        "factor": _REQUIRED, "original_max_position_embeddings": _REQUIRED, "attention_factor": None, "beta_fast": 32,
        "beta_slow": 1, "mscale": None, "mscale_all_dim": None, "truncate": True,
    },
}  # fmt: skip
"""The parameters of each kind beside `rope_theta` and `partial_rotary_factor`, and their defaults."""

_BY_LENGTH = ("dynamic", "longrope")  # transformers has these, too


def rope_frequencies(dim: int, theta: float) -> np.ndarray:
    """theta^(-2j/dim) for j < dim/2: the angle by which each pair turns per position (arXiv 2104.09864)."""
    return theta ** (-np.arange(0, dim, 2) / dim)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of one kind of layers.

    Attributes:
        theta: base of the wavelengths.
        partial: share of a head's features that turns.
        kind: one of `KINDS`.
        scaling: (name, value) of each parameter of the kind.
    """

    theta: float = 10000.0
    partial: float = 1.0
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()

    def turning(self, head_dim: int) -> int:
        """How many of a head's features have an angle; under "proportional" all have, though most of them zero."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angle by which each pair of features turns per position, [turning / 2]."""
        dim, own = self.turning(head_dim), dict(self.scaling)
        plain = rope_frequencies(dim, self.theta)
        if self.kind == "linear":
            return plain / own["factor"]
        if self.kind == "proportional":  # the first share of the pairs, as fast as if all did turn
            return np.where(np.arange(dim // 2) < int(self.partial * head_dim // 2), plain / own["factor"], 0)
        if self.kind == "llama3":
            # Llama 3.1 (arXiv 2407.21783, section 3.4.2, and its code): pairs slower than the original context divided
            # by low_freq_factor are slowed down, those faster than that divided by high_freq_factor keep their pace.
            turns = own["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the original context
            low, high = own["low_freq_factor"], own["high_freq_factor"]
            kept = np.clip((turns - low) / (high - low), 0, 1)
            return plain * (kept + (1 - kept) / own["factor"])
        if self.kind == "yarn":
            kept = 1 - self._ramp(dim)
            return plain * (kept + (1 - kept) / own["factor"])
        return plain

    def _ramp(self, dim: int) -> np.ndarray:
        """By how much each pair is slowed down, from 0 for fast ones to 1 for slow ones (YaRN, arXiv 2309.00071)."""
        own = dict(self.scaling)

        def pair(turns: float) -> float:
            """Number of the pair that turns this often in the original context."""
            length = own["original_max_position_embeddings"] / (turns * 2 * math.pi)
            return dim * math.log(length) / (2 * math.log(self.theta))

        low, high = pair(own["beta_fast"]), pair(own["beta_slow"])
        if own["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)

    @property
    def attention_factor(self) -> float:
        """What turned features are multiplied by, in queries and keys alike: other than 1 under YaRN alone."""
        if self.kind != "yarn":
            return 1.0
        own = dict(self.scaling)
        if own["attention_factor"] is not None:
            return own["attention_factor"]

        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(own["factor"]) + 1 if own["factor"] > 1 else 1.0

        if own["mscale"] and own["mscale_all_dim"]:
            return scale(own["mscale"]) / scale(own["mscale_all_dim"])
        return scale(1)

    def to_dict(self) -> dict[str, Any]:
        """One set of `rope_parameters` of config.json."""
        return {
            "rope_type": self.kind, "rope_theta": self.theta, "partial_rotary_factor": self.partial,
            **dict(self.scaling),
        }  # fmt: skip


def read_rope(source: Mapping[str, Any], where: str, beside: Collection[str] = (), **elsewhere: Any) -> Rope:
    """One set of `rope_parameters` of config.json.

    Args:
        source: the set; its kind is called `rope_type`, in older files `type`.
        where: its name, for messages.
        beside: names that may stand in the set for other readers.
        elsewhere: values of what the set does not say; None for the kind's default. That of
            `original_max_position_embeddings`, which must be given, is the longest context.

    Raises:
        ValueError: a kind that is not one of `KINDS`, a parameter missing or out of range.
    """
    kind = source.get("rope_type") or source.get("type") or "default"
    if kind not in KINDS:
        why = " as its angles depend on the length of the sequence at hand" if kind in _BY_LENGTH else ""
        raise ValueError(f"{where} has rope_type={kind!r}, which is not supported{why}: use one of {sorted(KINDS)}")
    own = {"rope_theta": Rope.theta, "partial_rotary_factor": Rope.partial, **KINDS[kind]}
    many = "original_max_position_embeddings"  # of which all sets may say, with no effect on other kinds
    report_unknown(where, source, {*own, "rope_type", "type", many, *beside})
    given = {name: value for name, value in source.items() if value is not None}
    if kind == "yarn" and "factor" in source and many in given:  # then null stands for this
        given.setdefault("factor", elsewhere[many] / given[many])
    values = own | {name: value for name, value in {**elsewhere, **given}.items() if name in own and value is not None}
    if missing := [name for name, value in values.items() if value is _REQUIRED]:
        raise ValueError(f"{where} has rope_type={kind!r} without {missing[0]}: name it beside rope_type")
    for name, value in values.items():
        _check(where, name, value)
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ValueError(
            f"{where} has low_freq_factor={values['low_freq_factor']}: it must be less than high_freq_factor="
            f"{values['high_freq_factor']}"
        )
    theta, partial = values.pop("rope_theta"), values.pop("partial_rotary_factor")
    return Rope(theta, partial, kind, tuple(values.items()))


def _check(where: str, name: str, value: Any) -> None:
    """Raises ValueError for a parameter out of range."""
    if name == "truncate":
        fits, wanted = isinstance(value, bool), "true or false"
    elif name in ("attention_factor", "mscale", "mscale_all_dim"):
        fits, wanted = value is None or _number(value), "a number"
    else:
        fits, wanted = _number(value) and value > 0, "a number above 0"
    if not fits:
        raise ValueError(f"{where} has {name}={value!r}: it must be {wanted}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_axial_theta(source: Mapping[str, Any], where: str, theta: float) -> float:
    """The base of the wavelengths of a vision tower, whose patches turn with their row and column.

    Args:
        source: vision_config.
        theta: if it does not say.

    Raises:
        ValueError: another kind of rope.
    """
    own = mapping(source, "rope_scaling") or mapping(source, "rope_parameters")
    if source.get("rope_scaling") and source.get("rope_parameters"):
        report(f"{where}.rope_scaling counts, and not rope_parameters beside it, as with transformers")
    kind = own.get("rope_type") or own.get("type") or "axial"
    if kind not in ("axial", "default"):
        raise ValueError(f"{where} has rope_type={kind!r}, which is not supported: only 'axial' is")
    report_unknown(f"{where}.rope_parameters", own, {"rope_type", "type", "rope_theta"})
    for value in (own.get("rope_theta"), source.get("rope_theta")):
        if value is not None:
            _check(where, "rope_theta", value)
            return value
    return theta
