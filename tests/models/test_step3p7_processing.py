"""Pictures become the views that the family's own processor makes of them."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from cpjax.models.step3p7 import Processor
from cpjax.models.step3p7.processing import Views
from tests.models.pictures import PICTURES, picture
from tests.models.step3p7_cases import FOLDER, GOLDENS

PROCESSOR = Processor.from_folder(FOLDER)
SIZES = {**PICTURES, "strip": (9, 60)}


def golden():
    return load_file(GOLDENS / "step3p7-processing.safetensors")


def views_of(media):
    """Its views as pictures, in levels 0 .. 255."""
    side, out, start = PROCESSOR.config.vision.patch_size, [], 0
    for height, width in media.grid:
        patches = media.patches[start : start + height * width].reshape(height, width, 3, side, side)
        pixels = patches.transpose(0, 3, 1, 4, 2).reshape(height * side, width * side, 3)
        out.append(255 * (pixels * np.array(PROCESSOR.views.std) + PROCESSOR.views.mean))
        start += height * width
    assert start == len(media.patches)
    return out


@pytest.mark.parametrize("name", SIZES)
def test_images_equal_the_golden_processor(name):
    case, size = golden(), SIZES[name]
    plan = PROCESSOR.plan_image(*size)
    media = PROCESSOR.media(plan, [Image.fromarray(picture(*size))])
    assert media.grid == plan.grid and PROCESSOR.tokens(plan) == [1] * (len(plan.grid) - 1) + [4]
    *crops, whole = views_of(media)
    np.testing.assert_allclose(whole, case[f"{name}.whole"], atol=2 if name == "large" else 1.001)  # resized twice
    assert len(crops) == len(case[f"{name}.crops"])
    for found, expected in zip(crops, case[f"{name}.crops"], strict=True):
        np.testing.assert_allclose(found, expected, atol=1.001)


def test_numbers_of_crops_equal_the_golden_processor_for_many_sizes():
    case, released = golden(), Processor(PROCESSOR.config, Views())
    found = [len(released.plan_image(height, width).grid) - 1 for height, width in case["sizes"].tolist()]
    assert found == case["sizes.crops"].tolist() and len(set(found)) > 10


def test_text_of_an_image():
    plan = PROCESSOR.plan_image(17, 25)
    assert PROCESSOR.text(plan, {PROCESSOR.config.image_token_id: "<I>"}.get) == (
        "<I>",
        "<patch_start><I><patch_end>" * 3 + "<patch_newline>" + "<patch_start><I><patch_end>" * 3
        + "<im_start><I><im_end>",
    )  # fmt: skip
    assert PROCESSOR.text(PROCESSOR.plan_image(9, 9), str)[1] == "<im_start>90<im_end>"


def test_a_newer_file_and_videos(tmp_path):
    source = json.loads((FOLDER / "preprocessor_config.json").read_text())
    shutil.copy(FOLDER / "config.json", tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": source | {"patch_size": 16}}))
    assert Processor.from_folder(tmp_path).views.crop == 16
    with pytest.raises(ValueError, match=r"a video was given, but Step 3\.7 sees images alone"):
        PROCESSOR.plan_video(8, 20, 20, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_patch_size": 14}, "vision_patch_size=14: only 2 works"),
        ({"do_normalize": False}, "do_normalize=False"),
        ({"patch_size": 12}, "patch_size=12: it must be a multiple of 8"),
        ({"size": {"height": 20, "width": 20}}, "size=20: it must be a multiple of 8"),
    ],
)
def test_settings_that_change_what_is_seen_are_refused(tmp_path, change, message):
    shutil.copy(FOLDER / "config.json", tmp_path)
    source = json.loads((FOLDER / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(source | change))
    with pytest.raises(ValueError, match=message):
        Processor.from_folder(tmp_path)
