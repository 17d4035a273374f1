"""Packed documents: each one padded by itself, and where every input token went."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpjax.shard.layout import Layout, Packed, TableLayout, Zigzag
from cpjax.shard.sharder import Sharder


def pack(
    cu_seqlens: Any,
    layout: Layout,
    *,
    padding_mask: Any = None,
    rows: int = 1,
    padded_length: int | None = None,
    axis_name: str = "cp",
) -> Sharder:
    """A sharder for documents that follow one another in one sequence of S tokens, or in input rows flattened to one.

    Every document is padded, at its end, to a multiple of `layout.divisor` under `Packed`, and of `layout.multiple`
    under the other layouts (a compression ratio, say); pads of the input are dropped. Host arithmetic only.

    Args:
        cu_seqlens: int [documents + 1], ascending from 0 to S: where in the flattened input documents begin and the
            last one ends. Empty documents are allowed.
        layout: over the padded sequence.
        padding_mask: bool, S in all: True for a pad of the input.
        rows: input rows of S / rows tokens that were flattened, each beginning with a document of its own.
        padded_length: T, to give batches with other documents the same shapes; the smallest possible by default,
            which is at most S + documents x (that multiple - 1), rounded up to `layout.divisor`.

    Raises:
        ValueError: boundaries that do not ascend from 0, documents that cross rows, a mask of another size, a T that
            is too small or indivisible, or a layout whose table is not made from documents.
    """
    cu_seqlens = as_boundaries(cu_seqlens)
    length = int(cu_seqlens[-1])
    pads = np.zeros(length, bool) if padding_mask is None else as_bool("padding_mask", padding_mask).reshape(-1)
    if pads.size != length:
        raise ValueError(f"padding_mask holds {pads.size} tokens, but cu_seqlens ends at {length}: they must agree")
    if rows < 1 or length % rows or not np.isin(np.arange(rows) * (length // rows), cu_seqlens).all():
        raise ValueError(
            f"cu_seqlens up to {length} was given for {rows} rows: the rows must be equally long and each must begin "
            "with a document of its own"
        )
    if isinstance(layout, TableLayout) and not isinstance(layout, Packed):
        raise ValueError(f"{layout} was given to pack: use Packed, or a layout that does not depend on the batch")

    unit = layout.divisor if isinstance(layout, Packed) else layout.multiple
    before = np.concatenate([[0], np.cumsum(~pads)])  # tokens before each input position, pads not counted
    padded = -(-np.diff(before[cu_seqlens]) // unit) * unit
    starts = np.concatenate([[0], np.cumsum(padded)])
    total = int(starts[-1])
    if padded_length is None:
        padded_length = layout.pad_length(max(total, 1))
    if padded_length < total:
        raise ValueError(
            f"padded_length={padded_length} was given, but the documents, each padded to a multiple of {unit}, take "
            f"{total}: give at least {layout.pad_length(total)}"
        )
    layout.check_length(padded_length)

    document = np.repeat(np.arange(len(padded)), np.diff(cu_seqlens))
    places = starts[document] + before[:-1] - before[cu_seqlens[document]]
    table = None
    if isinstance(layout, Packed):
        spans = np.append(padded, padded_length - total)  # the pads at the end are split like a document
        local = np.repeat(spans // layout.cp, spans // layout.cp)  # of every local token, its document's share
        begin = np.repeat(starts, spans // layout.cp)
        slot = np.arange(local.size) - begin // layout.cp
        table = begin + Zigzag(layout.cp).place(slot, local // 2, np.arange(layout.cp)[:, None])
        table = table.astype(np.int32)
    places = np.where(pads, -1, places).astype(np.int32)
    return Sharder(layout, length, padded_length, axis_name, rows, table, places)


def as_boundaries(cu_seqlens: Any) -> np.ndarray:
    """Document boundaries as int64 [documents + 1].

    Raises:
        ValueError: boundaries that do not ascend from 0.
    """
    cu_seqlens = np.asarray(cu_seqlens)
    if cu_seqlens.dtype.kind not in "iu":
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}: it must be of integers")
    cu_seqlens = cu_seqlens.astype(np.int64)
    if cu_seqlens.ndim != 1 or cu_seqlens.size < 2 or cu_seqlens[0] or (np.diff(cu_seqlens) < 0).any():
        raise ValueError(
            f"cu_seqlens has shape {cu_seqlens.shape} and starts with {cu_seqlens.reshape(-1)[:1].tolist()}: it must "
            "be [documents + 1], start at 0 and never descend"
        )
    return cu_seqlens


def as_bool(name: str, mask: Any) -> np.ndarray:
    """A mask of bool, or of numbers 0 and 1.

    Raises:
        ValueError: it holds anything else.
    """
    mask = np.asarray(mask)
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{name} of dtype {mask.dtype} holds other than True and False: make it bool")
    return mask.astype(bool)


def documents_to_cu_seqlens(document_ids: np.ndarray, padding_mask: np.ndarray) -> np.ndarray:
    """The boundaries, for `pack`, of the documents and of the rows of [B, S] streams.

    Raises:
        ValueError: a document whose tokens are not together.
    """
    rows, length = document_ids.shape
    tokens = np.flatnonzero(~padding_mask)  # in the flattened rows
    keys = tokens // length * (int(document_ids.max()) + 1) + document_ids.reshape(-1)[tokens]
    starts = tokens[1:][np.diff(keys) != 0]
    if tokens.size and len(starts) + 1 > len(np.unique(keys)):
        raise ValueError(
            "document_ids return to a document after another one, which some layouts pad by itself: put its tokens "
            "together or give them ids of their own"
        )
    return np.union1d(np.arange(rows + 1) * length, starts)


def pads_inside(cu_seqlens: np.ndarray, padding_mask: np.ndarray) -> np.ndarray:
    """Which pads, bool like the mask, lie among the tokens of their document rather than before or after them."""
    before = np.concatenate([[0], np.cumsum(~padding_mask)])  # tokens before each position of the flattened rows
    document = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    first, last = before[cu_seqlens[document]], before[cu_seqlens[document + 1]]
    inside = (first < before[:-1]) & (before[:-1] < last)
    return padding_mask & inside.reshape(padding_mask.shape)
