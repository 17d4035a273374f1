"""Step 3.7: a folder as the checkpoints are released, with heads of multi-token prediction, and a case."""

from __future__ import annotations

import copy
import json
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.models.make_goldens.spread import spread

PAD, IMAGE = 1, 90
FULL, SLIDING = "full_attention", "sliding_attention"
WEIGHT = 0.3
"""Share of the heads' losses."""

TYPES = [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL]  # the last two of the heads
CONFIG = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "image_token_id": IMAGE,
    "projector_bias": False,
    "text_config": {
        "model_type": "step3p5", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 8, "sliding_window": 6, "pad_token_id": PAD,
        "rms_norm_eps": 1e-3, "layer_types": TYPES, "num_nextn_predict_layers": 2, "moe_layers_enum": "1,2,3,4",
        "attention_other_setting": {
            "attention_type": SLIDING, "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8,
        },
        "rope_theta": [5000.0 if kind == FULL else 100.0 for kind in TYPES],
        "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in TYPES],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
        "yarn_only_types": [FULL],
        "swiglu_limits": [0.0, 0.2, 0.2, 0.2, 0.2, 0.0, 0.0],
        "swiglu_limits_shared": [0.0, 0.3, 0.3, 0.3, 0.3, 0.0, 0.3],
        "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 16, "share_expert_dim": 24,
        "moe_router_scaling_factor": 1.5, "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "step3p5_vision", "width": 16, "layers": 2, "heads": 2, "image_size": 16, "patch_size": 2,
        "mlp_ratio": 2.0, "ls_init_value": 0.1, "use_cls_token": False, "hidden_act": "quick_gelu",
    },
}  # fmt: skip


def step3p7(root: pathlib.Path) -> None:
    """Writes the folder and the cases."""
    config = transformers.Step3p7Config.from_dict(copy.deepcopy(CONFIG))
    config._attn_implementation = "eager"
    config.text_config.mtp_per_layer_config = {0: {"num_attention_heads": 6}}  # that of the first head, which slides
    torch.manual_seed(0)
    model = transformers.Step3p7ForConditionalGeneration(config).float().eval()
    heads = MtpModel(model, 2).float().eval()
    spread(heads, 5)  # which shares embeddings and head with the model, so first
    spread(model, 1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(6)
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj") or name.endswith("experts.down_proj"):
                parameter *= parameter.shape[1] ** 0.5  # spread takes all of an expert for one row
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    folder = root / "step3p7"
    folder.mkdir(exist_ok=True)
    save_file(named(model, heads), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")

    rng = np.random.default_rng(2)

    def text(length: int) -> list[int]:
        return rng.integers(2, 90, length).tolist()

    def image(crops: int) -> list[int]:
        """A crop is one token between marks, the whole image four."""
        return [token for _ in range(crops) for token in [91, IMAGE, 92]] + [93, *[IMAGE] * 4, 94]

    rows = [
        text(3) + image(3) + text(5) + image(0) + text(4),
        [IMAGE] * 5 + text(2) + image(2) + text(5) + image(0)[:5],
        text(14),
    ]
    case(root, model, heads, rows, crops=[3, 0, 1, 2, 0])
    views(root, model)


def named(model: torch.nn.Module, heads: torch.nn.Module) -> dict[str, np.ndarray]:
    """All tensors as released: those of the model by transformers, those of the heads by hand."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        out = load_file(pathlib.Path(folder) / "model.safetensors")
    for name, tensor in heads.layers.named_parameters():
        number, rest = name.split(".", 1)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        out[f"model.layers.{5 + int(number)}.{rest}"] = tensor.detach().numpy()
    return out


def case(root: pathlib.Path, model, heads, rows: list[list[int]], crops: Sequence[int]) -> None:
    """Runs one batch and writes it down."""
    rng = np.random.default_rng(3)
    length = max(map(len, rows))
    ids = np.array([row + [PAD] * (length - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    arrays = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": np.where((mask == 1) & (ids < IMAGE) & (rng.random(ids.shape) < 0.8), ids, -100),
        "pixel_values": rng.normal(size=(len(crops), 3, 16, 16)).astype(np.float32),
        "pixel_values_local": rng.normal(size=(sum(crops), 3, 8, 8)).astype(np.float32),
    }
    inputs = {key: torch.tensor(value) for key, value in arrays.items()}
    positions = torch.arange(length)[None].expand(len(rows), -1)
    out = model(**inputs, num_local_patches=list(crops), position_ids=positions, use_cache=False)
    # The heads take what is behind the final norm, which the wrapper does not give away.
    hidden = model.model(
        **{key: value for key, value in inputs.items() if key != "labels"}, num_local_patches=list(crops),
        position_ids=positions, use_cache=False,
    )[0]  # fmt: skip
    later, logits = losses_ahead(model, heads, inputs, hidden)
    (out.loss + later).backward()
    arrays |= {
        "num_local_patches": np.array(crops),
        "loss": out.loss.detach().numpy(),
        "loss_ahead": later.detach().numpy(),
        "logits": out.logits.detach().numpy(),
        "logits_ahead": logits.detach().numpy(),
    }
    arrays["generated"] = generated(model, inputs, crops)
    gradients = copy.deepcopy(model), copy.deepcopy(heads)
    with torch.no_grad():
        for module, holder in zip((model, heads), gradients, strict=True):
            for parameter, held in zip(module.parameters(), holder.parameters(), strict=True):
                held.copy_(parameter.grad)
    arrays |= {f"grad.{k}": v for k, v in named(*gradients).items() if not k.endswith("router_bias")}
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, root / "step3p7-images.safetensors")


def views(root: pathlib.Path, model: torch.nn.Module) -> None:
    """Features of Step 3.7's views whose sides are no multiples of four patches, or of a patch."""
    rng = np.random.default_rng(8)
    out = {}
    for height, width in ((10, 18), (23, 13), (2, 8)):
        pixels = rng.normal(size=(2, 3, height, width)).astype(np.float32)
        with torch.no_grad():
            features = model.model.get_image_features(torch.tensor(pixels)).pooler_output
        out |= {f"{height}x{width}.pixels": pixels, f"{height}x{width}.features": torch.stack(features).numpy()}
    save_file(out, root / "step3p7-views.safetensors")


def generated(model, inputs: dict[str, torch.Tensor], crops: Sequence[int], count: int = 8) -> np.ndarray:
    """The most likely tokens behind each row, [rows, count], each found by reading all before it anew."""
    out = []
    wholes, own = list(inputs["pixel_values"]), list(inputs["pixel_values_local"])
    crops = list(crops)
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        row, seen = ids[mask == 1].tolist(), {}
        left, numbers = row.count(IMAGE), []
        while left:
            numbers.append(crops.pop(0))
            left -= numbers[-1] + 4
        if numbers:
            seen["pixel_values"] = torch.stack([wholes.pop(0) for _ in numbers])
            if sum(numbers):
                seen["pixel_values_local"] = torch.stack([own.pop(0) for _ in range(sum(numbers))])
            seen["num_local_patches"] = numbers
        start = len(row)
        with torch.no_grad():
            for _ in range(count):
                logits = model(torch.tensor([row]), **seen, use_cache=False).logits
                row.append(int(logits[0, -1].argmax()))
        out.append(row[start:])
    return np.array(out)


def losses_ahead(
    model, heads, inputs: dict[str, torch.Tensor], hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads' losses, each relative to the valid labels of the model itself, and their logits.

    Rows are run one by one, without pads: the heads take no mask.
    """
    ids, labels, mask = inputs["input_ids"], inputs["labels"], inputs["attention_mask"]
    valid = (labels[:, 1:] != -100).sum()
    total, all_logits = torch.zeros(()), torch.zeros(2, *ids.shape, 96)
    for row in range(len(ids)):
        end = int(mask[row].sum())
        hidden = hidden_states[row : row + 1, :end]
        for depth in (1, 2):
            kept = end - depth
            positions = torch.arange(depth, end)[None]
            hidden = heads.forward_layer(
                depth - 1, hidden[:, :kept], positions, None, input_ids=ids[row : row + 1, depth:end]
            )
            logits, targets = model.lm_head(hidden)[0], labels[row, depth + 1 : end]
            lost = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="sum") / valid
            total = total + WEIGHT / 2 * lost
            all_logits[depth - 1, row, :kept] = logits
    return total, all_logits
