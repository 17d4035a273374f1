"""What the processors of many families do with pictures."""

from __future__ import annotations

import math

from PIL import Image


def to_rgb(picture: Image.Image) -> Image.Image:
    """The picture without transparency: on white."""
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255,) * 4), picture)
    return picture.convert("RGB")


def frame_range(count: int, fps: float, start: float | None, end: float | None) -> tuple[int, int]:
    """Numbers of the first and the last frame of a video that lie from second `start` to `end`, as in qwen-vl-utils.

    Args:
        count: frames of the whole video.
        fps: of them a second.
        start, end: None: its own.

    Raises:
        ValueError: there are not two frames between them.
    """
    first = 0 if start is None else math.ceil(start * fps)
    last = count - 1 if end is None else min(math.floor(end * fps), count - 1)
    if (start, end) != (None, None) and first >= last:
        raise ValueError(
            f"a video of {count} frames at {fps:g} a second was given with video_start {start} and video_end {end}: "
            "there must be two frames between them"
        )
    return first, last
