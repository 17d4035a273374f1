"""From rows of tokens and images to the host batch: everything that depends on other positions, in numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cpjax.models.common.qwen3_5.config import Config, VisionConfig
from cpjax.models.common.rows import bilinear, block_order, keep_counting, room, stack, text_streams
from cpjax.shard import IGNORE, Stream

STREAMS: Mapping[str, Stream] = {
    "vision_index": Stream(axis=1, fill=-1),
    "pixel_values": Stream(axis=None),
    "vision_segment_ids": Stream(axis=None),
    "vision_positions": Stream(axis=None),
    "vision_table_indices": Stream(axis=None),
    "vision_table_weights": Stream(axis=None),
}
"""The model's own streams, for `cpjax.shard.make_batch`."""


@dataclasses.dataclass(frozen=True)
class Media:
    """An image, or a video of t patch-deep frames.

    Attributes:
        patches: [t h w, patch_dim], in the order of `patchify`.
        grid: (t, h, w) in patches; t = 1 for an image.
        modality: decides the placeholder token.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    modality: Literal["image", "video"] = "image"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a batch: one or more documents.

    Attributes:
        input_ids: [S]; each frame is a run of h w / merge^2 placeholder tokens, in the order of `media`.
        labels: [S], labels[t] belongs to input_ids[t] (`prepare` shifts them); -100 = no target; None = none at all.
        document_ids: [S], 1-based, each document one run; None = a single document.
        media: images and videos in their order in the row.
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
    | position_ids | [3, B, S] | time, height, width; from 0 in each document |
    | vision_index | [B, S] | row of the merged features of a placeholder token, -1 elsewhere |
    | pixel_values | [B, N, patch_dim] | patches of all frames of the row |
    | vision_segment_ids | [B, N] | number of the frame in the row, 1-based; 0 = pad |
    | vision_positions | [B, N, 2] | row and column of the patch |
    | vision_table_indices, vision_table_weights | [B, N, 4] | bilinear look-up in the table of learned positions |

    The last six are left out when no row has media and `num_patches` is None.

    Args:
        config: the model's configuration.
        rows: at least one.
        length: S, if it is to be longer than the longest row (equal shapes compile once).
        num_patches: N, likewise; a multiple of merge^2.

    Raises:
        ValueError: placeholders that don't fit the media (number, run length, modality), patches that don't fit their
            grid, ids outside the vocabulary, streams of different length, or a row longer than `length` or
            `num_patches`.
    """
    size, patches = room(rows, length, num_patches, config.vision.spatial_merge_size**2)
    batch = [_row(config, row, number) for number, row in enumerate(rows)]
    fills = {
        "input_ids": config.text.pad_token_id or 0, "labels": IGNORE, "padding_mask": True, "document_ids": 0,
        "vision_index": -1,
    }  # fmt: skip
    out = {key: stack([row[key] for row in batch], size, fill) for key, fill in fills.items()}
    out["position_ids"] = np.stack([keep_counting(row["position_ids"], size) for row in batch], axis=1)
    if not patches:
        del out["vision_index"]
        return out
    for key in STREAMS.keys() - {"vision_index"}:
        out[key] = stack([row[key] for row in batch], patches, 0)
    return out


def _row(config: Config, row: Row, number: int) -> dict[str, np.ndarray]:
    """All streams of one row, unpadded."""
    streams, starts = text_streams(row, config.text.vocab_size, number)
    ids = streams["input_ids"]
    placeholder = (ids == config.image_token_id) | (ids == config.video_token_id)
    return {
        **streams,
        "position_ids": mrope_positions(config, ids, row.media, starts.tolist(), where=f"row {number}"),
        "vision_index": np.where(placeholder, np.cumsum(placeholder) - 1, -1).astype(np.int32),
        **_vision(config.vision, row.media, number),
    }


def mrope_positions(
    config: Config, input_ids: np.ndarray, media: Sequence[Media], starts: Sequence[int] = (0,), where: str = "the row"
) -> np.ndarray:
    """Time, height and width position of each token of a row, int32 [3, S].

    Text counts up on all three axes. A frame that starts at p has time p, and p + row and p + column of the merged
    grid; the token after it is at p + max(rows, columns). Frames are told apart by their grids, so that images may
    touch. A video's frames are separate runs and count as images.

    Args:
        starts: index of the first token of each document; each counts from 0.

    Raises:
        ValueError: the placeholder tokens don't fit the media.
    """
    merge = config.vision.spatial_merge_size
    token_of = {"image": config.image_token_id, "video": config.video_token_id}
    frames = [
        (token_of[m.modality], m.grid[1] // merge, m.grid[2] // merge) for m in media for _ in range(m.grid[0])
    ]  # fmt: skip
    placeholder = np.isin(input_ids, list(token_of.values()))
    out = np.empty((3, len(input_ids)), np.int32)
    used = 0
    for first, end in zip(starts, [*starts[1:], len(input_ids)], strict=True):
        token, position = first, 0
        while token < end:
            if not placeholder[token]:
                run = int(np.argmax(placeholder[token:end])) or end - token
                out[:, token : token + run] = position + np.arange(run)
                position += run
            else:
                if used == len(frames):
                    raise ValueError(
                        f"{where} has a placeholder token at {token} beyond its {len(frames)} frames of images and "
                        "video: give its media or remove the token"
                    )
                kind, height, width = frames[used]
                run = height * width
                if token + run > end or (input_ids[token : token + run] != kind).any():
                    raise ValueError(
                        f"{where} needs {run} tokens {kind} at {token} for frame {used + 1} ({height} x {width} merged "
                        "patches): its placeholders differ in number, kind, or reach into another document"
                    )
                rows, columns = np.divmod(np.arange(run), width)
                out[:, token : token + run] = position + np.stack([np.zeros(run, int), rows, columns])
                position += max(height, width)
                used += 1
            token += run
    if used < len(frames):
        raise ValueError(f"{where} has media of {len(frames)} frames but placeholder tokens for {used}")
    return out


def _vision(config: VisionConfig, media: Sequence[Media], number: int) -> dict[str, np.ndarray]:
    """The packed patches of a row and what the tower must know about each."""
    merge = config.spatial_merge_size
    pixels, segments, positions = [np.zeros((0, config.patch_dim), np.float32)], [np.zeros(0, int)], []
    indices, weights = [np.zeros((0, 4), int)], [np.zeros((0, 4))]
    frame = 0
    for item in media:
        time, height, width = item.grid
        if min(item.grid) < 1 or height % merge or width % merge or (item.modality == "image" and time != 1):
            raise ValueError(
                f"row {number} has {item.modality} grid {item.grid}: (t, h, w) must be positive, h and w multiples of "
                f"{merge}, and t = 1 for an image"
            )
        if item.patches.shape != (time * height * width, config.patch_dim):
            raise ValueError(
                f"row {number} has patches of shape {item.patches.shape} for the grid {item.grid}: it must be "
                f"{(time * height * width, config.patch_dim)}"
            )
        coordinates = np.tile(block_order(height, width, merge), (time, 1))
        # the corners of the table lie on the corners of the grid
        source = coordinates * (config.table_side - 1) / np.maximum(np.array([height, width]) - 1, 1)
        index, weight = bilinear(source, config.table_side)
        pixels.append(item.patches)
        segments.append(frame + 1 + np.repeat(np.arange(time), height * width))
        positions.append(coordinates)
        indices.append(index)
        weights.append(weight)
        frame += time
    return {
        "pixel_values": np.concatenate(pixels).astype(np.float32),
        "vision_segment_ids": np.concatenate(segments).astype(np.int32),
        "vision_positions": np.concatenate([np.zeros((0, 2), int), *positions]).astype(np.int32),
        "vision_table_indices": np.concatenate(indices).astype(np.int32),
        "vision_table_weights": np.concatenate(weights).astype(np.float32),
    }


def patchify(config: VisionConfig, pixels: np.ndarray) -> Media:
    """Cuts an image or a video into the tower's patches.

    Args:
        config: the tower's configuration.
        pixels: an image [H, W, C], or a video [F, H, W, C] whose F is a multiple of temporal_patch_size; already
            normalised. An image is repeated to fill the depth of a patch.

    Raises:
        ValueError: a size that is not a multiple of patch_size x spatial_merge_size, or another number of channels.
    """
    depth, side, merge = config.temporal_patch_size, config.patch_size, config.spatial_merge_size
    modality: Literal["image", "video"] = "video" if pixels.ndim == 4 else "image"
    frames = pixels if modality == "video" else np.repeat(pixels[None], depth, axis=0)
    if (
        frames.ndim != 4
        or frames.shape[0] % depth
        or any(n % (side * merge) or not n for n in frames.shape[1:3])
        or frames.shape[3] != config.in_channels
    ):
        raise ValueError(
            f"pixels of shape {pixels.shape} were given: an image is [H, W, {config.in_channels}], a video "
            f"[F, H, W, {config.in_channels}], H and W multiples of {side * merge}, F of {depth}"
        )
    time, height, width = frames.shape[0] // depth, frames.shape[1] // side, frames.shape[2] // side
    cut = frames.reshape(time, depth, height // merge, merge, side, width // merge, merge, side, config.in_channels)
    patches = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(time * height * width, config.patch_dim)
    return Media(np.ascontiguousarray(patches, np.float32), (time, height, width), modality)
