"""From rows of tokens, images and sounds to the host batch: everything that depends on other positions, in numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cpjax.models.common.rows import block_order, count_in_documents, keep_counting, room, stack, text_streams
from cpjax.models.gemma4.config import Config, VisionConfig
from cpjax.shard import IGNORE, Stream

STREAMS: Mapping[str, Stream] = {
    "vision_index": Stream(axis=1, fill=-1),
    "pixel_values": Stream(axis=None),
    "vision_segment_ids": Stream(axis=None),
    "vision_positions": Stream(axis=None),
    "audio_index": Stream(axis=1, fill=-1),
    "audio_features": Stream(axis=None),
    "audio_frames": Stream(axis=None),
}
"""The model's own streams, for `cpjax.shard.make_batch`."""


@dataclasses.dataclass(frozen=True)
class Media:
    """An image, or a video of t frames.

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
        input_ids: [S]; each frame is a run of h w / pool^2 placeholder tokens, in the order of `media`, each sound one
            of `audio_tokens`.
        labels: [S], labels[t] belongs to input_ids[t] (`prepare` shifts them); -100 = no target; None = none at all.
        document_ids: [S], 1-based, each document one run; None = a single document.
        media: images and videos in their order in the row.
        sounds: float [frames, bins], log mel spectrograms in their order in the row.
    """

    input_ids: Any
    labels: Any = None
    document_ids: Any = None
    media: Sequence[Media] = ()
    sounds: Sequence[np.ndarray] = ()


def audio_tokens(frames: int) -> int:
    """Number of placeholder tokens of a sound."""
    return -(-frames // 4)


def prepare(
    config: Config, rows: Sequence[Row], *, length: int | None = None, num_patches: int | None = None
) -> dict[str, np.ndarray]:
    """The batch of B rows, each padded on the right to the longest.

    | key | shape | |
    |---|---|---|
    | input_ids, padding_mask, document_ids | [B, S] | pads: pad id, True, 0 |
    | labels | [B, S] | the target of each position: shifted inside each document, -100 at its last token and on pads |
    | position_ids | [B, S] | from 0 in each document; pads keep counting |
    | vision_index | [B, S] | row of the pooled features of a placeholder token, -1 elsewhere |
    | vision_group_ids | [B, S] | number of the run of placeholder tokens (frames that touch are one), -1 elsewhere; only where the model's images see themselves both ways |
    | pixel_values | [B, N, patch_dim] | patches of all frames of the row |
    | vision_segment_ids | [B, N] | number of the frame in the row, 1-based; 0 = pad |
    | vision_positions | [B, N, 2] | column and row of the patch |
    | audio_index | [B, S] | row of the features of all sounds of a placeholder token, -1 elsewhere |
    | audio_features | [B, A, F, bins] | spectrograms, as many and as long as the most and longest of a row |
    | audio_frames | [B, A] | their lengths |

    Streams of vision are left out when no row has media and `num_patches` is None, those of audio when none has sounds.

    Args:
        config: the model's configuration.
        rows: at least one.
        length: S, if it is to be longer than the longest row (equal shapes compile once).
        num_patches: N, likewise; a multiple of pool^2.

    Raises:
        ValueError: placeholders that don't fit the media (number, run length, modality), patches that don't fit their
            grid or the table of positions, ids outside the vocabulary, streams of different length, or a row longer
            than `length` or `num_patches`.
    """  # noqa: E501
    size, patches = room(rows, length, num_patches, config.vision.pooling_kernel_size**2)
    batch = [_row(config, row, number) for number, row in enumerate(rows)]
    fills = {"input_ids": config.text.pad_token_id, "labels": IGNORE, "padding_mask": True, "document_ids": 0}
    frames = max((len(sound) for row in rows for sound in row.sounds), default=0)
    if frames:
        fills["audio_index"] = -1
        for own, row in zip(batch, rows, strict=True):
            own["audio_index"] = _audio_index(own["audio_index"], row.sounds, audio_tokens(frames))
    if patches:
        fills["vision_index"] = -1
        if config.text.use_bidirectional_attention == "vision":
            fills["vision_group_ids"] = -1
    out = {key: stack([row[key] for row in batch], size, fill) for key, fill in fills.items()}
    out["position_ids"] = np.stack([keep_counting(row["position_ids"], size) for row in batch])
    if patches:
        for key in ("pixel_values", "vision_segment_ids", "vision_positions"):
            out[key] = stack([row[key] for row in batch], patches, 0)
    if frames:
        out |= _audio(rows, frames)
    return out


def _row(config: Config, row: Row, number: int) -> dict[str, np.ndarray]:
    """All streams of one row, unpadded."""
    streams, starts = text_streams(row, config.text.vocab_size, number)
    ids, documents = streams["input_ids"], streams["document_ids"]
    token_of = {"image": config.image_token_id, "video": config.video_token_id}
    pool = config.vision.pooling_kernel_size
    runs = [
        (token_of[media.modality], media.grid[1] * media.grid[2] // pool**2)
        for media in row.media
        for _ in range(media.grid[0])
    ]
    vision = np.isin(ids, list(token_of.values()))
    _check_runs(ids, documents, vision, runs, f"row {number} has media of {len(runs)} frames")
    _check_sounds(config, row.sounds, number)
    audio = (ids == config.audio_token_id) & (config.audio is not None)
    runs = [(config.audio_token_id, audio_tokens(len(sound))) for sound in row.sounds]
    _check_runs(ids, documents, audio, runs, f"row {number} has {len(runs)} sounds")
    begins = vision & ~np.concatenate([[False], vision[:-1]])
    return {
        **streams,
        "position_ids": count_in_documents(starts, len(ids)),
        "vision_index": np.where(vision, np.cumsum(vision) - 1, -1).astype(np.int32),
        "vision_group_ids": np.where(vision, np.cumsum(begins) - 1, -1).astype(np.int32),
        "audio_index": np.where(audio, np.cumsum(audio) - 1, -1),
        **_vision(config.vision, row.media, number),
    }


def _check_runs(
    ids: np.ndarray, documents: np.ndarray, placeholder: np.ndarray, runs: Sequence[tuple[int, int]], what: str
) -> None:
    """Raises unless the placeholder tokens are runs of these (token, length), each within a document."""
    places, used = np.flatnonzero(placeholder), 0
    for i, (token, run) in enumerate(runs):
        own = places[used : used + run]
        if not len(own):
            raise ValueError(f"{what}, but placeholder tokens for {i}")
        together = len(own) == run and own[-1] - own[0] == run - 1 and documents[own[0]] == documents[own[-1]]
        if not together or (ids[own] != token).any():
            raise ValueError(
                f"{what}, of which number {i + 1} needs {run} tokens {token} at {own[0]}: its placeholders differ in "
                "number, kind, or reach into another document"
            )
        used += run
    if used < len(places):
        raise ValueError(
            f"{what}, and a placeholder token at {places[used]} beyond them: give what it stands for or remove it"
        )


def _check_sounds(config: Config, sounds: Sequence[np.ndarray], number: int) -> None:
    for sound in sounds:
        if config.audio is None:
            raise ValueError(f"row {number} has sounds, but the model has no audio tower: leave them out")
        if sound.ndim != 2 or not len(sound) or sound.shape[1] != config.audio.mel_bins:
            raise ValueError(
                f"row {number} has a sound of shape {sound.shape}: it must be [frames, {config.audio.mel_bins}]"
            )


def _audio_index(packed: np.ndarray, sounds: Sequence[np.ndarray], room: int) -> np.ndarray:
    """From places among the features of the sounds, one after another, to those where each has room for `room`."""
    places = [number * room + np.arange(audio_tokens(len(sound))) for number, sound in enumerate(sounds)]
    return np.concatenate([*places, [-1]])[packed].astype(np.int32)


def _audio(rows: Sequence[Row], frames: int) -> dict[str, np.ndarray]:
    """The spectrograms of all rows, padded to `frames` each and to the same number a row."""
    bins = next(sound.shape[1] for row in rows for sound in row.sounds)
    shape = len(rows), max(len(row.sounds) for row in rows)
    features, lengths = np.zeros((*shape, frames, bins), np.float32), np.zeros(shape, np.int32)
    for number, row in enumerate(rows):
        for i, sound in enumerate(row.sounds):
            features[number, i, : len(sound)], lengths[number, i] = sound, len(sound)
    return {"audio_features": features, "audio_frames": lengths}


def _vision(config: VisionConfig, media: Sequence[Media], number: int) -> dict[str, np.ndarray]:
    """The packed patches of a row and what the tower must know about each."""
    pool, side = config.pooling_kernel_size, config.position_embedding_size
    pixels, segments = [np.zeros((0, config.patch_dim), np.float32)], [np.zeros(0, int)]
    positions = [np.zeros((0, 2), int)]
    frame = 0
    for item in media:
        time, height, width = item.grid
        if min(item.grid) < 1 or height % pool or width % pool or (item.modality == "image" and time != 1):
            raise ValueError(
                f"row {number} has {item.modality} grid {item.grid}: (t, h, w) must be positive, h and w multiples of "
                f"{pool}, and t = 1 for an image"
            )
        if max(height, width) > side:
            raise ValueError(f"row {number} has grid {item.grid}: the model has {side} positions along a side")
        if item.patches.shape != (time * height * width, config.patch_dim):
            raise ValueError(
                f"row {number} has patches of shape {item.patches.shape} for the grid {item.grid}: it must be "
                f"{(time * height * width, config.patch_dim)}"
            )
        pixels.append(item.patches)
        segments.append(frame + 1 + np.repeat(np.arange(time), height * width))
        positions.append(np.tile(block_order(height, width, pool)[:, ::-1], (time, 1)))
        frame += time
    return {
        "pixel_values": np.concatenate(pixels).astype(np.float32),
        "vision_segment_ids": np.concatenate(segments).astype(np.int32),
        "vision_positions": np.concatenate(positions).astype(np.int32),
    }


def patchify(config: VisionConfig, pixels: np.ndarray) -> Media:
    """Cuts an image or a video into the tower's patches, those that are pooled into one token one after another.

    Args:
        config: the tower's configuration.
        pixels: an image [H, W, 3], or a video [F, H, W, 3], in 0 .. 1.

    Raises:
        ValueError: a size that is not a multiple of patch_size x pooling_kernel_size, or another number of channels.
    """
    side, pool = config.patch_size, config.pooling_kernel_size
    modality: Literal["image", "video"] = "video" if pixels.ndim == 4 else "image"
    frames = pixels if modality == "video" else pixels[None]
    if (
        frames.ndim != 4
        or not frames.shape[0]
        or any(n % (side * pool) or not n for n in frames.shape[1:3])
        or frames.shape[3] != 3
    ):
        raise ValueError(
            f"pixels of shape {pixels.shape} were given: an image is [H, W, 3], a video [F, H, W, 3], H and W "
            f"multiples of {side * pool}"
        )
    time, height, width = frames.shape[0], frames.shape[1] // side, frames.shape[2] // side
    cut = frames.reshape(time, height // pool, pool, side, width // pool, pool, side, 3)
    patches = cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(time * height * width, config.patch_dim)
    return Media(np.ascontiguousarray(patches, np.float32), (time, height, width), modality)
