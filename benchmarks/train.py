"""Training steps of one small Qwen3.5 on text: on one device, split over cp of them, and in transformers with torch.

A step is loss, gradients and AdamW, in float32, layers rematerialised nowhere. The weights are the same, written by our
export; what is compared is the loss of the first step.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.common import Contender, Row, Settings, devices, measure, timed
from cpjax.mesh import make_mesh
from cpjax.models import hf_names, save_pretrained
from cpjax.models.qwen3_5 import STREAMS, Config, Model, TextConfig, VisionConfig, prepare, weights
from cpjax.models.qwen3_5 import Row as Tokens
from cpjax.shard import layout_from_name, make_batch
from cpjax.train.config import OptimizerConfig
from cpjax.train.optimizer import make_optimizer, make_schedule
from cpjax.train.step import init_state, make_train_step, place_batch, split_model

CONFIG = Config(
    text=TextConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, pad_token_id=0, mrope_section=(4, 2, 2),
    ),
    vision=VisionConfig(
        depth=1, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4, out_hidden_size=256,
        num_position_embeddings=16,
    ),
    image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
)  # fmt: skip

OPTIONS = OptimizerConfig(lr=1e-4, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0)


def run(settings: Settings) -> Iterator[list[Row]]:
    """The rows of one length after the other."""
    config = CONFIG
    if settings.quick:  # a layer of each kind
        text = dataclasses.replace(config.text, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"))
        config = dataclasses.replace(config, text=text)
    model = Model(config, rngs=nnx.Rngs(0))
    for length in settings.lengths:
        ids = np.random.default_rng(0).integers(5, CONFIG.text.vocab_size, length)
        found = [_cpjax(model, ids, 1), _cpjax(model, ids, settings.cp), _transformers(model, ids)]
        wanted = found[0][1]
        for contender, loss in found:
            contender.max_error = None if loss is None else abs(loss - wanted) / wanted
        yield measure("train", "training step", length, [contender for contender, _ in found], settings.seconds)


def _cpjax(model: Model, ids: np.ndarray, cp: int) -> tuple[Contender, float]:
    """A contender, and the loss of its first step."""
    mesh = make_mesh(cp=cp, devices=devices(cp))
    graphdef, *arrays = split_model(model, ["visual"], hf_names(model))
    params, frozen = jax.tree.map(lambda x: x.copy(), arrays)  # the first step takes them away
    optimizer = make_optimizer(OPTIONS, weights(model.config), params)
    rows = prepare(model.config, [Tokens(ids, ids)])
    host, sharder = make_batch(rows, layout_from_name("zigzag", cp), streams=STREAMS)
    step: Any = make_train_step(graphdef, optimizer, make_schedule(OPTIONS, 100), mesh, remat="none")
    state, batch = init_state(params, frozen, optimizer, mesh), place_batch(host, mesh)
    compiled = step.lower(state, batch, sharder).compile()

    def take() -> float:
        nonlocal state
        state, metrics = compiled(state, batch, sharder)
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    loss, first = timed(take)
    temp = compiled.memory_analysis().temp_size_in_bytes
    return Contender(f"cpjax, cp={cp}", take, temp_bytes=temp, rounds=[first]), loss


def _transformers(model: Model, ids: np.ndarray) -> tuple[Contender, float | None]:
    name = "transformers, torch"
    if missing := [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]:
        return Contender(name, note=f"{' and '.join(missing)} not installed"), None
    import torch
    from transformers import Qwen3_5ForConditionalGeneration

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, f"{folder}/model")
        theirs = Qwen3_5ForConditionalGeneration.from_pretrained(f"{folder}/model", dtype=torch.float32).train()
    theirs.model.visual.requires_grad_(False)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=OPTIONS.lr, betas=OPTIONS.betas, weight_decay=0.0)
    tokens = torch.from_numpy(ids)[None]

    def take() -> float:
        optimizer.zero_grad()
        loss = theirs(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    loss, first = timed(take)
    return Contender(name, take, note=f"{torch.get_num_threads()} threads", rounds=[first]), loss
