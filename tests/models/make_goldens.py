"""Makes the golden files of the model families from transformers: python -m tests.models.make_goldens

Needs torch, torchvision, transformers and peft; the tests that read the files need none of them. For each family a
folder with a tiny random model as transformers saves it, and per case one file: inputs, position ids, logits, loss, and
every gradient by name; the files of its processors, and a file of what they make of some pictures. For adapters of it,
as peft saves them, the logits of one case.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.models.pictures import PICTURES, VIDEOS, picture, video
from tests.models.step3p7_goldens import step3p7, step3p7_processing

GOLDENS = pathlib.Path(__file__).parent / "goldens"
PAD, IMAGE, VIDEO, START, END, AUDIO = 0, 90, 91, 92, 93, 94


def spread(model: torch.nn.Module, seed: int) -> None:
    """Moves weights away from their initial values, where zeros, ones and smallness would hide errors.

    Much larger ones, or a smaller epsilon in the norms, would amplify float32 noise beyond what tests can tolerate.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(parameter.flatten()[0] + 0.3 * noise)
            else:
                parameter.copy_(0.6 * parameter[0].numel() ** -0.5 * noise)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter -= 3  # a memory of tens of tokens, not of one
        embedding = model.get_input_embeddings()
        if embedding.padding_idx is not None:
            embedding.weight[embedding.padding_idx] = 0


def qwen3_5() -> None:
    config = transformers.Qwen3_5Config(
        text_config=dict(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=8, linear_value_head_dim=12, max_position_embeddings=512, pad_token_id=PAD,
            rms_norm_eps=1e-3,
            rope_parameters=dict(
                rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.75, mrope_section=[3, 2, 1],
                mrope_interleaved=True,
            ),
        ),
        vision_config=dict(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=32,
            num_position_embeddings=25,
        ),
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    spread(model, seed=1)
    model.save_pretrained(GOLDENS / "qwen3_5")
    (GOLDENS / "qwen3_5" / "generation_config.json").unlink(missing_ok=True)

    rng = np.random.default_rng(2)

    def text(length: int) -> list[int]:
        return rng.integers(1, 90, length).tolist()

    def image(tokens: int) -> list[int]:
        return [START] + [IMAGE] * tokens + [END]

    def frames(count: int, tokens: int) -> list[int]:
        return [token for _ in range(count) for token in [*text(2), START, *[VIDEO] * tokens, END]]

    qwen3_5_case(model, "text", [text(21), text(14)])
    qwen3_5_case(
        model,
        "images",
        [text(3) + image(4) + text(5) + image(3) + text(4), [IMAGE] * 3 + text(2) + image(2) + image(4) + text(5)],
        images=[(1, 4, 4), (1, 2, 6), (1, 6, 2), (1, 4, 2), (1, 4, 4)],
    )
    qwen3_5_case(
        model,
        "video",
        [text(2) + frames(3, 2) + text(4) + image(3) + frames(2, 4) + text(3)],
        images=[(1, 2, 6)],
        videos=[(3, 4, 2), (2, 4, 4)],
    )
    qwen3_5_positions(model)
    save_file({"tokens": np.array(qwen3_5_generated(model))}, GOLDENS / "qwen3_5-generated.safetensors")


def qwen3_5_moe() -> None:
    """With a balance loss that counts, and experts of which some are busy and some are not."""
    config = transformers.Qwen3_5MoeConfig(
        text_config=dict(
            vocab_size=96, hidden_size=32, moe_intermediate_size=12, shared_expert_intermediate_size=20,
            num_experts=8, num_experts_per_tok=3, output_router_logits=True, router_aux_loss_coef=0.3,
            layer_types=["linear_attention", "full_attention"] * 2, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=8, linear_value_head_dim=12, max_position_embeddings=512, pad_token_id=PAD,
            rms_norm_eps=1e-2,
            rope_parameters=dict(
                rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.75, mrope_section=[3, 2, 1],
                mrope_interleaved=True,
            ),
        ),
        vision_config=dict(
            depth=1, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=32,
            num_position_embeddings=25,
        ),
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).float().eval()
    spread(model, seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter *= 2  # clear choices, which rounding does not turn
    model.save_pretrained(GOLDENS / "qwen3_5_moe")
    (GOLDENS / "qwen3_5_moe" / "generation_config.json").unlink(missing_ok=True)
    rng = np.random.default_rng(2)

    def text(length: int) -> list[int]:
        return rng.integers(1, 90, length).tolist()

    qwen3_5_case(model, "text", [text(21), text(14)], family="qwen3_5_moe")
    row = text(3) + [START] + [IMAGE] * 4 + [END] + text(5) + [START] + [VIDEO] * 3 + [END] + text(6)
    qwen3_5_case(model, "media", [row, text(9)], images=[(1, 4, 4)], videos=[(1, 2, 6)], family="qwen3_5_moe")
    prompts = torch.tensor(load_file(GOLDENS / "qwen3_5_moe-text.safetensors")["input_ids"][:1])
    out = model.generate(input_ids=prompts, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    save_file({"tokens": out[:, prompts.shape[1] :].numpy()}, GOLDENS / "qwen3_5_moe-generated.safetensors")


def qwen3_5_case(model, name: str, rows: list[list[int]], images=(), videos=(), family: str = "qwen3_5") -> None:
    """Runs one batch and writes it down. Grids are in the order of the rows, images and videos apart."""
    rng = np.random.default_rng(3)
    length = max(map(len, rows))
    ids = np.array([row + [PAD] * (length - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = np.where((mask == 1) & (ids < IMAGE) & (rng.random(ids.shape) < 0.8), ids, -100)
    kinds = np.where(ids == IMAGE, 1, np.where(ids == VIDEO, 2, 0))
    patch = model.config.vision_config
    width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    inputs = {key: torch.tensor(value) for key, value in arrays.items()}
    for grids, pixels, grid in (
        (images, "pixel_values", "image_grid_thw"),
        (videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids:
            arrays[grid] = np.array(grids)
            arrays[pixels] = rng.normal(size=(int(arrays[grid].prod(1).sum()), width)).astype(np.float32)
            inputs |= {pixels: torch.tensor(arrays[pixels]), grid: torch.tensor(arrays[grid])}
    positions = model.model.get_rope_index(
        inputs["input_ids"],
        torch.tensor(kinds),
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        inputs["attention_mask"],
    )[0]
    model.zero_grad()
    out = model(**inputs, mm_token_type_ids=torch.tensor(kinds), position_ids=positions, use_cache=False)
    out.loss.backward()
    arrays |= {
        "position_ids": positions.numpy(),
        "logits": out.logits.detach().numpy(),
        "loss": out.loss.detach().numpy(),
    }
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            arrays |= {f"grad.{on_disk}": grad for on_disk, grad in by_expert(key, parameter.grad.numpy())}
    save_file(
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, GOLDENS / f"{family}-{name}.safetensors"
    )


def by_expert(key: str, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor as it is on disk: of stacked experts each has its own."""
    stem, _, kind = key.rpartition("experts.")
    if not stem or value.ndim < 3:
        return [(key, value)]
    parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
    return [
        (f"{stem}experts.{i}.{name}.weight", np.split(expert, len(parts))[part])
        for i, expert in enumerate(value)
        for name, part in parts.items()
    ]


def qwen3_5_positions(model) -> None:
    """Position ids of rows whose images touch each other or the ends."""
    inner = model.model
    rows = {
        "first": ([IMAGE] * 4 + [5, 6], [(1, 4, 4)], []),
        "last": ([5, 6, 7] + [IMAGE] * 3, [(1, 2, 6)], []),
        "marks_between": ([5] + [IMAGE] * 4 + [END, START] + [IMAGE] * 3 + [6], [(1, 4, 4), (1, 2, 6)], []),
        "image_touches_video": ([IMAGE] * 4 + [VIDEO] * 3 + [6], [(1, 4, 4)], [(1, 2, 6)]),
    }
    arrays = {}
    for name, (row, images, videos) in rows.items():
        ids = torch.tensor([row])
        kinds = torch.where(ids == IMAGE, 1, torch.where(ids == VIDEO, 2, 0))
        grids = [torch.tensor(grid) if grid else None for grid in (images, videos)]
        arrays[f"{name}.ids"] = ids[0].numpy()
        arrays[f"{name}.grids"] = np.array(images + videos)
        arrays[f"{name}.positions"] = inner.get_rope_index(ids, kinds, *grids)[0][:, 0].numpy()
    # transformers takes a run of placeholders for one image, so images that touch are put together from its parts.
    first = inner.get_vision_position_ids(1, [torch.tensor(n) for n in (1, 4, 4)], 1, 2)
    second = inner.get_vision_position_ids(3, [torch.tensor(n) for n in (1, 2, 6)], 1, 2)
    ends = [torch.full((3, 1), n) for n in (0, 6)]
    arrays["touching.ids"] = np.array([5] + [IMAGE] * 7 + [6])
    arrays["touching.grids"] = np.array([(1, 4, 4), (1, 2, 6)])
    arrays["touching.positions"] = torch.cat([ends[0], first, second, ends[1]], dim=1).numpy()
    save_file(
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, GOLDENS / "qwen3_5-positions.safetensors"
    )


ADAPTERS = {
    "lora": dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "in_proj_qkv", "attn.qkv"]),
    "dora": dict(r=2, lora_alpha=6, target_modules=["k_proj", "gate_proj"], use_dora=True, use_rslora=True),
}


def qwen3_5_adapters() -> None:
    """Adapters on the saved model, and what they make of the case "images"."""
    import peft  # only here: tests use the rest of this file without it

    case = load_file(GOLDENS / "qwen3_5-images.safetensors")
    ids = case["input_ids"]
    inputs = {key: torch.tensor(case[key]) for key in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")}
    inputs |= {
        "mm_token_type_ids": torch.tensor(np.where(ids == IMAGE, 1, 0)),
        "position_ids": torch.tensor(case["position_ids"]),
    }
    logits = {}
    for name, options in ADAPTERS.items():
        base = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
            GOLDENS / "qwen3_5", dtype=torch.float32, attn_implementation="eager"
        )
        torch.manual_seed(4)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.1)
                if "magnitude" in key:
                    parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))
            logits[name] = model(**inputs, use_cache=False).logits.numpy()
        folder = GOLDENS / f"qwen3_5-{name}"
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config |= {"base_model_name_or_path": "qwen3_5", "target_modules": sorted(config["target_modules"])}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(logits, GOLDENS / "qwen3_5-adapters.safetensors")


def qwen3_5_processing() -> None:
    """Sizes, grids, sampled frames, and pixels as levels 0 .. 255, of some pictures and videos."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    patches = dict(patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    images = Qwen2VLImageProcessorPil(size=dict(shortest_edge=256, longest_edge=4096), **patches)
    videos = Qwen3VLVideoProcessor(size=dict(shortest_edge=512, longest_edge=8192), **patches)
    images.save_pretrained(GOLDENS / "qwen3_5")
    (GOLDENS / "qwen3_5" / "video_preprocessor_config.json").write_text(videos.to_json_string())

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
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, GOLDENS / "qwen3_5-processing.safetensors"
    )


def qwen3_5_generated(model, count: int = 12, stop: int | None = None) -> list[list[int]]:
    """What follows the rows of all cases, in one batch. (Behind a prompt that ends in an image, transformers 5.24
    generates from other positions than its forward pass has: no prompt here does.)"""
    cases = [load_file(GOLDENS / f"qwen3_5-{name}.safetensors") for name in ("text", "images", "video")]
    rows = [row[row != PAD] for case in cases for row in case["input_ids"]]
    length = max(map(len, rows))
    ids = torch.tensor(np.stack([np.pad(row, (length - len(row), 0), constant_values=PAD) for row in rows]))
    mask = torch.tensor(np.stack([np.arange(length) >= length - len(row) for row in rows]).astype(int))
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs["mm_token_type_ids"] = torch.where(ids == IMAGE, 1, torch.where(ids == VIDEO, 2, 0))
    for pixels, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        for key in (pixels, grid):
            inputs[key] = torch.tensor(np.concatenate([case[key] for case in cases if key in case]))
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=stop, pad_token_id=PAD)
    rows = out[:, length:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def gemma4_config(text: dict, vision: dict, **other) -> transformers.Gemma4Config:
    config = transformers.Gemma4Config(
        text_config=dict(
            vocab_size=96, vocab_size_per_layer_input=96, hidden_size=32, intermediate_size=40, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, global_head_dim=24, sliding_window=6, pad_token_id=PAD,
            rms_norm_eps=1e-3, final_logit_softcapping=2.0, max_position_embeddings=512,
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
                full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1000.0),
            ),
        ) | text,
        vision_config=dict(
            hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=12, rms_norm_eps=1e-3, pooling_kernel_size=2, patch_size=2, position_embedding_size=8,
        ) | vision,
        image_token_id=IMAGE, video_token_id=VIDEO, boi_token_id=START, eoi_token_id=END, audio_token_id=AUDIO,
        boa_token_id=95, eoa_token_index=89, **other,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def gemma4_model(config, seed: int) -> transformers.Gemma4ForConditionalGeneration:
    """With what is saved beside the parameters spread too: layer scalars, standardisation and bounds."""
    model = transformers.Gemma4ForConditionalGeneration(config).float().eval()
    spread(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("position_embedding_table"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("q_norm.weight"):
                parameter *= 0.5  # scores of a few, as they are not scaled
            if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
                parameter.copy_(0.6 * parameter.shape[2] ** -0.5 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            noise = torch.randn(buffer.shape, generator=generator)
            if name.endswith("layer_scalar") or name.endswith("std_scale"):
                buffer.copy_(1 + 0.3 * noise)
            elif name.endswith("std_bias"):
                buffer.copy_(noise)
            elif name.endswith(("put_min", "put_max")):
                buffer.copy_((1.2 + 0.3 * noise) * (1 if name.endswith("max") else -1))
    return model


def gemma4() -> None:
    rng = np.random.default_rng(2)

    def text(length: int) -> list[int]:
        return rng.integers(1, 89, length).tolist()

    def image(tokens: int, token: int = IMAGE) -> list[int]:
        return [START] + [token] * tokens + [END]

    dense = dict(
        layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4,
        hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
        use_bidirectional_attention="vision",
    )  # fmt: skip
    model = gemma4_model(gemma4_config(dense, dict(standardize=True)), seed=1)
    save_gemma4(model, "gemma4")
    # Images first and last, longer than the window, over three of eight ranks, and two that touch; a video.
    gemma4_case(
        model,
        "gemma4-media",
        [
            [IMAGE] * 9 + text(4) + [IMAGE] * 12 + text(2) + [IMAGE] * 6 + text(2) + [IMAGE] * 6,
            text(3) + image(2, VIDEO) + text(1) + image(2, VIDEO) + text(8),
        ],
        images=[(6, 6), (6, 8), (2, 4), (4, 4), (4, 6)],
        videos=[(2, 2, 4)],
    )

    generated = {"gemma4": gemma4_generated(model, "gemma4")}
    small = dict(
        layer_types=["sliding_attention", "full_attention"] * 4, num_hidden_layers=8, hidden_size_per_layer_input=8,
        num_kv_shared_layers=4, use_double_wide_mlp=True, intermediate_size=24, rms_norm_eps=1e-2,
    )  # fmt: skip
    sound = dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, subsampling_conv_channels=[8, 4],
        attention_chunk_size=4, attention_context_left=4, rms_norm_eps=1e-3, output_proj_dims=12,
        attention_logit_cap=3.0, gradient_clipping=2.0,
    )  # fmt: skip
    model = gemma4_model(gemma4_config(small, dict(use_clipped_linears=True), audio_config=sound), seed=4)
    save_gemma4(model, "gemma4_e")
    gemma4_case(
        model,
        "gemma4_e-media",
        [
            image(4) + text(4) + image(6, AUDIO) + text(2) + [IMAGE] * 6 + text(3) + [AUDIO] * 3,
            text(2) + image(2, VIDEO) + image(2, VIDEO) + text(5) + image(5, AUDIO) + text(3),
        ],
        images=[(4, 4), (4, 6)],
        videos=[(2, 2, 4)],
        sounds=[23, 9, 18],
    )
    generated["gemma4_e"] = gemma4_generated(model, "gemma4_e")
    save_file(generated, GOLDENS / "gemma4-generated.safetensors")

    mixture = dense | dict(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], enable_moe_block=True, num_experts=6,
        top_k_experts=2, moe_intermediate_size=12, intermediate_size=24, attention_k_eq_v=False,
    )  # fmt: skip
    config = gemma4_config(mixture, dict(num_hidden_layers=1))
    config._experts_implementation = "eager"
    model = gemma4_model(config, seed=7)
    save_gemma4(model, "gemma4_moe")
    gemma4_case(model, "gemma4_moe-media", [text(8) + image(6) + text(12), text(9)], images=[(4, 6)])


def gemma4_generated(model, name: str, count: int = 12) -> np.ndarray:
    """What follows the first row of a case, which has all of its images, none of its videos and its first sounds."""
    case = load_file(GOLDENS / f"{name}-media.safetensors")
    ids = torch.tensor(case["input_ids"][:1])
    sounds = int((np.diff((case["input_ids"][0] == AUDIO).astype(int), prepend=0) == 1).sum())
    inputs = {key: torch.tensor(case[key]) for key in ("pixel_values", "image_position_ids")}
    if sounds:
        inputs |= {key: torch.tensor(case[key][:sounds]) for key in ("input_features", "input_features_mask")}
    inputs["mm_token_type_ids"] = (ids == IMAGE) * 1 + (ids == AUDIO) * 3
    out = model.generate(input_ids=ids, **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, ids.shape[1] :].numpy()


def save_gemma4(model, name: str) -> None:
    model.save_pretrained(GOLDENS / name)
    (GOLDENS / name / "generation_config.json").unlink(missing_ok=True)


def gemma4_case(model, name: str, rows: list[list[int]], images=(), videos=(), sounds=()) -> None:
    """Runs one batch and writes it down.

    Args:
        images: (h, w) in patches, in the order of the rows.
        videos: (t, h, w).
        sounds: frames of each.
    """
    rng = np.random.default_rng(3)
    length, config = max(map(len, rows)), model.config
    ids = np.array([row + [PAD] * (length - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = np.where((mask == 1) & (ids < IMAGE) & (rng.random(ids.shape) < 0.8), ids, -100)
    kinds = np.select([ids == IMAGE, ids == VIDEO, ids == AUDIO], [1, 2, 3], 0)
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def frames(grids) -> tuple[np.ndarray, np.ndarray]:
        most = max(h * w for h, w in grids)
        pixels = np.zeros((len(grids), most, 3 * config.vision_config.patch_size**2), np.float32)
        places = np.full((len(grids), most, 2), -1)
        for i, (h, w) in enumerate(grids):
            pixels[i, : h * w] = rng.random((h * w, pixels.shape[2]))
            places[i, : h * w] = np.stack([np.tile(np.arange(w), h), np.repeat(np.arange(h), w)], -1)
        return pixels, places

    if images:
        arrays["pixel_values"], arrays["image_position_ids"] = frames(images)
    if videos:
        grids = [(h, w) for t, h, w in videos for _ in range(t)]
        arrays["pixel_values_videos"], arrays["video_position_ids"] = frames(grids)
        arrays["num_frames_per_video"] = np.array([t for t, _, _ in videos])
    if sounds:
        bins = config.audio_config.subsampling_conv_channels[0]
        real = np.arange(max(sounds)) < np.array(sounds)[:, None]
        features = rng.normal(size=(*real.shape, bins)).astype(np.float32)
        arrays |= {"input_features": features * real[..., None], "input_features_mask": real}
    model.zero_grad()
    inputs = {key: torch.tensor(value) for key, value in arrays.items()}
    out = model(**inputs, mm_token_type_ids=torch.tensor(kinds), use_cache=False)
    out.loss.backward()
    arrays |= {"logits": out.logits.detach().numpy(), "loss": out.loss.detach().numpy()}
    arrays |= {f"grad.{key}": p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None}
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, GOLDENS / f"{name}.safetensors")


def gemma4_processing() -> None:
    """Pixels of some pictures as levels 0 .. 255 with their places, frames and text of some videos, and sizes."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        Gemma4ImageProcessorPil,
        get_aspect_ratio_preserving_size,
    )
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    images = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=2, pooling_kernel_size=2)
    images.save_pretrained(GOLDENS / "gemma4")
    (GOLDENS / "gemma4" / "video_preprocessor_config.json").write_text(json.dumps({"num_frames": 5}) + "\n")
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
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, GOLDENS / "gemma4-processing.safetensors"
    )


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    gemma4()
    gemma4_processing()
    qwen3_5()
    qwen3_5_adapters()
    qwen3_5_processing()
    qwen3_5_moe()
    step3p7(spread)
    step3p7_processing()
