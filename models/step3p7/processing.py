"""From pictures to the tower's patches: views and their sizes, pixel values, and the text that stands for an image.

The rules are those of transformers' Step3p7ImageProcessor and Step3p7Processor: a large or long image is shown as a
grid of square crops and, behind these, as a whole; others as a whole alone.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from cpjax.models.common.checkpoint import CONFIG, read_json
from cpjax.models.common.pictures import to_rgb
from cpjax.models.step3p7.config import Config
from cpjax.models.step3p7.prepare import Media, patchify

_IMAGES, _BOTH = "preprocessor_config.json", "processor_config.json"


@dataclasses.dataclass(frozen=True)
class Views:
    """How an image becomes views, and these numbers: (value x rescale - mean) / std.

    Attributes:
        whole, crop: sides of the two kinds of views, in pixels.
        longest: side that an image is shrunk to first, if longer.
    """

    whole: int = 728
    crop: int = 504
    longest: int = 3024
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    resample: int = int(Image.Resampling.BILINEAR)
    rescale: float = 1 / 255


@dataclasses.dataclass(frozen=True)
class MediaPlan:
    """What an image will be, known from its size alone.

    Attributes:
        grid: (h, w) in patches of each view, crops first.
        square: side of a black square that the image is put into first, at the top left; None: it is not.
        size: (height, width) that it then has before it is squeezed into the view of the whole.
        cropped: (height, width) that it is stretched to before it is cut into crops.
        window: side of each crop; 0: there are none.
        columns: crops in a row.
    """

    grid: tuple[tuple[int, int], ...]
    square: int | None
    size: tuple[int, int]
    cropped: tuple[int, int]
    window: int
    columns: int
    modality: Literal["image"] = "image"
    frames: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Processor:
    """The pictures' side of a Hugging Face folder.

    Attributes:
        config: of the model; its patch size is the processor's.
        views: rules of the images.
    """

    config: Config
    views: Views

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Processor:
        """Reads config.json and the processor's file of a Hugging Face folder; values not given are the family's.

        Raises:
            ValueError: a file is missing or damaged, or asks for what this implementation does not do.
        """
        path = pathlib.Path(folder)
        config = Config.from_dict(read_json(path / CONFIG))
        both = read_json(path / _BOTH) if (path / _BOTH).is_file() else {}
        source = both.get("image_processor") or read_json(path / _IMAGES)
        size = source.get("size") or {}
        given: dict[str, Any] = {
            "whole": size.get("height"),
            "crop": source.get("patch_size"),
            "longest": source.get("max_image_size"),
            "mean": source.get("image_mean") and tuple(source["image_mean"]),
            "std": source.get("image_std") and tuple(source["image_std"]),
            "resample": source.get("resample"),
            "rescale": source.get("rescale_factor"),
        }
        views = Views(**{name: value for name, value in given.items() if value is not None})
        _check(config, views, source, path / _IMAGES)
        return cls(config, views)

    def plan_image(self, height: int, width: int) -> MediaPlan:
        """An image of this size.

        Thin strips are put into a square. What fits into the view of the whole is cut only if it is long, into squares
        as wide as its short side; larger images are cut into squares of `views.crop` (or of the short side, if that is
        less and the image is very long), their sides first rounded to whole squares: up from a fifth of one.
        """
        rule, square = self.views, None
        if min(height, width) < 32 and max(height, width) > 4 * min(height, width):
            square = height = width = max(height, width)
        if (longest := max(height, width)) > rule.longest:
            scale = rule.longest / longest
            height, width = int(height * scale), int(width * scale)
        short, long = sorted((height, width))
        if long <= rule.whole:
            window = short if long > 1.5 * short else 0
        else:
            window = min(short, rule.crop) if long > 4 * short else rule.crop
        patches = rule.whole // self.config.vision.patch_size
        whole = ((patches, patches),)
        if not window:
            return MediaPlan(whole, square, (height, width), (height, width), 0, 0)
        rows, columns = (n // window + (n % window > 0.2 * window) if n >= window else 0 for n in (height, width))
        cropped = (rows * window or height, columns * window or width)
        rows, columns = max(rows, 1), max(columns, 1)
        patches = rule.crop // self.config.vision.patch_size
        grid = ((patches, patches),) * (rows * columns) + whole
        return MediaPlan(grid, square, (height, width), cropped, window, columns)

    def plan_video(self, count: int, height: int, width: int, fps: float) -> MediaPlan:
        """Raises:
        ValueError: always, as the family sees images alone.
        """
        raise ValueError("a video was given, but Step 3.7 sees images alone: give some of its frames as images")

    def media(self, plan: MediaPlan, pictures: Sequence[Image.Image]) -> Media:
        """The patches of the one picture, whose size the plan was made for."""
        picture, rule = to_rgb(pictures[0]), self.views
        if plan.square:
            black = Image.new("RGB", (plan.square, plan.square))
            black.paste(picture)
            picture = black

        def resize(picture: Image.Image, height: int, width: int) -> Image.Image:
            return picture.resize((width, height), Image.Resampling(rule.resample))

        shown = []
        if plan.window:
            cropped = resize(picture, *plan.cropped)
            for number in range(len(plan.grid) - 1):
                top, left = (n * plan.window for n in divmod(number, plan.columns))
                bottom, right = min(top + plan.window, cropped.height), min(left + plan.window, cropped.width)
                shown.append(resize(cropped.crop((left, top, right, bottom)), rule.crop, rule.crop))
        shown.append(resize(resize(picture, *plan.size), rule.whole, rule.whole))
        return patchify(self.config.vision, [self._pixels(view) for view in shown])

    def _pixels(self, view: Image.Image) -> np.ndarray:
        pixels = np.asarray(view, np.float32) * np.float32(self.views.rescale)
        return (pixels - np.asarray(self.views.mean, np.float32)) / np.asarray(self.views.std, np.float32)

    def text(self, plan: MediaPlan, token: Callable[[int], str]) -> tuple[str, str]:
        """What a chat template writes for an image, and what it is replaced by: one placeholder token per view.

        Each view stands between marks of its kind, and a line of crops ends in one, but for the last line. `tokens`
        says how often each placeholder is repeated.

        Args:
            token: the text of a token id.
        """
        mark = token(self.config.image_token_id)
        crops = len(plan.grid) - 1
        shown = ""
        for number in range(1, crops + 1):
            shown += f"<patch_start>{mark}<patch_end>"
            if number % plan.columns == 0 and number < crops:
                shown += "<patch_newline>"
        return mark, f"{shown}<im_start>{mark}<im_end>"

    def tokens(self, plan: MediaPlan) -> list[int]:
        """Number of placeholder tokens of each view."""
        return [height * width // self.config.vision.spatial_merge_size**2 for height, width in plan.grid]

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that stand for media, and for nothing else."""
        return (self.config.image_token_id,)


def _check(config: Config, views: Views, source: Mapping[str, Any], path: pathlib.Path) -> None:
    """Refuses settings that would change what the model sees."""
    vision = config.vision
    for name, needed in (
        ("do_rescale", True), ("do_normalize", True), ("do_convert_rgb", True),
        ("vision_patch_size", vision.patch_size), ("downsampler_stride", vision.spatial_merge_size),
    ):  # fmt: skip
        value = source.get(name)
        if value is not None and value != needed:
            raise ValueError(f"{path} says {name}={value!r}: only {needed!r} works with this model")
    unit = vision.patch_size * vision.spatial_merge_size
    for name, side in (("size", views.whole), ("patch_size", views.crop)):
        # transformers writes (side // unit)^2 placeholders for a view, while the tower has a feature for what is less
        if side < unit or side // vision.patch_size % vision.spatial_merge_size:
            raise ValueError(f"{path} says {name}={side}: it must be a multiple of {unit}")
