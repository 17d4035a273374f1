"""What the tests of Qwen3.5 share: the golden files as rows, the loss, and its gradients on a mesh."""

import dataclasses
import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from cpjax.models import from_pretrained
from cpjax.models.common.experts import balance_loss
from cpjax.models.qwen3_5 import Media, Row
from tests.rendezvous import unordered

GOLDENS = pathlib.Path(__file__).parent / "goldens"
FOLDER = GOLDENS / "qwen3_5"
WEIGHT = 0.3
"""Share of the loss of a head of multi-token prediction."""
HEADED = {"qwen3_5": "images", "qwen3_5_moe": "media"}
"""The case of each family that has such a head."""


@functools.cache
def golden_model(family="qwen3_5"):
    return from_pretrained(GOLDENS / family)


def write_with_head(family, folder):
    """The golden folder with a head of multi-token prediction, which is golden as well."""
    config = json.loads((GOLDENS / family / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    head = {name: value for name, value in golden(HEADED[family], family).items() if name.startswith("mtp.")}
    save_file(load_file(GOLDENS / family / "model.safetensors") | head, folder / "model.safetensors")


@functools.cache
def model_with_head(family="qwen3_5", dtype=None):
    with tempfile.TemporaryDirectory() as folder:
        write_with_head(family, pathlib.Path(folder))
        return from_pretrained(folder, dtype=dtype)


@functools.cache
def small_model(family="qwen3_5", dtype=None):
    """The golden model's last linear and full layer of each group, with an epsilon that keeps float32 noise small."""
    model = model_with_head(family, dtype)
    text = dataclasses.replace(
        model.config.text, num_hidden_layers=4, layer_types=("linear_attention", "full_attention") * 2,
        rms_norm_eps=1e-2,
    )  # fmt: skip
    config = dataclasses.replace(model.config, text=text)
    graph = nnx.split(nnx.eval_shape(lambda: type(model)(config, rngs=nnx.Rngs(0))))[0]
    state = nnx.to_flat_state(nnx.split(model)[1])
    slots = {model.config.text.period - 2: 0, model.config.text.period - 1: 1}
    kept = {
        (*path[:2], slots[path[2]], *path[3:]) if path[0] == "layers" else path: value
        for path, value in state
        if path[0] != "layers" or path[2] in slots
    }
    return nnx.merge(graph, nnx.from_flat_state(kept))


@functools.cache
def golden(name, family="qwen3_5"):
    return load_file(GOLDENS / f"{family}-{name}.safetensors")


def golden_rows(case, config):
    """The rows of a golden batch; its images and videos are dealt out in the order of their placeholders."""
    queues = {
        config.image_token_id: media_of(case, "pixel_values", "image_grid_thw", "image"),
        config.video_token_id: media_of(case, "pixel_values_videos", "video_grid_thw", "video"),
    }
    rows = []
    for ids, labels, mask in zip(case["input_ids"], case["labels"], case["attention_mask"], strict=True):
        ids, labels, media, token = ids[mask == 1], labels[mask == 1], [], 0
        while token < len(ids):
            if ids[token] in queues:
                item = queues[ids[token]].pop(0)
                media.append(item)
                frame = item.grid[1] * item.grid[2] // 4
                seen = np.flatnonzero(ids[token:] == ids[token])[: item.grid[0] * frame]
                token += seen[-1]
            token += 1
        rows.append(Row(ids, labels, media=media))
    return rows


def media_of(case, pixels, grid, modality):
    if grid not in case:
        return []
    ends = np.cumsum(case[grid].prod(1))
    parts = np.split(case[pixels], ends[:-1])
    return [Media(p, tuple(g.tolist()), modality) for p, g in zip(parts, case[grid], strict=True)]


def loss_of(logits, labels):
    """Sum of the cross-entropies of the local tokens."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(labels >= 0, jax.nn.logsumexp(logits, axis=-1) - picked, 0).sum()


def value_and_grads(model, batch, sharder, mesh=None, transport="ring"):
    """Loss over valid tokens, its gradient, and all local logits; by way of `shard_map` when there is a mesh.

    The loss has its share of a head of multi-token prediction and of the balance of experts, where there are any.
    """
    graph, params = nnx.split(model)
    valid = max(int((np.asarray(batch["labels"]) >= 0).sum()), 1)

    def local(params, batch):
        model = nnx.merge(graph, params)
        options = {"transport": transport, "remat": "none"}  # which is quicker to compile
        hidden, sums, later = model.outputs(batch, sharder, ahead=model.mtp is not None, **options)
        logits = [model.logits(hidden) for hidden in (hidden, *(ahead for ahead, _ in later))]
        total = loss_of(logits[0], sharder.take_local(batch["labels"])) / valid
        for own, (_, labels) in zip(logits[1:], later, strict=True):
            total += WEIGHT * loss_of(own, labels) / valid
        if sums is not None:
            whole = sums if mesh is None else jax.lax.psum(sums, "cp")
            total += model.router_loss * balance_loss(sums, whole.chosen, whole.tokens)
        return total if mesh is None else jax.lax.psum(total, "cp"), logits

    if mesh is None:
        fn = local
    else:
        spec = jax.sharding.PartitionSpec
        fn = jax.shard_map(local, mesh=mesh, in_specs=spec(), out_specs=(spec(), spec(None, "cp")), axis_names={"cp"})
    options = {"xla_backend_optimization_level": 0}  # halves the compile time
    run = jax.jit(jax.value_and_grad(fn, has_aux=True), compiler_options=options).lower(params, batch).compile()
    assert not unordered(run.as_text())
    (loss, logits), grads = run(params, batch)
    return loss, grads, logits
