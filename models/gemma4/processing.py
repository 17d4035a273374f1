"""From pictures to the tower's patches: sizes, sampling of frames, pixel values, and the text that stands for media.

The rules are those of the processors that Hugging Face folders of this family name in processor_config.json or
preprocessor_config.json and video_preprocessor_config.json (transformers' Gemma4ImageProcessorPil, Gemma4VideoProcessor
and Gemma4Processor).
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from cpjax.models.common.checkpoint import CONFIG, read_json
from cpjax.models.common.pictures import frame_range
from cpjax.models.gemma4.config import Config
from cpjax.models.gemma4.prepare import Media, patchify

_IMAGES, _VIDEOS, _BOTH = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pictures of one modality become numbers, value x rescale after resizing, and how many tokens one has.

    Attributes:
        max_soft_tokens: most tokens of an image, or of a frame of a video.
    """

    max_soft_tokens: int
    resample: int = int(Image.Resampling.BICUBIC)
    rescale_factor: float = 1 / 255


@dataclasses.dataclass(frozen=True)
class MediaPlan:
    """What an image or a video will be, known from its size alone.

    Attributes:
        modality: decides the placeholder token.
        size: (height, width) in pixels after resizing.
        grid: (t, h, w) in patches.
        frames: numbers of the frames that are looked at.
        seconds: time of each frame of a video; empty for an image.
    """

    modality: Literal["image", "video"]
    size: tuple[int, int]
    grid: tuple[int, int, int]
    frames: tuple[int, ...] = (0,)
    seconds: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Processor:
    """The pictures' side of a Hugging Face folder.

    Attributes:
        config: of the model; its patch and pooling sizes are the processor's.
        image, video: pixel rules of each modality.
        num_frames: most frames of a video that are looked at.
    """

    config: Config
    image: Pixels
    video: Pixels
    num_frames: int

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Processor:
        """Reads config.json and the processors' files of a Hugging Face folder; values not given are the family's.

        Raises:
            ValueError: a file is missing or damaged, or asks for what this implementation does not do.
        """
        path = pathlib.Path(folder)
        config = Config.from_dict(read_json(path / CONFIG))
        both = read_json(path / _BOTH) if (path / _BOTH).is_file() else {}
        images = both.get("image_processor") or read_json(path / _IMAGES)
        videos = both.get("video_processor") or (read_json(path / _VIDEOS) if (path / _VIDEOS).is_file() else {})
        for name, source in ((_IMAGES, images), (_VIDEOS, videos)):
            _check(config, source, path / name)
        return cls(config, _pixels(Pixels(280), images), _pixels(Pixels(70), videos), videos.get("num_frames") or 32)

    def plan_image(self, height: int, width: int) -> MediaPlan:
        """An image of this size."""
        size = self._size(height, width, self.image)
        return MediaPlan("image", size, (1, *self._patches(size)))

    def plan_video(
        self,
        count: int,
        height: int,
        width: int,
        fps: float,
        *,
        nframes: float | None = None,
        video_start: float | None = None,
        video_end: float | None = None,
    ) -> MediaPlan:
        """A video of `count` frames of this size, `fps` of them a second: `num_frames` of them, or all if fewer.

        Args:
            nframes: how many instead.
            video_start, video_end: seconds between which they lie.

        Raises:
            ValueError: there are not so many frames, or no two between those seconds.
        """
        first, last = frame_range(count, fps, video_start, video_end)
        shown = last - first + 1
        wanted = min(self.num_frames, shown) if nframes is None else int(nframes)
        if not 1 <= wanted <= shown:
            raise ValueError(f"{wanted} frames of a video are to be seen: it must be 1 to {shown}")
        frames = tuple(first + number * shown // wanted for number in range(wanted))
        size = self._size(height, width, self.video)
        return MediaPlan("video", size, (wanted, *self._patches(size)), frames, tuple(n / fps for n in frames))

    def media(self, plan: MediaPlan, pictures: Sequence[Image.Image]) -> Media:
        """The patches of those pictures (one, or those of `plan.frames`), whose size the plan was made for."""
        rule = self.image if plan.modality == "image" else self.video
        height, width = plan.size
        resized = [_rgb(picture).resize((width, height), Image.Resampling(rule.resample)) for picture in pictures]
        pixels = np.stack([np.asarray(picture, np.float32) for picture in resized]) * np.float32(rule.rescale_factor)
        return patchify(self.config.vision, pixels[0] if plan.modality == "image" else pixels)

    def text(self, plan: MediaPlan, token: Callable[[int], str]) -> tuple[str, str]:
        """What a chat template writes for such media, and what it is replaced by: one placeholder token per frame.

        Each frame stands between marks; a frame of a video comes after its time. `tokens` says how often each
        placeholder is repeated.

        Args:
            token: the text of a token id.
        """
        config = self.config
        mark = token(config.image_token_id if plan.modality == "image" else config.video_token_id)
        frame = f"{token(config.boi_token_id)}{mark}{token(config.eoi_token_id)}"
        if plan.modality == "image":
            return mark, frame
        return mark, " ".join(f"{int(second // 60):02}:{int(second % 60):02} {frame}" for second in plan.seconds)

    def tokens(self, plan: MediaPlan) -> list[int]:
        """Number of placeholder tokens of each frame."""
        time, height, width = plan.grid
        return [height * width // self.config.vision.pooling_kernel_size**2] * time

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that stand for media, and for nothing else."""
        return self.config.placeholder_ids

    def _size(self, height: int, width: int, rule: Pixels) -> tuple[int, int]:
        """The largest size of about the same proportions with at most so many tokens, both sides whole tokens long."""
        side, most = self.config.vision.patch_size * self.config.vision.pooling_kernel_size, rule.max_soft_tokens
        scale = math.sqrt(most * side**2 / (height * width))
        rows, columns = (math.floor(scale * n / side) for n in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return rows * side, columns * side

    def _patches(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // self.config.vision.patch_size, size[1] // self.config.vision.patch_size


def _rgb(picture: Image.Image) -> Image.Image:
    """Without transparency: on white."""
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255,) * 4), picture)
    return picture.convert("RGB")


def _pixels(default: Pixels, source: Mapping[str, Any]) -> Pixels:
    """The rules in a processor's file."""
    names = (field.name for field in dataclasses.fields(Pixels))
    return dataclasses.replace(default, **{name: source[name] for name in names if source.get(name) is not None})


def _check(config: Config, source: Mapping[str, Any], path: pathlib.Path) -> None:
    """Refuses settings that would change what the model sees."""
    for name, needed in (
        ("patch_size", config.vision.patch_size), ("pooling_kernel_size", config.vision.pooling_kernel_size),
        ("do_resize", True), ("do_rescale", True), ("do_convert_rgb", True), ("do_sample_frames", True),
        ("image_mean", [0.0] * 3), ("image_std", [1.0] * 3),
    ):  # fmt: skip
        value = source.get(name)
        if value is not None and value != needed:
            raise ValueError(f"{path} says {name}={value!r}: only {needed!r} works with this model")
    if source.get("fps") is not None:
        raise ValueError(f"{path} says fps={source['fps']!r}: only num_frames works with this model")
