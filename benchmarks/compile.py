"""CPU seconds to trace and compile loss and gradients of narrow models of 8 and of 40 layers, for each family.

Layers are scanned: how many there are is a number in the program. Only Step 3.7, whose first and last layers are of
other kinds, has rounds left over that differ. Where JAX's persistent cache is on, this times it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.common import Row, Settings
from cpjax.models import family
from cpjax.shard import Identity, make_batch

VARIANTS = ("qwen3_5", "qwen3_5_moe", "gemma4", "gemma4, E-series", "gemma4, experts", "step3p7")
LAYERS = (8, 40)


def deep(variant: str, layers: int) -> Any:
    """A narrow configuration with released kinds of layers, every fourth full attention.

    Those of Step 3.7 start with full attention, the first three are dense, and the last two have bounds.
    """
    name, _, kind = variant.partition(", ")
    module: Any = family(name)
    types = ("sliding_attention",) * 3 + ("full_attention",)
    text: dict[str, Any] = {"num_hidden_layers": layers, "layer_types": types * (layers // 4)}
    if name.startswith("qwen3_5"):
        text["layer_types"] = None
        text |= {"num_experts": 8} if name == "qwen3_5_moe" else {}
        text |= {"hidden_size": 64, "head_dim": 16, "partial_rotary_factor": 0.5, "mrope_section": (2, 1, 1)}
        vision = module.VisionConfig(out_hidden_size=64)
    elif name == "gemma4":
        text |= {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128}
        text |= {"num_kv_shared_layers": layers // 2, "hidden_size_per_layer_input": 8} if kind == "E-series" else {}
        if kind == "experts":
            text |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
        vision = module.VisionConfig()
    else:
        text |= {"sliding_window": 12, "n_routed_experts": 8, "num_sliding_attention_heads": 96}
        text |= {"layer_types": (types[-1:] + types[:-1]) * (layers // 4), "moe_intermediate_size": 32}
        text |= {"mlp_layer_types": None, "swiglu_limits": (None,) * (layers - 2) + (7.0, 7.0)}
        vision = module.VisionConfig()
    sizes = {"vocab_size": 128, "hidden_size": 64, "head_dim": 16}
    sizes |= {"intermediate_size": 96} if name != "qwen3_5_moe" else {"moe_intermediate_size": 32}
    special = {"image_token_id": 1} | ({} if name == "step3p7" else {"video_token_id": 2})
    return module.Config(text=module.TextConfig(**{**sizes, **text}), vision=vision, **special)


def program(variant: str, layers: int) -> tuple[Any, Any]:
    """Loss and gradients of a row of text as a jitted function, and the shapes of the parameters that it takes."""
    config = deep(variant, layers)
    module: Any = family(config.model_type)
    row = module.synthetic_row(config, 8, 0, np.random.default_rng(0))
    batch, sharder = make_batch(module.prepare(config, [row]), Identity(), streams=module.STREAMS)
    graph, params, buffers = nnx.split(nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0))), nnx.Param, ...)

    def loss(params: Any, buffers: Any) -> jax.Array:
        model = nnx.merge(graph, params, buffers)
        return model.logits(model(batch, sharder)).sum()

    return jax.jit(jax.value_and_grad(loss)), (params, buffers)


def run(settings: Settings) -> Iterator[list[Row]]:
    """The rows of one family after the other."""
    for variant in VARIANTS[:1] if settings.quick else VARIANTS:
        rows = []
        for layers in LAYERS[:1] if settings.quick else LAYERS:
            jax.clear_caches()
            start = time.process_time()
            function, shapes = program(variant, layers)
            function.lower(*shapes).compile()
            seconds = time.process_time() - start
            ratio = seconds / rows[0]["seconds"] if rows else 1.0
            row = {"part": "compile", "problem": f"compiling {variant}", "name": f"{layers} layers"}
            rows.append({**row, "seconds": seconds, "ratio": ratio, "note": ""})
        yield rows
