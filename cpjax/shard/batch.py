"""From a host batch to the full-length device batch: every stream padded the way its meaning demands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cpjax.shard.layout import Layout
from cpjax.shard.sharder import Sharder, make_sharder

IGNORE = -100
"""Label of a position that has no target."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """How a per-token tensor is padded.

    Attributes:
        axis: its token axis (the axis before it holds the rows of the batch), or None for a tensor without one
            (pixels), which passes through unchanged.
        fill: value of pad tokens, or "continue" to keep counting from the last token.
    """

    axis: int | None = 1
    fill: float | int | bool | Literal["continue"] = 0


_STREAMS: dict[str, Stream] = {
    "input_ids": Stream(),  # its fill is the pad id
    "inputs_embeds": Stream(axis=1, fill=0),
    "labels": Stream(fill=IGNORE),
    "padding_mask": Stream(fill=True),
    "position_ids": Stream(axis=-1, fill="continue"),  # [B, S], or [axes, B, S] for multi-axis rope
    "document_ids": Stream(fill=0),
    "vision_group_ids": Stream(fill=-1),
}


def make_batch(
    batch: Mapping[str, Any],
    layout: Layout,
    *,
    pad_id: int = 0,
    streams: Mapping[str, Stream] | None = None,
    axis_name: str = "cp",
) -> tuple[dict[str, np.ndarray], Sharder]:
    """Pads a host batch to a length the layout can split; nothing is sharded yet.

    Pads are known by `padding_mask` and `document_ids`, which are always in the result, never by token value.

    | stream | shape | pads |
    |---|---|---|
    | input_ids, or inputs_embeds | [B, S], [B, S, E] | `pad_id`, 0 |
    | labels (already shifted: the target of position t) | [B, S] | -100 |
    | padding_mask (True = pad; or attention_mask, 1 = token) | [B, S] | True |
    | position_ids (default: 0, 1, 2 ...) | [B, S] or [axes, B, S] | keep counting |
    | document_ids (1-based, 0 = pad; default: one document a row) | [B, S] | 0 |
    | vision_group_ids (-1 = text) | [B, S] | -1 |
    | loss_mask (1 = counts) | [B, S] | folded into labels as -100 |

    Args:
        batch: host arrays by name; exactly one of input_ids and inputs_embeds.
        layout: decides the padded length T.
        pad_id: token id of the pads.
        streams: the model's own tensors, by name: token axis and fill. May not redefine a stream of the table.

    Returns:
        The full-length batch (numpy, T tokens along each token axis) and its sharder.

    Raises:
        ValueError: a missing or unknown stream, a stream of another length or batch size, an attention mask that is
            not [B, S], or position ids that restart without document ids (packed documents would attend to each other).
    """
    arrays = {name: np.asarray(value) for name, value in batch.items()}
    table = dict(_STREAMS, input_ids=Stream(fill=pad_id))
    for name, stream in (streams or {}).items():
        if name in table:
            raise ValueError(f"stream {name!r} is cpjax's own: give the model's stream another name")
        table[name] = stream

    primary = [name for name in ("input_ids", "inputs_embeds") if name in arrays]
    if len(primary) != 1:
        raise ValueError(
            f"the batch holds {primary or 'neither input_ids nor inputs_embeds'}: give exactly one of them"
        )
    if arrays[primary[0]].ndim != (2 if primary[0] == "input_ids" else 3):
        wanted = "[B, S]" if primary[0] == "input_ids" else "[B, S, E]"
        raise ValueError(f"{primary[0]} has shape {arrays[primary[0]].shape}: it must be {wanted}")
    rows, length = arrays[primary[0]].shape[:2]

    _masks_to_padding(arrays, (rows, length))
    padding = arrays.setdefault("padding_mask", np.zeros((rows, length), bool)).astype(bool)
    arrays["padding_mask"] = padding
    if "position_ids" not in arrays:
        arrays["position_ids"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    if "document_ids" not in arrays:
        _refuse_restarting_positions(arrays["position_ids"], padding)
        arrays["document_ids"] = np.where(padding, 0, 1).astype(np.int32)

    sharder = make_sharder(length, layout, axis_name)
    out = {}
    for name, value in arrays.items():
        if name not in table:
            raise ValueError(
                f"unknown stream {name!r} of shape {value.shape}: declare it, streams={{{name!r}: Stream(axis, fill)}} "
                "(axis=None when it has no token axis), or drop it from the batch"
            )
        out[name] = _pad(name, value, table[name], rows, length, sharder.padded_length)
    return out, sharder


def _masks_to_padding(arrays: dict[str, np.ndarray], shape: tuple[int, int]) -> None:
    """Replaces attention_mask by padding_mask, and loss_mask by ignored labels."""
    if "attention_mask" in arrays:
        mask = arrays.pop("attention_mask")
        if "padding_mask" in arrays:
            raise ValueError("the batch holds both attention_mask and padding_mask: give one of them")
        if mask.shape != shape or not np.isin(mask, (0, 1)).all():
            raise ValueError(
                f"attention_mask has shape {mask.shape}: it must be {shape} of 0 and 1; describe other masks by "
                "document_ids and vision_group_ids"
            )
        arrays["padding_mask"] = mask == 0
    if "loss_mask" in arrays:
        mask = arrays.pop("loss_mask")
        if "labels" not in arrays:
            raise ValueError("the batch holds loss_mask without labels: give the labels it applies to")
        if mask.shape != shape or not np.isin(mask, (0, 1)).all():
            raise ValueError(f"loss_mask has shape {mask.shape}: it must be {shape} of 0 and 1")
        arrays["labels"] = np.where(mask.astype(bool), arrays["labels"], IGNORE)


def _refuse_restarting_positions(position_ids: np.ndarray, padding: np.ndarray) -> None:
    text = position_ids if position_ids.ndim == 2 else position_ids[0]
    if text.shape != padding.shape:
        return  # the length check names it
    restarts = (np.diff(text, axis=1) < 0) & ~padding[:, 1:] & ~padding[:, :-1]
    if restarts.any():
        row, column = np.argwhere(restarts)[0]
        raise ValueError(
            f"position_ids restart at row {row}, token {column + 1}, but there are no document_ids: give document_ids "
            "(1-based, 0 = pad) so that packed documents stay apart"
        )


def _pad(name: str, value: np.ndarray, stream: Stream, rows: int, length: int, padded_length: int) -> np.ndarray:
    if stream.axis is None:
        return value
    axis = stream.axis if stream.axis >= 0 else value.ndim + stream.axis
    if not 0 <= axis < value.ndim or value.shape[axis] != length:
        raise ValueError(
            f"stream {name!r} has shape {value.shape}: axis {stream.axis} must hold the {length} tokens of the batch"
        )
    if axis > 0 and value.shape[axis - 1] != rows:
        raise ValueError(
            f"stream {name!r} has shape {value.shape}: the axis before its tokens must hold the {rows} rows "
            "of the batch"
        )
    missing = padded_length - length
    widths = [(0, missing if i == axis else 0) for i in range(value.ndim)]
    if stream.fill != "continue":
        return np.pad(value, widths, constant_values=stream.fill)  # type: ignore[arg-type]
    last = np.take(value, [-1], axis=axis)
    steps = np.arange(1, missing + 1, dtype=value.dtype).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
    return np.concatenate([value, last + steps], axis=axis)
