"""What the families' processors make of pictures and videos."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from tests.models.make_goldens.gemma4 import END, START, VIDEO
from tests.models.pictures import PICTURES, VIDEOS, picture, video


def qwen3_5_processing(root: pathlib.Path) -> None:
    """Sizes, grids, sampled frames, and pixels as levels 0 .. 255, of some pictures and videos."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    patches = dict(patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    images = Qwen2VLImageProcessorPil(size=dict(shortest_edge=256, longest_edge=4096), **patches)
    videos = Qwen3VLVideoProcessor(size=dict(shortest_edge=512, longest_edge=8192), **patches)
    images.save_pretrained(root / "qwen3_5")
    (root / "qwen3_5" / "video_preprocessor_config.json").write_text(videos.to_json_string())

    def levels(pixels: np.ndarray) -> np.ndarray:
        return np.rint(127.5 * pixels + 127.5).astype(np.uint8)

    arrays = {}
    for name, size in PICTURES.items():
        out = images(Image.fromarray(picture(*size)), return_tensors="np")
        arrays |= {f"{name}.grid": out["image_grid_thw"][0], f"{name}.levels": levels(out["pixel_values"])}
    for name, (count, height, width, fps) in VIDEOS.items():
        metadata = [dict(total_num_frames=count, fps=fps, frames_indices=list(range(count)))]
        out = videos(
            [video(count, height, width)], video_metadata=metadata, do_sample_frames=True, return_metadata=True,
            return_tensors="np",
        )  # fmt: skip
        frames = list(out["video_metadata"][0].frames_indices)
        seconds = Qwen3VLProcessor._calculate_timestamps(None, list(map(int, frames)), fps, 2)
        arrays |= {
            f"{name}.grid": out["video_grid_thw"][0],
            f"{name}.levels": levels(out["pixel_values_videos"]),
            f"{name}.frames": np.array(frames),
            f"{name}.seconds": np.array(seconds),
        }
    rng = np.random.default_rng(4)
    sizes = np.stack([rng.integers(9, 400, 60), rng.integers(9, 400, 60), rng.integers(2, 60, 60)], axis=1)
    grids = [images.get_number_of_image_patches(int(h), int(w)) for h, w, _ in sizes]
    many = [videos.get_num_of_video_patches(int(n), int(h), int(w)) for h, w, n in sizes]
    arrays |= {"sizes": sizes, "sizes.image_patches": np.array(grids), "sizes.video_patches": np.array(many)}
    save_file(
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, root / "qwen3_5-processing.safetensors"
    )


def gemma4_processing(root: pathlib.Path) -> None:
    """Pixels of some pictures as levels 0 .. 255 with their places, frames and text of some videos, and sizes."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        Gemma4ImageProcessorPil,
        get_aspect_ratio_preserving_size,
    )
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    images = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=2, pooling_kernel_size=2)
    images.save_pretrained(root / "gemma4")
    (root / "gemma4" / "video_preprocessor_config.json").write_text(json.dumps({"num_frames": 5}) + "\n")
    arrays = {}
    for name, size in PICTURES.items():
        out = images(Image.fromarray(picture(*size)), return_tensors="np")
        arrays[f"{name}.levels"] = np.rint(255 * out["pixel_values"][0]).astype(np.uint8)
        arrays[f"{name}.places"] = out["image_position_ids"][0]
    tokens = type("", (), {"boi_token": str(START), "eoi_token": str(END), "video_token": str(VIDEO)})
    for name, (count, _, _, fps) in VIDEOS.items():
        metadata = VideoMetadata(total_num_frames=count, fps=fps)
        metadata.frames_indices = default_sample_indices_fn(metadata, num_frames=5).tolist()
        one = {"num_soft_tokens_per_video": [1], "video_metadata": [metadata]}
        text = Gemma4Processor.replace_video_token(tokens, one, 0)
        arrays[f"{name}.frames"] = np.array(metadata.frames_indices)
        arrays[f"{name}.text"] = np.frombuffer(text.encode(), np.uint8)
    rng = np.random.default_rng(4)
    sizes = np.concatenate([[(3, 700), (700, 3), (1, 90), (8, 8)], rng.integers(9, 400, (60, 2))])
    arrays["sizes"] = sizes
    arrays["sizes.resized"] = np.array([get_aspect_ratio_preserving_size(h, w, 2, 280, 2) for h, w in sizes.tolist()])
    save_file(
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, root / "gemma4-processing.safetensors"
    )


def step3p7_processing(root: pathlib.Path) -> None:
    """Views of some pictures as levels 0 .. 255, and how many crops images of many sizes have as released."""
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

    images = Step3p7ImageProcessor(
        size={"height": 16, "width": 16}, patch_size=8, max_image_size=100, vision_patch_size=2, downsampler_stride=4
    )
    images.save_pretrained(root / "step3p7")
    mean, std = (np.array(values)[:, None, None] for values in (images.image_mean, images.image_std))

    def levels(pixels: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.rint(255 * (pixels * std + mean)).astype(np.uint8), 1, -1)

    arrays = {}
    for name, size in {**PICTURES, "strip": (9, 60)}.items():
        out = images(Image.fromarray(picture(*size)), return_tensors="np")
        crops = np.asarray(out.get("pixel_values_local", np.zeros((0, 3, 8, 8))))
        arrays |= {f"{name}.whole": levels(out["pixel_values"])[0], f"{name}.crops": levels(crops)}
    rng = np.random.default_rng(4)
    sizes = np.concatenate([rng.integers(9, 4000, (60, 2)), rng.integers(9, 800, (60, 2)), [[20, 300], [300, 20]]])
    released = Step3p7ImageProcessor()
    arrays |= {
        "sizes": sizes,
        "sizes.crops": np.array([released.get_number_of_image_patches(int(h), int(w)) for h, w in sizes]),
    }
    save_file(
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, root / "step3p7-processing.safetensors"
    )
