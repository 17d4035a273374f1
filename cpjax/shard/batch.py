"""From a host batch to the full-length device batch: every stream padded the way its meaning demands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from cpjax.shard.layout import Layout, Packed
from cpjax.shard.packing import as_bool, as_boundaries, documents_to_cu_seqlens, pack, pads_inside
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
_KINDS = {"input_ids": "iu", "labels": "i", "position_ids": "iu", "document_ids": "iu", "vision_group_ids": "i"}
"""Of NumPy dtypes; streams with negative numbers need signed ones."""
_FLAT = ("labels", "padding_mask", "document_ids", "vision_group_ids")
"""Streams that are [B, S] and nothing else."""
_CONSUMED = ("attention_mask", "loss_mask", "cu_seqlens")
"""What a batch may hold beside streams; the result does not."""


def make_batch(
    batch: Mapping[str, Any],
    layout: Layout | Sharder,
    *,
    pad_id: int = 0,
    streams: Mapping[str, Stream] | None = None,
    padded_length: int | None = None,
    packed_rows: int = 1,
    axis_name: str = "cp",
) -> tuple[dict[str, np.ndarray], Sharder]:
    """Pads a host batch to a length the layout can split; nothing is sharded yet.

    With `cu_seqlens` in the batch, or under `Packed`, the rows are flattened into one row [1, T] of documents that are
    padded one by one, see `pack`; pads before and after the tokens of a document are dropped, documents are numbered
    anew over all rows, and pads keep counting from the last token of their document. With `packed_rows` they become
    several such rows [R, T], which devices or microbatches can share, each with a map of its own (`Sharder.by_row`).
    Otherwise rows stay rows, padded at their end.

    Pads are known by `padding_mask` and `document_ids`, which are always in the result, never by token value. What the
    batch says of them means the same under every layout: a token is a pad where either says so, and in the result both
    do. A pad among the tokens of a document stays where it is, since distances count it; recurrences start anew
    behind it. A label on a pad is refused: it would be a target lost, or one nobody meant.

    | stream | shape | pads |
    |---|---|---|
    | input_ids, or inputs_embeds | [B, S], [B, S, E] | `pad_id`, 0 |
    | labels (already shifted: the target of position t) | [B, S] | -100 |
    | padding_mask (True = pad; or attention_mask, 1 = token) | [B, S] | True |
    | position_ids (default: 0, 1, 2 ... in each row, or packed document) | [B, S] or [axes, B, S] | keep counting |
    | document_ids (1-based, 0 = pad; default: one document a row) | [B, S] | 0 |
    | vision_group_ids (-1 = text) | [B, S] | -1 |
    | loss_mask (1 = counts) | [B, S] | folded into labels as -100 |
    | cu_seqlens (document boundaries in the flattened rows), instead of document_ids | [documents + 1] | consumed |

    Args:
        batch: host arrays by name; exactly one of input_ids and inputs_embeds.
        layout: decides the padded length T; or the sharder that `dispatch` made for these rows.
        pad_id: token id of the pads.
        streams: the model's own tensors, by name: token axis and fill. May not redefine a stream of the table.
        padded_length: T, to give batches of packed documents the same shapes; the smallest possible by default.
        packed_rows: R, each made of as many neighbouring rows of the input; for `Packed`.
        axis_name: mesh axis of the cp ranks, unless a sharder says it.

    Returns:
        The full-length batch (numpy, T tokens along each token axis) and its sharder.

    Raises:
        ValueError: no row or no token, a missing or unknown stream, ids or labels that are not integers, a stream of
            another length or batch size, an attention mask that is not [B, S], a negative label other than -100, a
            label on a pad, a document id below 1 where the mask says there is a token, documents that are not one
            run of tokens each, position ids that restart without document ids (packed documents would attend to each
            other), what `pack` refuses, a sharder for another length, or rows that do not become `packed_rows`.
    """
    arrays = {name: np.asarray(value) for name, value in batch.items()}
    table = dict(_STREAMS, input_ids=Stream(fill=pad_id))
    for name, stream in (streams or {}).items():
        if name in table:
            raise ValueError(f"stream {name!r} is cpjax's own: give the model's stream another name")
        table[name] = stream
    given = layout if isinstance(layout, Sharder) else None
    layout = layout.layout if isinstance(layout, Sharder) else layout
    packs = "cu_seqlens" in arrays or isinstance(layout, Packed)
    rows, length = _check_arrays(arrays, table, packs)
    _settle_pads(arrays, (rows, length))
    if packed_rows > 1:
        make = functools.partial(make_batch, layout=layout, pad_id=pad_id, streams=streams, axis_name=axis_name)
        return _pack_rows(arrays, table, layout, packed_rows, padded_length, make)
    if given is not None and (
        "cu_seqlens" in arrays or given.places is not None or given.length != length or padded_length is not None
    ):
        raise ValueError(
            f"make_batch was given a sharder of {given.layout} for S={given.length} and a batch of {length} tokens a "
            "row: the lengths must agree, and for packed documents, or another padded_length, give the layout instead"
        )
    if packs:
        sharder = _pack(arrays, layout, padded_length, axis_name)
    else:
        if "position_ids" not in arrays:
            arrays["position_ids"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        sharder = given or make_sharder(length, layout, axis_name, padded_length=padded_length)
    sources = sharder.sources()
    return {name: _pad(value, table[name], sharder, sources) for name, value in arrays.items()}, sharder


def _check_arrays(arrays: dict[str, np.ndarray], table: Mapping[str, Stream], packs: bool) -> tuple[int, int]:
    """Makes ids and labels int32; returns the number of rows, and of the tokens of each.

    Raises:
        ValueError: see `make_batch`.
    """
    primary = [name for name in ("input_ids", "inputs_embeds") if name in arrays]
    if len(primary) != 1:
        raise ValueError(
            f"the batch holds {primary or 'neither input_ids nor inputs_embeds'}: give exactly one of them"
        )
    shape = arrays[primary[0]].shape
    if len(shape) != (2 if primary[0] == "input_ids" else 3):
        wanted = "[B, S]" if primary[0] == "input_ids" else "[B, S, E]"
        raise ValueError(f"{primary[0]} has shape {shape}: it must be {wanted}")
    rows, length = shape[:2]
    if not rows or not length:
        raise ValueError(
            f"{primary[0]} has shape {shape}: there must be at least one row, and at least one token in it"
        )
    for name, kinds in _KINDS.items():
        if name not in arrays:
            continue
        value, limits = arrays[name], np.iinfo(np.int32)
        if value.dtype.kind not in kinds:
            raise ValueError(f"{name} has dtype {value.dtype}: make it int32")
        for bound in (int(value.min(initial=0)), int(value.max(initial=0))):
            if not limits.min <= bound <= limits.max:
                raise ValueError(f"{name} has numbers up to {bound}, which int32 does not hold")
        arrays[name] = value.astype(np.int32)
    for name, value in arrays.items():
        if name in _CONSUMED:
            continue
        if name not in table:
            raise ValueError(
                f"unknown stream {name!r} of shape {value.shape}: declare it, streams={{{name!r}: Stream(axis, fill)}} "
                "(axis=None when it has no token axis), or drop it from the batch"
            )
        _check_shape(name, value, table[name].axis, rows, length, packs)
    return rows, length


def _check_shape(name: str, value: np.ndarray, axis: int | None, rows: int, length: int, packs: bool) -> None:
    if axis is None:
        return
    place = axis if axis >= 0 else value.ndim + axis
    if not 0 <= place < value.ndim or value.shape[place] != length or (name in _FLAT and value.ndim != 2):
        raise ValueError(
            f"stream {name!r} has shape {value.shape}: axis {axis} must hold the {length} tokens of the batch"
            + (", and it must be [B, S]" if name in _FLAT else "")
        )
    if value.shape[place - 1] != rows if place else packs and rows > 1:
        raise ValueError(
            f"stream {name!r} has shape {value.shape}: the axis before its tokens must hold the {rows} rows "
            "of the batch"
        )


def _pack_rows(
    arrays: Mapping[str, np.ndarray],
    table: Mapping[str, Stream],
    layout: Layout | Sharder,
    count: int,
    padded_length: int | None,
    make: Callable[..., tuple[dict[str, np.ndarray], Sharder]],
) -> tuple[dict[str, np.ndarray], Sharder]:
    """What `make` makes of each of `count` groups of rows, as the rows of one batch."""
    axes = {
        name: stream.axis % arrays[name].ndim - 1
        for name, stream in table.items()
        if name in arrays and stream.axis is not None
    }
    rows = {arrays[name].shape[axis] for name, axis in axes.items()}
    if not isinstance(layout, Packed) or "cu_seqlens" in arrays or any(size % count for size in rows):
        raise ValueError(
            f"packed_rows={count} was given for {sorted(rows)} rows under {layout}: it needs the layout Packed, a "
            "multiple of that many rows, and document_ids instead of cu_seqlens"
        )
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for name, value in arrays.items():
        cut = np.split(value, count, axes[name]) if name in axes else [value] * count
        for part, own in zip(parts, cut, strict=True):
            part[name] = own
    if padded_length is None:
        padded_length = max(make(part)[1].padded_length for part in parts)
    batches, sharders = zip(*(make(part, padded_length=padded_length) for part in parts), strict=True)
    out = {}
    for name, value in batches[0].items():
        axis = table[name].axis
        whole = [batch[name] for batch in batches]
        out[name] = value if axis is None else np.concatenate(whole, axis % value.ndim - 1)
    return out, jax.tree.map(lambda *maps: np.stack(maps), *sharders)


def _pack(arrays: dict[str, np.ndarray], layout: Layout, padded_length: int | None, axis_name: str) -> Sharder:
    """The sharder of packed documents; sets document and, by default, position ids [B, S]."""
    padding = arrays["padding_mask"]
    if "cu_seqlens" in arrays:
        cu_seqlens = arrays.pop("cu_seqlens")
        last = cu_seqlens.reshape(-1)[-1:].tolist()
        if last != [padding.size]:
            raise ValueError(
                f"cu_seqlens ends at {last}: it must end at {padding.size}, the tokens of all {len(padding)} rows with "
                "their pads"
            )
        cu_seqlens = as_boundaries(cu_seqlens)
    else:
        cu_seqlens = documents_to_cu_seqlens(arrays["document_ids"], padding)
    dropped = padding & ~pads_inside(cu_seqlens, padding)
    sharder = pack(
        cu_seqlens,
        layout,
        padding_mask=dropped,
        rows=len(padding),
        padded_length=padded_length,
        axis_name=axis_name,
    )
    document = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    arrays["document_ids"] = np.where(padding, 0, 1 + document.reshape(padding.shape)).astype(np.int32)
    if "position_ids" not in arrays:
        before = np.cumsum(~dropped) - ~dropped.reshape(-1)
        arrays["position_ids"] = (before - before[cu_seqlens[document]]).reshape(padding.shape).astype(np.int32)
    return sharder


def _settle_pads(arrays: dict[str, np.ndarray], shape: tuple[int, int]) -> None:
    """Makes padding_mask, labels, document_ids (unless there are cu_seqlens) and vision_group_ids agree.

    Raises:
        ValueError: see `make_batch`.
    """
    _fold_loss_mask(arrays, shape)
    mask_name, padding = _read_padding(arrays, shape)
    labels = arrays.get("labels", np.full(shape, IGNORE))
    labelled = labels != IGNORE
    if (wrong := labelled & (labels < 0)).any():
        raise ValueError(
            f"labels has {_at(labels, wrong)}: a target is a token id, from 0 on, and only {IGNORE} stands for none"
        )
    if (wrong := labelled & padding).any():
        raise ValueError(
            f"labels has {_at(labels, wrong)}, which is a pad by {mask_name}: make the label {IGNORE} there, or let "
            f"{mask_name} say that it is a token"
        )
    if "cu_seqlens" in arrays and "document_ids" in arrays:
        raise ValueError("the batch holds both cu_seqlens and document_ids: give one of them")
    if "document_ids" in arrays:
        ids = arrays["document_ids"]
        wrong = (ids < 1) & ~padding & (labelled if mask_name is None else True)
        if wrong.any():
            because = f"{mask_name} says that it is a token" if mask_name else "labels has a target"
            raise ValueError(
                f"document_ids has {_at(ids, wrong)}, where {because}: number documents from 1, as 0 stands for a pad"
            )
        padding = padding | (ids < 1)
        documents_to_cu_seqlens(ids, padding)  # raises
    elif "cu_seqlens" not in arrays:
        if "position_ids" in arrays:
            _refuse_restarting_positions(arrays["position_ids"], padding)
        ids = np.ones(shape, np.int32)
    arrays["padding_mask"] = padding
    if "cu_seqlens" not in arrays:
        arrays["document_ids"] = np.where(padding, 0, ids).astype(np.int32)
    if "vision_group_ids" in arrays:
        arrays["vision_group_ids"] = np.where(padding, -1, arrays["vision_group_ids"]).astype(np.int32)


def _at(values: np.ndarray, where: np.ndarray) -> str:
    """The first of the values [B, S] there, and its place, in words."""
    row, token = np.argwhere(where)[0]
    return f"{values[row, token]} at row {row}, token {token}"


def _read_padding(arrays: dict[str, np.ndarray], shape: tuple[int, int]) -> tuple[str | None, np.ndarray]:
    """The name of the mask that says what is a pad, None if there is none, and the pads [B, S]."""
    if "attention_mask" in arrays:
        mask = arrays.pop("attention_mask")
        if "padding_mask" in arrays:
            raise ValueError("the batch holds both attention_mask and padding_mask: give one of them")
        if mask.shape != shape or not np.isin(mask, (0, 1)).all():
            raise ValueError(
                f"attention_mask has shape {mask.shape}: it must be {shape} of 0 and 1; describe other masks by "
                "document_ids and vision_group_ids"
            )
        return "attention_mask", mask == 0
    if "padding_mask" in arrays:
        return "padding_mask", as_bool("padding_mask", arrays["padding_mask"])
    return None, np.zeros(shape, bool)


def _fold_loss_mask(arrays: dict[str, np.ndarray], shape: tuple[int, int]) -> None:
    """Replaces loss_mask by ignored labels."""
    if "loss_mask" not in arrays:
        return
    mask = arrays.pop("loss_mask")
    if "labels" not in arrays:
        raise ValueError("the batch holds loss_mask without labels: give the labels it applies to")
    if mask.shape != shape or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"loss_mask has shape {mask.shape}: it must be {shape} of 0 and 1")
    arrays["labels"] = np.where(mask.astype(bool), arrays["labels"], IGNORE)


def _refuse_restarting_positions(position_ids: np.ndarray, padding: np.ndarray) -> None:
    text = position_ids if position_ids.ndim == 2 else position_ids[0]
    tokens = np.where(padding, -1, np.arange(padding.shape[1]))
    before = np.maximum.accumulate(tokens, axis=1)[:, :-1]  # the last token up to there, -1 if there is none
    restarts = np.take_along_axis(text, np.maximum(before, 0), axis=1) > text[:, 1:]
    restarts &= (before >= 0) & ~padding[:, 1:]
    if restarts.any():
        row, column = np.argwhere(restarts)[0]
        raise ValueError(
            f"position_ids restart at row {row}, token {column + 1}, but there are no document_ids: give document_ids "
            "(1-based, 0 = pad) so that packed documents stay apart"
        )


def _pad(value: np.ndarray, stream: Stream, sharder: Sharder, sources: np.ndarray) -> np.ndarray:
    """The stream with the tokens `sources` [T] of its (flattened, if the sharder packs) rows, and pads."""
    if stream.axis is None:
        return value
    axis = stream.axis if stream.axis >= 0 else value.ndim + stream.axis
    if sharder.rows > 1:
        value = value.reshape(*value.shape[: axis - 1], 1, sharder.length, *value.shape[axis + 1 :])
    pads = np.flatnonzero(sources < 0)
    last = np.maximum.accumulate(np.where(sources < 0, -1, np.arange(sources.size)))  # place of the last token
    out = np.take(value, sources[np.maximum(last, 0)], axis=axis)
    tokens = np.moveaxis(out, axis, 0)
    if stream.fill != "continue":
        tokens[pads] = stream.fill
    else:
        steps = (pads - last[pads]).astype(value.dtype)
        tokens[pads] += steps.reshape(-1, *[1] * (value.ndim - 1))
    return out
