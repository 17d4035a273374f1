"""Qwen3.5, dense and with experts: folders as transformers saves them, cases, positions, adapters."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.models.make_goldens.spread import spread

PAD, IMAGE, VIDEO, START, END = 0, 90, 91, 92, 93
WEIGHT = 0.3
"""Share of the loss of a head of multi-token prediction."""


def qwen3_5(root: pathlib.Path) -> None:
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
    model.save_pretrained(root / "qwen3_5")
    (root / "qwen3_5" / "generation_config.json").unlink(missing_ok=True)

    rng = np.random.default_rng(2)

    def text(length: int) -> list[int]:
        return rng.integers(1, 90, length).tolist()

    def image(tokens: int) -> list[int]:
        return [START] + [IMAGE] * tokens + [END]

    def frames(count: int, tokens: int) -> list[int]:
        return [token for _ in range(count) for token in [*text(2), START, *[VIDEO] * tokens, END]]

    case(root, model, "text", [text(21), text(14)])
    case(
        root,
        model,
        "images",
        [text(3) + image(4) + text(5) + image(3) + text(4), [IMAGE] * 3 + text(2) + image(2) + image(4) + text(5)],
        images=[(1, 4, 4), (1, 2, 6), (1, 6, 2), (1, 4, 2), (1, 4, 4)],
        headed=True,
    )
    case(
        root,
        model,
        "video",
        [text(2) + frames(3, 2) + text(4) + image(3) + frames(2, 4) + text(3)],
        images=[(1, 2, 6)],
        videos=[(3, 4, 2), (2, 4, 4)],
    )
    positions(root, model)
    save_file({"tokens": np.array(generated(root, model))}, root / "qwen3_5-generated.safetensors")


def qwen3_5_moe(root: pathlib.Path) -> None:
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
    model.save_pretrained(root / "qwen3_5_moe")
    (root / "qwen3_5_moe" / "generation_config.json").unlink(missing_ok=True)
    rng = np.random.default_rng(2)

    def text(length: int) -> list[int]:
        return rng.integers(1, 90, length).tolist()

    case(root, model, "text", [text(21), text(14)], family="qwen3_5_moe")
    row = text(3) + [START] + [IMAGE] * 4 + [END] + text(5) + [START] + [VIDEO] * 3 + [END] + text(6)
    grids = {"images": [(1, 4, 4)], "videos": [(1, 2, 6)]}
    case(root, model, "media", [row, text(9)], **grids, family="qwen3_5_moe", headed=True)
    prompts = torch.tensor(load_file(root / "qwen3_5_moe-text.safetensors")["input_ids"][:1])
    out = model.generate(input_ids=prompts, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    save_file({"tokens": out[:, prompts.shape[1] :].numpy()}, root / "qwen3_5_moe-generated.safetensors")


def case(
    root: pathlib.Path, model, name: str, rows: list[list[int]], images=(), videos=(), family: str = "qwen3_5",
    headed: bool = False,
) -> None:  # fmt: skip
    """Runs one batch and writes it down.

    Args:
        images, videos: grids in the order of the rows.
        headed: whether to add a head of multi-token prediction. Gradients are then those with its share of the loss.
    """
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
    inputs["position_ids"], seen = positions, {}
    hook = model.model.language_model.register_forward_hook(
        lambda module, args, options, out: seen.update(options, hidden=out[0]), with_kwargs=True
    )
    model.zero_grad()
    out = model(**inputs, mm_token_type_ids=torch.tensor(kinds), use_cache=False)
    hook.remove()
    arrays |= {
        "position_ids": positions.numpy(),
        "logits": out.logits.detach().numpy(),
        "loss": out.loss.detach().numpy(),
    }
    loss, parameters = out.loss, list(model.named_parameters())
    if headed:
        head = Head(model).float().eval()
        spread(head, seed=8)
        later, logits = ahead(model, head, inputs, seen)
        arrays |= {"logits_ahead": logits.detach().numpy(), "loss_ahead": later.detach().numpy()}
        loss = loss + WEIGHT * later
        own = [(f"mtp.{key}", parameter) for key, parameter in head.named_parameters()]
        parameters += own
        arrays |= {name: value for key, p in own for name, value in by_expert(key, p.detach().numpy())}
    loss.backward()
    for key, parameter in parameters:
        if parameter.grad is not None:
            arrays |= {f"grad.{on_disk}": grad for on_disk, grad in by_expert(key, parameter.grad.numpy())}
    save_file(
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, root / f"{family}-{name}.safetensors"
    )


class Head(torch.nn.Module):
    """The head of multi-token prediction, which transformers does not have, made of its parts.

    Parameters are named as in released folders, there below `mtp.`.
    """

    def __init__(self, model):
        super().__init__()
        config, language = model.config.text_config, model.model.language_model
        size, full = config.hidden_size, config.layer_types.index("full_attention")
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, type(language.norm)(size, eps=config.rms_norm_eps))
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([type(language.layers[full])(config, full)])

    def forward(self, told: torch.Tensor, hidden: torch.Tensor, turns: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(told), self.pre_fc_norm_hidden(hidden)], dim=-1))
        later = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        return self.norm(self.layers[0](x, position_embeddings=turns, attention_mask=later))


def ahead(model, head: Head, inputs: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]) -> tuple:
    """The head's loss, relative to the valid labels of the model, and its logits.

    Told is what enters the layers at the next token; positions are those of the token itself. Rows are run one by one,
    without pads.

    Args:
        seen: inputs_embeds and output of the layers.
    """
    labels, language = inputs["labels"], model.model.language_model
    valid = (labels[:, 1:] != -100).sum()
    loss, logits = torch.zeros(()), torch.zeros(*labels.shape, model.config.text_config.vocab_size)
    for row, end in enumerate(inputs["attention_mask"].sum(1).tolist()):
        hidden, told = seen["hidden"][row : row + 1, : end - 1], seen["inputs_embeds"][row : row + 1, 1:end]
        turns = language.rotary_emb(hidden, inputs["position_ids"][:, row : row + 1, : end - 1])
        made = model.lm_head(head(told, hidden, turns))[0]
        logits[row, : end - 1] = made
        loss = loss + torch.nn.functional.cross_entropy(made[:-1], labels[row, 2:end], reduction="sum") / valid
    return loss, logits


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


def positions(root: pathlib.Path, model) -> None:
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
        {key: np.ascontiguousarray(value) for key, value in arrays.items()}, root / "qwen3_5-positions.safetensors"
    )


ADAPTERS = {
    "lora": dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "in_proj_qkv", "attn.qkv"]),
    "dora": dict(r=2, lora_alpha=6, target_modules=["k_proj", "gate_proj"], use_dora=True, use_rslora=True),
}


def adapters(root: pathlib.Path) -> None:
    """Adapters on the saved model, and what they make of the case "images"."""
    import peft  # only here: tests use the rest of this file without it

    case = load_file(root / "qwen3_5-images.safetensors")
    ids = case["input_ids"]
    inputs = {key: torch.tensor(case[key]) for key in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")}
    inputs |= {
        "mm_token_type_ids": torch.tensor(np.where(ids == IMAGE, 1, 0)),
        "position_ids": torch.tensor(case["position_ids"]),
    }
    logits = {}
    for name, options in ADAPTERS.items():
        base = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
            root / "qwen3_5", dtype=torch.float32, attn_implementation="eager"
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
        folder = root / f"qwen3_5-{name}"
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config |= {"base_model_name_or_path": "qwen3_5", "target_modules": sorted(config["target_modules"])}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(logits, root / "qwen3_5-adapters.safetensors")


def generated(root: pathlib.Path, model, count: int = 12, stop: int | None = None) -> list[list[int]]:
    """What follows the rows of all cases, in one batch. (Behind a prompt that ends in an image, transformers 5.24
    generates from other positions than its forward pass has: no prompt here does.)"""
    cases = [load_file(root / f"qwen3_5-{name}.safetensors") for name in ("text", "images", "video")]
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
