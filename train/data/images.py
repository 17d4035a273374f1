"""Opening the images of records."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from typing import Any, TypeVar

from PIL import Image, ImageOps

from cpjax.train.data.records import ImagePart, RecordError, short

_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)
_T = TypeVar("_T")


def image_size(part: ImagePart, source: str) -> tuple[int, int]:
    """(height, width) of an image as it is to be seen; only its header is read.

    Raises:
        RecordError: it is missing, or not an image.
    """

    def size(image: Image.Image) -> tuple[int, int]:
        sideways = _may_turn(image) and image.getexif().get(_ORIENTATION) in _SIDEWAYS
        return (image.width, image.height) if sideways else (image.height, image.width)

    return _read(part, source, size)


def load_image(part: ImagePart, source: str) -> Image.Image:
    """The image, turned the way it is to be seen.

    Raises:
        RecordError: it is missing, or damaged.
    """

    def load(image: Image.Image) -> Image.Image:
        may_turn = _may_turn(image)
        image.load()
        turned = ImageOps.exif_transpose(image) if may_turn else image.copy()
        turned.info = {"transparency": t} if (t := image.info.get("transparency")) is not None else {}
        return turned

    return _read(part, source, load)


def _may_turn(image: Image.Image) -> bool:
    """Whether an orientation is to be looked for; a PNG may have one at its end, but finding it takes decoding it."""
    return image.format != "PNG" or "exif" in image.info


def _read(part: ImagePart, source: str, use: Callable[[Image.Image], _T]) -> _T:
    name = short(part.path, 240) if part.path else "its bytes"
    opened: Any = part.path if part.data is None else io.BytesIO(part.data)
    try:
        with Image.open(opened) as image:
            return use(image)
    except FileNotFoundError:
        raise RecordError("missing image", f"{source} shows {name}, which does not exist: mend the path") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise RecordError(
                "missing image",
                f"{source} shows {name}, which is too long for a path: if it is base64, name it base64, not image",
            ) from None
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        what = "not an image" if isinstance(error, Image.UnidentifiedImageError) else f"damaged ({why})"
        raise RecordError("unreadable image", f"{source} shows {name}, which is {what}: replace it") from None
