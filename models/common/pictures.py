"""What the processors of many families do with pictures."""

from __future__ import annotations

from PIL import Image


def to_rgb(picture: Image.Image) -> Image.Image:
    """The picture without transparency: on white."""
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255,) * 4), picture)
    return picture.convert("RGB")
