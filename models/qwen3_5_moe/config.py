"""Configuration of a Qwen3.5 vision-language model with mixtures of experts."""

from __future__ import annotations

import dataclasses

from cpjax.models.common.qwen3_5 import config


@dataclasses.dataclass(frozen=True)
class TextConfig(config.TextConfig):
    """The language model; names as in config.json."""

    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"text_config.num_experts_per_tok={self.num_experts_per_tok} is more than "
                f"num_experts={self.num_experts}: a token goes to different experts"
            )

    @property
    def router_loss(self) -> float:
        """What the balance loss is multiplied by; as with transformers, zero unless `output_router_logits`."""
        return self.router_aux_loss_coef if self.output_router_logits else 0.0


@dataclasses.dataclass(frozen=True)
class Config(config.Config):
    """A whole model: what config.json says."""

    text: TextConfig = dataclasses.field(default_factory=TextConfig)

    model_type = "qwen3_5_moe"
    architecture = "Qwen3_5MoeForConditionalGeneration"
    text_type = TextConfig
