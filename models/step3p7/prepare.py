"""From rows of tokens and images to the host batch: everything that depends on other positions, in numpy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpjax.models.common.rows import bilinear, count_in_documents, keep_counting, room, stack, text_streams
from cpjax.models.step3p7.config import Config, VisionConfig
from cpjax.shard import IGNORE, Stream

STREAMS: Mapping[str, Stream] = {
    "vision_index": Stream(axis=1, fill=-1),
    "pixel_values": Stream(axis=None),
    "vision_segment_ids": Stream(axis=None),
    "vision_positions": Stream(axis=None),
    "vision_table_indices": Stream(axis=None),
    "vision_table_weights": Stream(axis=None),
    "vision_windows1": Stream(axis=None),
    "vision_windows2": Stream(axis=None),
}
"""The model's own streams, for `cpjax.shard.make_batch`."""


@dataclasses.dataclass(frozen=True)
class Media:
    """An image as one or more views, for the family's processor crops and then the whole.

    Attributes:
        patches: [N, patch_dim], in the order of `patchify`: each view's, padded below and on the right with zeros to
            sides that are multiples of 4.
        grid: (h, w) of each view, in patches, without that padding.
        modality: always "image".
    """

    patches: np.ndarray
    grid: tuple[tuple[int, int], ...]
    modality: str = "image"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a batch: one or more documents.

    Attributes:
        input_ids: [S]; each view is a run of ceil(h / 4) ceil(w / 4) placeholder tokens, in the order of `media`.
        labels: [S], labels[t] belongs to input_ids[t] (`prepare` shifts them); -100 = no target; None = none at all.
        document_ids: [S], 1-based, each document one run; None = a single document.
        media: images in their order in the row.
    """

    input_ids: Any
    labels: Any = None
    document_ids: Any = None
    media: Sequence[Media] = ()


def prepare(
    config: Config, rows: Sequence[Row], *, length: int | None = None, num_patches: int | None = None
) -> dict[str, np.ndarray]:
    """The batch of B rows, each padded on the right to the longest.

    | key | shape | |
    |---|---|---|
    | input_ids, padding_mask, document_ids | [B, S] | pads: pad id, True, 0 |
    | labels | [B, S] | the target of each position: shifted inside each document, -100 at its last token and on pads |
    | position_ids | [B, S] | from 0 in each document |
    | vision_index | [B, S] | row of the features of a placeholder token, -1 elsewhere |
    | pixel_values | [B, N, patch_dim] | patches of all views of the row |
    | vision_segment_ids | [B, N] | number of the view in the row, 1-based; 0 = pad |
    | vision_positions | [B, N, 2] | row and column of the patch |
    | vision_table_indices, vision_table_weights | [B, N, 4] | bilinear look-up in the table of learned positions |
    | vision_windows1 | [B, N / 4, 9] | the patches in each window of the first convolution; -1 = beyond the border |
    | vision_windows2 | [B, N / 16, 9] | what of the first the second sees |

    The last eight are left out when no row has media and `num_patches` is None.

    Args:
        config: the model's configuration.
        rows: at least one.
        length: S, if it is to be longer than the longest row (equal shapes compile once).
        num_patches: N, likewise; a multiple of 16.

    Raises:
        ValueError: placeholders that don't fit the media (number or run length), patches that don't fit their grid, ids
            outside the vocabulary, streams of different length, or a row longer than `length` or `num_patches`.
    """
    unit = config.vision.spatial_merge_size**2
    size, patches = room(rows, length, num_patches, unit)
    batch = [_row(config, row, number) for number, row in enumerate(rows)]
    fills = {
        "input_ids": config.text.pad_token_id, "labels": IGNORE, "padding_mask": True, "document_ids": 0,
        "vision_index": -1,
    }  # fmt: skip
    out = {key: stack([row[key] for row in batch], size, fill) for key, fill in fills.items()}
    out["position_ids"] = np.stack([keep_counting(row["position_ids"], size) for row in batch])
    if not patches:
        del out["vision_index"]
        return out
    for key in STREAMS.keys() - {"vision_index"}:
        entries = patches // {"vision_windows1": 4, "vision_windows2": unit}.get(key, 1)
        out[key] = stack([row[key] for row in batch], entries, -1 if "windows" in key else 0)
    return out


def _row(config: Config, row: Row, number: int) -> dict[str, np.ndarray]:
    """All streams of one row, unpadded."""
    streams, starts = text_streams(row, config.text.vocab_size, number)
    ids = streams["input_ids"]
    vision = _vision(config.vision, row.media, number)
    placeholder = ids == config.image_token_id
    _check_placeholders(config, placeholder, streams["document_ids"], row.media, number)
    return {
        **streams,
        "position_ids": count_in_documents(starts, len(ids)),
        "vision_index": np.where(placeholder, np.cumsum(placeholder) - 1, -1).astype(np.int32),
        **vision,
    }


def _check_placeholders(
    config: Config, placeholder: np.ndarray, documents: np.ndarray, media: Sequence[Media], number: int
) -> None:
    """Each view must be one run of tokens in one document."""
    needed = [_tokens(config.vision, view) for item in media for view in item.grid]
    places = np.flatnonzero(placeholder)
    if len(places) != sum(needed):
        raise ValueError(
            f"row {number} has {len(places)} placeholder tokens {config.image_token_id}, but its {len(media)} images "
            f"of {len(needed)} views need {sum(needed)}: give all of its images, and each view its own tokens"
        )
    for view, run in enumerate(np.split(places, np.cumsum(needed)[:-1]) if needed else []):
        if run[-1] - run[0] + 1 != len(run) or len(set(documents[run].tolist())) != 1:
            raise ValueError(
                f"row {number} needs {len(run)} tokens {config.image_token_id} in a row at {run[0]} for view "
                f"{view + 1}, all in one document"
            )


def _tokens(config: VisionConfig, view: tuple[int, int]) -> int:
    """Number of features of a view."""
    return math.prod(_padded(config, view)) // config.spatial_merge_size**2


def _padded(config: VisionConfig, view: tuple[int, int]) -> tuple[int, int]:
    """Sides of a view, padded so that each feature is of the same number of patches."""
    height, width = (side + -side % config.spatial_merge_size for side in view)
    return height, width


def _vision(config: VisionConfig, media: Sequence[Media], number: int) -> dict[str, np.ndarray]:
    """The packed patches of a row and what the tower must know about each."""
    pixels, segments, positions = [np.zeros((0, config.patch_dim), np.float32)], [np.zeros(0, int)], []
    indices, weights = [np.zeros((0, 4), int)], [np.zeros((0, 4))]
    windows = [[np.zeros((0, 9), int)], [np.zeros((0, 9), int)]]
    for item in media:
        if not item.grid or any(min(view) < 1 for view in item.grid):
            raise ValueError(
                f"row {number} has an image of the grids {item.grid}: it needs at least one view (h, w), and none empty"
            )
        if item.patches.shape != (total := sum(math.prod(_padded(config, v)) for v in item.grid), config.patch_dim):
            raise ValueError(
                f"row {number} has patches of shape {item.patches.shape} for the grids {item.grid}: it must be "
                f"{(total, config.patch_dim)}"
            )
        pixels.append(item.patches)
        for view in item.grid:
            room = _padded(config, view)
            coordinates = np.stack(np.divmod(np.arange(math.prod(room)), room[1]), axis=-1)
            # the border of the table lies on the border of the grid
            source = (coordinates + 0.5) * config.table_side / np.array(view) - 0.5
            index, weight = bilinear(np.maximum(source, 0), config.table_side)
            done = sum(map(len, segments))
            segments.append(np.where((coordinates < view).all(-1), len(segments), 0))
            positions.append(coordinates)
            indices.append(index)
            weights.append(weight)
            for level in windows:
                level.append(_windows(view, room, done))
                view, room, done = (-(-view[0] // 2), -(-view[1] // 2)), (room[0] // 2, room[1] // 2), done // 4
    return {
        "pixel_values": np.concatenate(pixels).astype(np.float32),
        "vision_segment_ids": np.concatenate(segments).astype(np.int32),
        "vision_positions": np.concatenate([np.zeros((0, 2), int), *positions]).astype(np.int32),
        "vision_table_indices": np.concatenate(indices).astype(np.int32),
        "vision_table_weights": np.concatenate(weights).astype(np.float32),
        "vision_windows1": np.concatenate(windows[0]).astype(np.int32),
        "vision_windows2": np.concatenate(windows[1]).astype(np.int32),
    }


def _windows(grid: tuple[int, int], room: tuple[int, int], start: int) -> np.ndarray:
    """What the 3 x 3 windows of a convolution with stride 2 and a border of one see: [h w / 4, 9], -1 on the border.

    Args:
        grid: the sides (h, w).
        room: those that it is padded to; the padding is seen as border.
        start: number of the grid's first entry.
    """
    (row, of_row), (column, of_column) = (
        (places := 2 * np.arange(most // 2)[:, None] + np.arange(-1, 2), (places >= 0) & (places < side))  # [n / 2, 3]
        for side, most in zip(grid, room, strict=True)
    )
    index = start + row[:, None, :, None] * room[1] + column[None, :, None, :]
    inside = of_row[:, None, :, None] & of_column[None, :, None, :]
    return np.where(inside, index, -1).reshape(-1, 9)


def patchify(config: VisionConfig, views: Sequence[np.ndarray]) -> Media:
    """Cuts the views of an image into the tower's patches, row by row; what is less than a patch is left out.

    Args:
        config: the tower's configuration.
        views: each [H, W, C], already normalised.

    Raises:
        ValueError: a size of less than patch_size, or another number of channels.
    """
    side, patches, grid = config.patch_size, [], []
    for view in views:
        if view.ndim != 3 or min(view.shape[:2]) < side or view.shape[2] != config.num_channels:
            raise ValueError(
                f"a view of shape {view.shape} was given: it must be [H, W, {config.num_channels}], H and W at least "
                f"{side}"
            )
        height, width = view.shape[0] // side, view.shape[1] // side
        room = _padded(config, (height, width))
        cut = view[: height * side, : width * side].reshape(height, side, width, side, config.num_channels)
        cut = np.pad(cut.transpose(0, 2, 4, 1, 3), [(0, room[0] - height), (0, room[1] - width), *[(0, 0)] * 3])
        patches.append(cut.reshape(-1, config.patch_dim))
        grid.append((height, width))
    return Media(np.ascontiguousarray(np.concatenate(patches), np.float32), tuple(grid))
