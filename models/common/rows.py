"""From rows to streams of a host batch: what all families do alike, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpjax.shard import IGNORE


def room(rows: Sequence[Any], length: int | None, num_patches: int | None, unit: int) -> tuple[int, int]:
    """Tokens and patches of a row of the batch.

    Args:
        rows: have `input_ids` and `media`.
        length, num_patches: as wanted; None: as few as the longest row needs.
        unit: patches that become one token.

    Raises:
        ValueError: no row or an empty one, a row longer than wanted, or patches that are no multiple of `unit`.
    """
    lengths = [len(row.input_ids) for row in rows]
    if not lengths or not min(lengths):
        raise ValueError(f"rows of lengths {lengths} were given: there must be at least one row, and none empty")

    def enough(given: int | None, needed: int, name: str, what: str) -> int:
        if given is not None and given < needed:
            raise ValueError(f"{name}={given} was given, but a row has {needed} {what}: raise it or shorten the row")
        return needed if given is None else given

    size = enough(length, max(lengths), "length", "tokens")
    counts = [sum(len(media.patches) for media in row.media) for row in rows]
    patches = enough(num_patches, max(counts), "num_patches", "patches")
    if patches % unit:
        raise ValueError(f"num_patches={patches} must be a multiple of {unit}")
    return size, patches


def stack(arrays: Sequence[np.ndarray], size: int, fill: Any) -> np.ndarray:
    """Pads the first axis of each to `size` and stacks them."""
    return np.stack([np.pad(a, [(0, size - len(a))] + [(0, 0)] * (a.ndim - 1), constant_values=fill) for a in arrays])


def keep_counting(positions: np.ndarray, size: int) -> np.ndarray:
    """Positions [..., s] of a row padded to int32 [..., size], where they count on."""
    rest = positions[..., -1:] + np.arange(1, size - positions.shape[-1] + 1)
    return np.concatenate([positions, rest], axis=-1).astype(np.int32)


def text_streams(row: Any, vocab_size: int, number: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The streams of a row that do not depend on its media, unpadded, and the index at which each document starts.

    Labels are shifted here, inside each document: those of a position are its target.

    Args:
        row: has `input_ids`, `labels` and `document_ids`.
        number: of the row in its batch.

    Returns:
        input_ids, labels, padding_mask and document_ids, all [S]; and the starts.

    Raises:
        ValueError: streams of different length, ids outside the vocabulary, or documents that are no runs.
    """
    ids = np.asarray(row.input_ids, np.int32)
    documents = np.ones_like(ids) if row.document_ids is None else np.asarray(row.document_ids, np.int32)
    labels = np.full_like(ids, IGNORE) if row.labels is None else np.asarray(row.labels, np.int32)
    if ids.ndim != 1 or documents.shape != ids.shape or labels.shape != ids.shape:
        raise ValueError(
            f"row {number} has input_ids of shape {ids.shape}, labels {labels.shape} and document_ids "
            f"{documents.shape}: all must be [S]"
        )
    for name, values in (("input_ids", ids), ("labels", labels[labels != IGNORE])):
        outside = values[(values < 0) | (values >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"row {number} has the value {outside[0]} in {name}: the vocabulary ends at {vocab_size - 1}"
            )
    starts = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
    if documents.min() < 1 or len(np.unique(documents)) != len(starts):
        raise ValueError(f"document_ids of row {number} must be 1-based, and each document one run of tokens")

    targets = np.append(labels[1:], np.int32(IGNORE))
    targets[starts[1:] - 1] = IGNORE  # a document does not predict the next one
    streams = {
        "input_ids": ids, "labels": targets, "padding_mask": np.zeros(ids.shape, bool), "document_ids": documents,
    }  # fmt: skip
    return streams, starts


def count_in_documents(starts: np.ndarray, size: int) -> np.ndarray:
    """Positions [size] that begin at 0 at each start."""
    return np.arange(size) - np.repeat(starts, np.diff([*starts, size]))


def block_order(height: int, width: int, side: int) -> np.ndarray:
    """Row and column of each patch of a grid, its side x side blocks one after another: [h w, 2]."""
    grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1)
    blocks = grid.reshape(height // side, side, width // side, side, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def bilinear(source: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices into a side x side table and weights, both [n, 4], that interpolate at `source` [n, 2], row and column.

    Source coordinates are not negative; beyond the table counts as its border.
    """
    low = np.minimum(np.floor(source).astype(int), side - 1)
    taps = np.stack([low, np.minimum(low + 1, side - 1)], axis=-1)  # [n, axis, 2]
    share = np.stack([1 - (source - low), source - low], axis=-1)
    index = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    weight = share[:, 0, :, None] * share[:, 1, None, :]
    return index.reshape(-1, 4), weight.reshape(-1, 4)
