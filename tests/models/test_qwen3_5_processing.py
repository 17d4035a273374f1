"""Pictures become the patches that the family's own processors make of them."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from cpjax.models.qwen3_5 import Processor
from tests.models.pictures import PICTURES, VIDEOS, picture, video
from tests.models.qwen3_5_cases import FOLDER, golden

PROCESSOR = Processor.from_folder(FOLDER)


def levels(media):
    """Pixels as 0 .. 255."""
    return 127.5 * media.patches + 127.5


@pytest.mark.parametrize("name", PICTURES)
def test_images_equal_the_golden_processors(name):
    case, pixels = golden("processing"), picture(*PICTURES[name])
    plan = PROCESSOR.plan_image(*PICTURES[name])
    media = PROCESSOR.media(plan, [Image.fromarray(pixels)])
    assert media.grid == plan.grid == tuple(case[f"{name}.grid"]) and media.modality == "image"
    assert PROCESSOR.tokens(plan) == [len(media.patches) // 4]
    np.testing.assert_allclose(levels(media), case[f"{name}.levels"], atol=1.001)


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_equal_the_golden_processors(name):
    case, (count, height, width, fps) = golden("processing"), VIDEOS[name]
    frames = video(count, height, width)
    plan = PROCESSOR.plan_video(count, height, width, fps)
    media = PROCESSOR.media(plan, [Image.fromarray(frames[frame]) for frame in plan.frames])
    assert media.grid == plan.grid == tuple(case[f"{name}.grid"]) and media.modality == "video"
    assert list(plan.frames) == case[f"{name}.frames"].tolist()
    np.testing.assert_allclose(plan.seconds, case[f"{name}.seconds"], rtol=1e-12)
    assert PROCESSOR.tokens(plan) == [len(media.patches) // plan.grid[0] // 4] * plan.grid[0]
    np.testing.assert_allclose(levels(media), case[f"{name}.levels"], atol=1.001)


def test_numbers_of_patches_equal_the_golden_processors_for_many_sizes():
    case = golden("processing")
    for (height, width, count), image, film in zip(
        case["sizes"].tolist(), case["sizes.image_patches"], case["sizes.video_patches"], strict=True
    ):
        assert np.prod(PROCESSOR.plan_image(height, width).grid) == image
        plan = PROCESSOR.plan_video(count, height, width, PROCESSOR.sampling.fps)  # that rate takes every frame
        assert len(plan.frames) == count and np.prod(plan.grid) == film


def test_images_equal_transformers():
    pytest.importorskip("torch", reason="transformers' processor needs torch")
    name = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    theirs = pytest.importorskip(name, reason="no transformers with this processor").Qwen2VLImageProcessorPil
    theirs = theirs.from_pretrained(FOLDER)
    rng = np.random.default_rng(0)
    for number in range(60):
        height, width = rng.integers(6, 120, 2).tolist()
        pixels = rng.integers(0, 256, (height, width, (3, 4, 1)[number % 3]), np.uint8)  # RGB, RGBA, grey
        image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
        wanted = theirs(image, return_tensors="np")
        plan = PROCESSOR.plan_image(height, width)
        assert plan.grid == tuple(wanted["image_grid_thw"][0])
        np.testing.assert_allclose(
            levels(PROCESSOR.media(plan, [image])), 127.5 * wanted["pixel_values"] + 127.5, atol=1e-3
        )


def test_videos_equal_transformers():
    pytest.importorskip("torchvision", reason="transformers' video processor needs torchvision")
    name = "transformers.models.qwen3_vl.video_processing_qwen3_vl"
    theirs = pytest.importorskip(name, reason="no transformers with this processor").Qwen3VLVideoProcessor(
        **json.loads((FOLDER / "video_preprocessor_config.json").read_text())
    )
    for count, height, width, fps in [(9, 33, 18, 3.0), (40, 16, 64, 24.0), (2, 40, 40, 1.0)]:
        frames = video(count, height, width)
        metadata = [dict(total_num_frames=count, fps=fps, frames_indices=list(range(count)))]
        wanted = theirs([frames], video_metadata=metadata, do_sample_frames=True, return_tensors="np")
        plan = PROCESSOR.plan_video(count, height, width, fps)
        assert plan.grid == tuple(wanted["video_grid_thw"][0])
        media = PROCESSOR.media(plan, [Image.fromarray(frames[frame]) for frame in plan.frames])
        np.testing.assert_allclose(levels(media), 127.5 * wanted["pixel_values_videos"] + 127.5, atol=1.001)


def test_text_of_media():
    token = {PROCESSOR.config.image_token_id: "<I>", PROCESSOR.config.video_token_id: "<V>"}
    token |= {PROCESSOR.config.vision_start_token_id: "<S>", PROCESSOR.config.vision_end_token_id: "<E>"}
    assert PROCESSOR.text(PROCESSOR.plan_image(16, 16), token.get) == ("<I>", "<I>")
    plan = PROCESSOR.plan_video(5, 24, 40, 2.0)  # frames at 0, 0.5, 1, 1.5, 2 and the last one again
    assert PROCESSOR.text(plan, token.get) == (
        "<S><V><E>", "<0.2 seconds><S><V><E><1.2 seconds><S><V><E><2.0 seconds><S><V><E>"
    )  # fmt: skip


def test_files_of_newer_and_older_folders(tmp_path):
    images, videos = (json.loads((FOLDER / name).read_text()) for name in ("preprocessor_config.json",) * 2)
    videos |= {"fps": 3, "max_frames": 5}
    shutil.copy(FOLDER / "config.json", tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": images, "video_processor": videos}))
    newer = Processor.from_folder(tmp_path)
    assert newer.image == PROCESSOR.image and newer.video == newer.image
    assert (newer.sampling.fps, newer.sampling.min_frames, newer.sampling.max_frames) == (3, 4, 5)
    (tmp_path / "processor_config.json").unlink()
    older = {name: value for name, value in images.items() if name != "size"} | {"min_pixels": 64, "max_pixels": 640}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    assert Processor.from_folder(tmp_path).image == dataclasses.replace(PROCESSOR.image, min_pixels=64, max_pixels=640)
    assert Processor.from_folder(tmp_path).sampling == PROCESSOR.sampling


def test_limits_of_an_image():
    """The sizes are those of qwen-vl-utils' rules, worked out by hand; tokens are 8 x 8 pixels."""
    assert PROCESSOR.plan_image(100, 60, max_pixels=1024).size == (40, 24)  # shrunk by sqrt(6000 / 1024)
    assert PROCESSOR.plan_image(100, 60, min_pixels=20_000).size == (184, 112)  # grown by sqrt(20000 / 6000)
    assert PROCESSOR.plan_image(100, 60, min_pixels=20_000, max_pixels=40_000).size == (184, 112)
    assert PROCESSOR.plan_image(100, 60, resized_height=30, resized_width=50).size == (32, 48)
    assert PROCESSOR.plan_image(100, 60, resized_height=1, resized_width=9, max_pixels=64).size == (8, 8)


def test_limits_of_a_video():
    """As there: pixels are those of a frame, or of all pairs of frames; numbers of frames are even."""
    plan = PROCESSOR.plan_video(20, 64, 64, 5.0, nframes=5, video_start=1, video_end=3)
    assert plan.frames == (5, 8, 12, 15) and plan.seconds == pytest.approx((1.3, 2.7))
    assert len(PROCESSOR.plan_video(20, 64, 64, 5.0).frames) == 8
    assert len(PROCESSOR.plan_video(20, 64, 64, 5.0, max_frames=7).frames) == 6
    assert len(PROCESSOR.plan_video(20, 64, 64, 5.0, min_frames=9).frames) == 10
    assert PROCESSOR.plan_video(20, 64, 64, 5.0, video_end=1.0).frames == (0, 2, 3, 5)
    for limits in ({"max_pixels": 256}, {"total_pixels": 512}, {"max_pixels": 9999, "total_pixels": 512}):
        assert PROCESSOR.plan_video(20, 64, 64, 5.0, nframes=4, **limits).size == (16, 16)
    floor = {"min_pixels": 250, "max_pixels": 9999, "total_pixels": 1}  # of a total the least is 1.05 x min_pixels
    assert PROCESSOR.plan_video(20, 64, 64, 5.0, nframes=4, **floor).size == (16, 16)
    assert PROCESSOR.plan_video(20, 64, 64, 5.0, nframes=4, min_pixels=10_000).size == (104, 104)
    assert PROCESSOR.plan_video(20, 64, 64, 5.0, resized_height=30, resized_width=50).size == (32, 48)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: PROCESSOR.plan_image(9, 9, min_pixels=9, max_pixels=8),
            "bounds of 9 to 8 pixels were given: the first",
        ),
        (
            lambda: PROCESSOR.plan_image(9, 9, resized_width=8),
            "resized_height None and resized_width 8 were given: both",
        ),
        (
            lambda: PROCESSOR.plan_video(8, 9, 9, 2.0, nframes=20),
            "20 frames of a video are to be seen: it must be 2 to 8",
        ),
        (lambda: PROCESSOR.plan_video(8, 9, 9, 2.0, max_frames=1), "0 frames of a video are to be seen"),
        (lambda: PROCESSOR.plan_video(8, 9, 9, 2.0, video_start=3.5), "with video_start 3.5 and video_end None: there"),
        (lambda: PROCESSOR.plan_image(3, 700), "no side may be over 200 times the other"),
        (lambda: PROCESSOR.plan_video(1, 30, 30, 2.0), "a video of 1 frames was given: it needs at least 2"),
    ],
)
def test_unfit_media_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("preprocessor_config.json", {"patch_size": 14}, "patch_size=14: only 4 works"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize=False"),
        ("video_preprocessor_config.json", {"cap_pixels_per_frame": True}, "cap_pixels_per_frame=True"),
    ],
)
def test_settings_that_change_what_is_seen_are_refused(tmp_path, name, change, message):
    for file in FOLDER.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / name).write_text(json.dumps(json.loads((FOLDER / name).read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Processor.from_folder(tmp_path)
