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
    for path, prefixes in _experts(config):
        for name in ("gate_proj", "up_proj", "down_proj"):
            numbers = range(config.text.num_experts)
            names = tuple(f"{prefix}{number}.{name}.weight" for prefix in prefixes for number in numbers)
            rows.append(Weight(path + name, names, stacked=2, transpose=True))
    return rows


def stacked_weights(config: Config) -> list[Weight]:
    """The same, as transformers saves it with `save_original_format=False`: all experts of a layer in one tensor."""
    rows = table(config, _MLP)
    for path, prefixes in _experts(config):
        for name, own, part in (
            ("gate_up_proj", "gate_proj", (0, 2)),
            ("gate_up_proj", "up_proj", (1, 2)),
            ("down_proj", "down_proj", (0, 1)),
        ):
            names = tuple(prefix + name for prefix in prefixes)
            rows.append(Weight(path + own, names, stacked=1, transpose=True, part=part))
    return rows


def _experts(config: Config) -> list[tuple[str, list[str]]]:
    """What the paths of experts begin with, and for each layer what the names of its experts do."""
    text = config.text
    layer, end = "model.language_model.layers.{}", ".mlp.experts."
    found = [
        (f"layers.slots.{slot}{end}", [layer.format(i) + end for i in range(slot, text.num_hidden_layers, text.period)])
        for slot in range(text.period)
    ]
    return found + ([(f"mtp.layer{end}", [f"mtp.layers.0{end}"])] if text.mtp_num_hidden_layers else [])
