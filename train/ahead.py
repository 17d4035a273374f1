"""Heads of multi-token prediction in a run: whether they are trained, and what a model is without them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cpjax.models import family
from cpjax.train.config import OptimizerConfig


def ahead_weight(options: OptimizerConfig, paths: Iterable[str]) -> float:
    """Weight of the heads' loss in training: that of the options if any of these parameters is a head's."""
    return options.ahead if any(path.startswith("mtp.") for path in paths) else 0.0


def freeze_patterns(options: OptimizerConfig, paths: Iterable[str]) -> list[str]:
    """Those of the options, and one for heads whose loss does not count."""
    untrained = not options.ahead and any(path.startswith("mtp.") for path in paths)
    return [*options.freeze, *([r"^mtp\."] if untrained else [])]


def without_heads(model_config: Any) -> Any:
    """The configuration of the model without heads of multi-token prediction."""
    module = family(model_config.model_type)
    return module.without_absent(model_config, ()) if hasattr(module, "without_absent") else model_config
