"""The names of the tensors of Qwen3.5 with mixtures of experts on disk."""

from __future__ import annotations

from cpjax.models.common.checkpoint import Weight
from cpjax.models.common.qwen3_5.weights import table
from cpjax.models.qwen3_5_moe.config import Config

_MLP = {
    "mlp.gate.kernel": "mlp.gate.weight",
    "mlp.shared_expert.gate_proj.kernel": "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.kernel": "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj.kernel": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_expert_gate.kernel": "mlp.shared_expert_gate.weight",
}


def weights(config: Config) -> list[Weight]:
    """Every parameter of the model with the tensors that hold it; kernels are [in, out] here and [out, in] on disk.

    As released: each expert has its own tensors.
    """
    rows = table(config, _MLP)
    for slot, prefixes in _experts(config):
        for name in ("gate_proj", "up_proj", "down_proj"):
            numbers = range(config.text.num_experts)
            names = tuple(f"{prefix}{number}.{name}.weight" for prefix in prefixes for number in numbers)
            rows.append(Weight(f"layers.slots.{slot}.mlp.experts.{name}", names, stacked=2, transpose=True))
    return rows


def stacked_weights(config: Config) -> list[Weight]:
    """The same, as transformers saves it with `save_original_format=False`: all experts of a layer in one tensor."""
    rows = table(config, _MLP)
    for slot, prefixes in _experts(config):
        for name, own, part in (
            ("gate_up_proj", "gate_proj", (0, 2)),
            ("gate_up_proj", "up_proj", (1, 2)),
            ("down_proj", "down_proj", (0, 1)),
        ):
            names = tuple(prefix + name for prefix in prefixes)
            path = f"layers.slots.{slot}.mlp.experts.{own}"
            rows.append(Weight(path, names, stacked=1, transpose=True, part=part))
    return rows


def _experts(config: Config) -> list[tuple[int, list[str]]]:
    """Each slot of a group, and what the names of the experts of its layers begin with."""
    text = config.text
    prefix = "model.language_model.layers.{}.mlp.experts."
    slots = range(text.period)
    return [(slot, [prefix.format(i) for i in range(slot, text.num_hidden_layers, text.period)]) for slot in slots]
