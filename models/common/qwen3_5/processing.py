"""From pictures to the tower's patches: sizes, sampling of frames, pixel values, and the text that stands for media.

The rules are those of the processors that Hugging Face folders of this family name in preprocessor_config.json and
video_preprocessor_config.json (transformers' Qwen2VLImageProcessor, Qwen3VLVideoProcessor and Qwen3VLProcessor).
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from PIL import Image

from cpjax.models.common.checkpoint import CONFIG, read_json
from cpjax.models.common.pictures import frame_range, to_rgb
from cpjax.models.common.qwen3_5.config import Config
from cpjax.models.common.qwen3_5.prepare import Media, patchify

_IMAGES, _VIDEOS, _BOTH = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pictures of one modality become numbers: (value x rescale - mean) / std, after resizing.

    Attributes:
        min_pixels, max_pixels: bounds of height x width of an image, of frames x height x width of a video.
    """

    min_pixels: float
    max_pixels: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int = int(Image.Resampling.BICUBIC)
    rescale: float = 1 / 255


_IMAGE = Pixels(
    56 * 56, 28 * 28 * 1280, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)  # fmt: skip
_VIDEO = Pixels(128 * 32 * 32, 32 * 32 * 768, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""The rules where a folder's files are silent."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Which frames of a video are looked at: `fps` per second, within bounds."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768


@dataclasses.dataclass(frozen=True)
class MediaPlan:
    """What an image or a video will be, known from its size alone.

    Attributes:
        modality: decides the placeholder token.
        size: (height, width) in pixels after resizing.
        grid: (t, h, w) in patches.
        frames: numbers of the frames that are looked at.
        seconds: time of each of the t patch-deep frames of a video; empty for an image.
    """

    modality: Literal["image", "video"]
    size: tuple[int, int]
    grid: tuple[int, int, int]
    frames: tuple[int, ...] = (0,)
    seconds: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Processor:
    """The pictures' side of a Hugging Face folder.

    A family says which configuration config.json holds.

    Attributes:
        config: of the model; its patch sizes are the processor's.
        image, video: pixel rules of each modality.
        sampling: of frames.
    """

    config: Config
    image: Pixels
    video: Pixels
    sampling: Sampling

    config_type: ClassVar[type[Config]]

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Self:
        """Reads config.json and the processors' files of a Hugging Face folder; values not given are the family's.

        Raises:
            ValueError: a file is missing or damaged, or asks for what this implementation does not do.
        """
        path = pathlib.Path(folder)
        config = cls.config_type.from_dict(read_json(path / CONFIG))
        both = read_json(path / _BOTH) if (path / _BOTH).is_file() else {}
        images = both.get("image_processor") or read_json(path / _IMAGES)
        videos = both.get("video_processor") or (read_json(path / _VIDEOS) if (path / _VIDEOS).is_file() else {})
        for name, source in ((_IMAGES, images), (_VIDEOS, videos)):
            _check(config, source, path / name)
        sampling = {f.name: videos[f.name] for f in dataclasses.fields(Sampling) if videos.get(f.name) is not None}
        return cls(config, _pixels(_IMAGE, images), _pixels(_VIDEO, videos), Sampling(**sampling))

    def plan_image(
        self,
        height: int,
        width: int,
        *,
        min_pixels: float | None = None,
        max_pixels: float | None = None,
        resized_height: float | None = None,
        resized_width: float | None = None,
    ) -> MediaPlan:
        """An image of this size, with limits of its own as qwen-vl-utils knows them.

        Args:
            min_pixels, max_pixels: bounds of height x width in the place of the folder's.
            resized_height, resized_width: the size instead, rounded to whole tokens.

        Raises:
            ValueError: one side is more than 200 times the other, or the limits do not go together.
        """
        size = self._given_size(resized_height, resized_width)
        if size is None:
            rule = _bounded(self.image, min_pixels, max_pixels)
            size = smart_resize(height, width, self._factor, rule)
        return MediaPlan("image", size, (1, *self._patches(size)))

    def plan_video(
        self,
        count: int,
        height: int,
        width: int,
        fps: float,
        *,
        min_pixels: float | None = None,
        max_pixels: float | None = None,
        total_pixels: float | None = None,
        resized_height: float | None = None,
        resized_width: float | None = None,
        nframes: float | None = None,
        min_frames: float | None = None,
        max_frames: float | None = None,
        video_start: float | None = None,
        video_end: float | None = None,
    ) -> MediaPlan:
        """A video of `count` frames of this size, `fps` of them a second, with limits as qwen-vl-utils knows them.

        Args:
            min_pixels, max_pixels: bounds of height x width of a frame.
            total_pixels: bound of height x width of all its patch-deep frames; these and it in the place of the
                folder's bounds of the whole video.
            resized_height, resized_width: the size instead, rounded to whole tokens.
            nframes: how many frames are looked at, rounded to whole patches.
            min_frames, max_frames: bounds of that number in the place of the folder's, rounded to whole patches.
            video_start, video_end: seconds between which they lie.

        Raises:
            ValueError: fewer than two frames, one side is more than 200 times the other, or the limits do not fit.
        """
        depth, rule = self.config.vision.temporal_patch_size, self.sampling
        if count < depth:
            raise ValueError(f"a video of {count} frames was given: it needs at least {depth}")
        first, last = frame_range(count, fps, video_start, video_end)
        shown = last - first + 1
        fewest = rule.min_frames if min_frames is None else math.ceil(min_frames / depth) * depth
        most = rule.max_frames if max_frames is None else math.floor(max_frames / depth) * depth
        wanted = min(max(int(shown / fps * rule.fps), fewest), most, shown)
        if nframes is not None:
            wanted = round(nframes / depth) * depth
        if not 1 <= wanted <= shown:
            raise ValueError(f"{wanted} frames of a video are to be seen: it must be {depth} to {shown}")
        frames = np.linspace(first, last, wanted).round().astype(int).tolist()
        size = self._given_size(resized_height, resized_width)
        if size is None:
            if min(height, width) < self._factor:
                scale = self._factor / min(height, width)
                height, width = int(height * scale), int(width * scale)
            least, largest = (None if pixels is None else pixels * wanted for pixels in (min_pixels, max_pixels))
            if total_pixels is not None:
                smallest = self.video.min_pixels / wanted if min_pixels is None else min_pixels
                largest = min(largest or math.inf, max(total_pixels * depth, wanted * int(1.05 * smallest)))
            size = smart_resize(height, width, self._factor, _bounded(self.video, least, largest), wanted, depth)
        filled = [*frames, *[frames[-1]] * (-wanted % depth)]
        seconds = tuple((filled[i] / fps + filled[i + depth - 1] / fps) / 2 for i in range(0, len(filled), depth))
        return MediaPlan("video", size, (len(seconds), *self._patches(size)), tuple(frames), seconds)

    def media(self, plan: MediaPlan, pictures: Sequence[Image.Image]) -> Media:
        """The patches of those pictures (one, or those of `plan.frames`), whose size the plan was made for."""
        rule = self.image if plan.modality == "image" else self.video
        height, width = plan.size
        resized = [to_rgb(picture).resize((width, height), Image.Resampling(rule.resample)) for picture in pictures]
        pixels = np.stack([np.asarray(picture, np.float32) for picture in resized]) * np.float32(rule.rescale)
        pixels -= np.asarray(rule.mean, np.float32)
        pixels /= np.asarray(rule.std, np.float32)
        if plan.modality == "image":
            return patchify(self.config.vision, pixels[0])
        missing = -len(pixels) % self.config.vision.temporal_patch_size
        return patchify(self.config.vision, np.concatenate([pixels, np.repeat(pixels[-1:], missing, axis=0)]))

    def text(self, plan: MediaPlan, token: Callable[[int], str]) -> tuple[str, str]:
        """What a chat template writes for such media, and what it is replaced by: one placeholder token per frame.

        A video's frames stand apart, each after its time, and replace the template's own marks, as with the
        transformers (4.57) that Qwen3-VL came with; later ones leave those marks around all frames. `tokens` says how
        often each placeholder is repeated.

        Args:
            token: the text of a token id.
        """
        if plan.modality == "image":
            return (token(self.config.image_token_id),) * 2
        start, end = token(self.config.vision_start_token_id), token(self.config.vision_end_token_id)
        frame = f"{start}{token(self.config.video_token_id)}{end}"
        return frame, "".join(f"<{second:.1f} seconds>{frame}" for second in plan.seconds)

    def tokens(self, plan: MediaPlan) -> list[int]:
        """Number of placeholder tokens of each frame."""
        time, height, width = plan.grid
        return [height * width // self.config.vision.spatial_merge_size**2] * time

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that stand for media, and for nothing else."""
        return self.config.image_token_id, self.config.video_token_id

    @property
    def _factor(self) -> int:
        return self.config.vision.patch_size * self.config.vision.spatial_merge_size

    def _given_size(self, height: float | None, width: float | None) -> tuple[int, int] | None:
        """The size that is asked for, in whole tokens."""
        if height is None and width is None:
            return None
        if not height or not width:
            raise ValueError(
                f"resized_height {height} and resized_width {width} were given: both are needed, above 0, or neither"
            )
        rows, columns = (max(round(side / self._factor), 1) * self._factor for side in (height, width))
        return rows, columns

    def _patches(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // self.config.vision.patch_size, size[1] // self.config.vision.patch_size


def smart_resize(
    height: int, width: int, factor: int, rule: Pixels, frames: int = 1, depth: int = 1
) -> tuple[int, int]:
    """The size nearest to (height, width) whose sides are multiples of `factor` and whose pixels obey the rule.

    Pixels of a video are counted over its frames, rounded to a multiple of `depth`.

    Raises:
        ValueError: one side is more than 200 times the other, or a side would vanish.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a picture of {height} x {width} pixels was given: no side may be over 200 times the other")
    rows, columns = (round(n / factor) * factor for n in (height, width))
    total = round(frames / depth) * depth * rows * columns
    if total > rule.max_pixels:
        shrink = math.sqrt(frames * height * width / rule.max_pixels)
        rows, columns = (max(factor, math.floor(n / shrink / factor) * factor) for n in (height, width))
    elif total < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (frames * height * width))
        rows, columns = (math.ceil(n * grow / factor) * factor for n in (height, width))
    if not rows or not columns:
        raise ValueError(
            f"a picture of {height} x {width} pixels was given: a side is too short for patches of {factor}"
        )
    return rows, columns


def _bounded(rule: Pixels, least: float | None, most: float | None) -> Pixels:
    """The rule with these bounds in the place of its own, of which one that was not given gives way.

    Raises:
        ValueError: they exclude each other.
    """
    if least is not None and most is not None and least > most:
        raise ValueError(f"bounds of {least:g} to {most:g} pixels were given: the first must not be above the second")
    lower = rule.min_pixels if least is None else least
    upper = rule.max_pixels if most is None else most
    lower, upper = (min(lower, upper), upper) if least is None else (lower, max(lower, upper))
    return dataclasses.replace(rule, min_pixels=lower, max_pixels=upper)


def _pixels(default: Pixels, source: Mapping[str, Any]) -> Pixels:
    """The rules in a processor's file."""
    size = source.get("size") or {}
    given: dict[str, Any] = {
        "min_pixels": source.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": source.get("max_pixels") or size.get("longest_edge"),
        "mean": source.get("image_mean") and tuple(source["image_mean"]),
        "std": source.get("image_std") and tuple(source["image_std"]),
        "resample": source.get("resample"),
        "rescale": source.get("rescale_factor"),
    }
    return dataclasses.replace(default, **{name: value for name, value in given.items() if value is not None})


def _check(config: Config, source: Mapping[str, Any], path: pathlib.Path) -> None:
    """Refuses settings that would change what the model sees."""
    vision = config.vision
    for name, needed in (
        ("patch_size", vision.patch_size), ("merge_size", vision.spatial_merge_size),
        ("temporal_patch_size", vision.temporal_patch_size), ("do_resize", True), ("do_rescale", True),
        ("do_normalize", True), ("do_convert_rgb", True), ("do_sample_frames", True), ("cap_pixels_per_frame", False),
    ):  # fmt: skip
        value = source.get(name)
        if value is not None and value != needed:
            raise ValueError(f"{path} says {name}={value!r}: only {needed!r} works with this model")
