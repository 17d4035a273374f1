"""Pictures become the patches that the family's own processors make of them."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from cpjax.models.gemma4 import Processor
from tests.models.gemma4_cases import GOLDENS, golden, media_of
from tests.models.pictures import PICTURES, VIDEOS, picture, video

FOLDER = GOLDENS / "gemma4"
PROCESSOR = Processor.from_folder(FOLDER)


@pytest.mark.parametrize("name", PICTURES)
def test_images_equal_the_golden_processors(name):
    case = {key: golden("gemma4-processing")[f"{name}.{key}"][None] for key in ("levels", "places")}
    wanted = media_of(case, PROCESSOR.config, "levels", "places", "image")[0]
    plan = PROCESSOR.plan_image(*PICTURES[name])
    media = PROCESSOR.media(plan, [Image.fromarray(picture(*PICTURES[name]))])
    assert media.grid == plan.grid == wanted.grid and media.modality == "image"
    assert PROCESSOR.tokens(plan) == [len(media.patches) // 4]
    np.testing.assert_allclose(255 * media.patches, wanted.patches, atol=1.001)


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_and_text_of_videos_equal_the_golden_processors(name):
    case, (count, height, width, fps) = golden("gemma4-processing"), VIDEOS[name]
    plan, frames = PROCESSOR.plan_video(count, height, width, fps), video(count, height, width)
    media = PROCESSOR.media(plan, [Image.fromarray(frames[frame]) for frame in plan.frames])
    assert list(plan.frames) == case[f"{name}.frames"].tolist()
    assert PROCESSOR.text(plan, str)[1] == bytes(case[f"{name}.text"]).decode()
    image = PROCESSOR.media(PROCESSOR.plan_image(height, width), [Image.fromarray(frames[plan.frames[1]])])
    assert media.grid == plan.grid == (5, *image.grid[1:]) and media.modality == "video"
    np.testing.assert_array_equal(np.split(media.patches, 5)[1], image.patches)
    assert PROCESSOR.tokens(plan) == [len(image.patches) // 4] * 5


def test_a_short_video_is_looked_at_whole():
    assert PROCESSOR.plan_video(3, 16, 16, 2.0).seconds == (0, 0.5, 1)
    chosen = PROCESSOR.plan_video(20, 16, 16, 5.0, nframes=3, video_start=1, video_end=3)
    assert chosen.frames == (5, 8, 12) and chosen.seconds == pytest.approx((1, 1.6, 2.4))
    with pytest.raises(ValueError, match="9 frames of a video are to be seen: it must be 1 to 3"):
        PROCESSOR.plan_video(3, 16, 16, 2.0, nframes=9)


def test_sizes_equal_the_golden_processors():
    case = golden("gemma4-processing")
    for size, resized in zip(case["sizes"].tolist(), case["sizes.resized"].tolist(), strict=True):
        assert list(PROCESSOR.plan_image(*size).size) == resized


def test_text_of_an_image():
    assert PROCESSOR.text(PROCESSOR.plan_image(16, 16), str) == ("90", "929093")
    assert PROCESSOR.placeholder_ids == (90, 91)


def test_files_of_newer_folders(tmp_path):
    images = json.loads((FOLDER / "preprocessor_config.json").read_text())
    shutil.copy(FOLDER / "config.json", tmp_path)
    both = {"image_processor": images | {"max_soft_tokens": 140}, "video_processor": {"num_frames": 5}}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    newer = Processor.from_folder(tmp_path)
    assert newer.image.max_soft_tokens == 140 and newer.video.max_soft_tokens == 70 and newer.num_frames == 5


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("preprocessor_config.json", {"patch_size": 14}, "patch_size=14: only 2 works"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize=False"),
        ("video_preprocessor_config.json", {"fps": 2}, "fps=2: only num_frames works"),
    ],
)
def test_settings_that_change_what_is_seen_are_refused(tmp_path, name, change, message):
    for file in FOLDER.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / name).write_text(json.dumps(json.loads((FOLDER / name).read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Processor.from_folder(tmp_path)
