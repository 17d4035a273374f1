"""Gemma 4, dense, of the E-series and with experts: folders as transformers saves them, and cases."""

from __future__ import annotations

import pathlib

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.models.make_goldens.spread import spread

PAD, IMAGE, VIDEO, START, END, AUDIO = 0, 90, 91, 92, 93, 94


def make_config(text: dict, vision: dict, **other) -> transformers.Gemma4Config:
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


def make_model(config, seed: int) -> transformers.Gemma4ForConditionalGeneration:
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


def gemma4(root: pathlib.Path) -> None:
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
    model = make_model(make_config(dense, dict(standardize=True)), seed=1)
    save(root, model, "gemma4")
    # Images first and last, longer than the window, over three of eight ranks, and two that touch; a video.
    case(
        root,
        model,
        "gemma4-media",
        [
            [IMAGE] * 9 + text(4) + [IMAGE] * 12 + text(2) + [IMAGE] * 6 + text(2) + [IMAGE] * 6,
            text(3) + image(2, VIDEO) + text(1) + image(2, VIDEO) + text(8),
        ],
        images=[(6, 6), (6, 8), (2, 4), (4, 4), (4, 6)],
        videos=[(2, 2, 4)],
    )

    following = {"gemma4": generated(root, model, "gemma4")}
    small = dict(
        layer_types=["sliding_attention", "full_attention"] * 4, num_hidden_layers=8, hidden_size_per_layer_input=8,
        num_kv_shared_layers=4, use_double_wide_mlp=True, intermediate_size=24, rms_norm_eps=1e-2,
    )  # fmt: skip
    sound = dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, subsampling_conv_channels=[8, 4],
        attention_chunk_size=4, attention_context_left=4, rms_norm_eps=1e-3, output_proj_dims=12,
        attention_logit_cap=3.0, gradient_clipping=2.0,
    )  # fmt: skip
    model = make_model(make_config(small, dict(use_clipped_linears=True), audio_config=sound), seed=4)
    save(root, model, "gemma4_e")
    case(
        root,
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
    following["gemma4_e"] = generated(root, model, "gemma4_e")
    save_file(following, root / "gemma4-generated.safetensors")

    mixture = dense | dict(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], enable_moe_block=True, num_experts=6,
        top_k_experts=2, moe_intermediate_size=12, intermediate_size=24, attention_k_eq_v=False,
    )  # fmt: skip
    config = make_config(mixture, dict(num_hidden_layers=1))
    config._experts_implementation = "eager"
    model = make_model(config, seed=7)
    save(root, model, "gemma4_moe")
    case(root, model, "gemma4_moe-media", [text(8) + image(6) + text(12), text(9)], images=[(4, 6)])


def generated(root: pathlib.Path, model, name: str, count: int = 12) -> np.ndarray:
    """What follows the first row of a case, which has all of its images, none of its videos and its first sounds."""
    case = load_file(root / f"{name}-media.safetensors")
    ids = torch.tensor(case["input_ids"][:1])
    sounds = int((np.diff((case["input_ids"][0] == AUDIO).astype(int), prepend=0) == 1).sum())
    inputs = {key: torch.tensor(case[key]) for key in ("pixel_values", "image_position_ids")}
    if sounds:
        inputs |= {key: torch.tensor(case[key][:sounds]) for key in ("input_features", "input_features_mask")}
    inputs["mm_token_type_ids"] = (ids == IMAGE) * 1 + (ids == AUDIO) * 3
    out = model.generate(input_ids=ids, **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, ids.shape[1] :].numpy()


def save(root: pathlib.Path, model, name: str) -> None:
    model.save_pretrained(root / name)
    (root / name / "generation_config.json").unlink(missing_ok=True)


def case(root: pathlib.Path, model, name: str, rows: list[list[int]], images=(), videos=(), sounds=()) -> None:
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
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, root / f"{name}.safetensors")
