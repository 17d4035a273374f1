"""Parameters chosen by regular expressions: for freezing, for groups of the optimizer, for adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from cpjax.models.common.checkpoint import Weight


def find(option: str, patterns: Sequence[str], names: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The paths that each pattern matches: it is searched in the dotted path and in the Hugging Face names.

    Args:
        option: what the patterns are, for messages.
        patterns: regular expressions.
        names: the Hugging Face names of each dotted path; several where layers are stacked, none for buffers.

    Raises:
        ValueError: a pattern that is no regular expression, matches nothing, or matches only some of the layers
            stacked in one array.
    """
    found = []
    for pattern in patterns:
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{option} {pattern!r} is not a regular expression: {error}") from None
        paths = [path for path, aliases in names.items() if _matches(option, regex, path, aliases)]
        if not paths:
            raise ValueError(f"{option} {pattern!r} matches no parameter: they are named like {next(iter(names))!r}")
        found.append(paths)
    return found


def _matches(option: str, regex: re.Pattern[str], path: str, aliases: Sequence[str]) -> bool:
    if regex.search(path):
        return True
    matched = [alias for alias in aliases if regex.search(alias)]
    if matched and len(matched) < len(aliases):
        raise ValueError(
            f"{option} {regex.pattern!r} matches {matched[0]!r} but not all of the {len(aliases)} tensors that are "
            f"stacked in {path!r}: it must match all layers of a stack, or none"
        )
    return bool(matched)


def projections(weights: Sequence[Weight]) -> list[Weight]:
    """The matrices that map hidden states to hidden states: no embedding, convolution or head."""
    return [
        weight
        for weight in weights
        if weight.transpose and weight.disk_shape is None and not re.search(r"\blm_head\b", weight.names[0])
    ]
