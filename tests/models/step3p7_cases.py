"""What the tests of Step 3.7 share: the golden files as rows, the loss, and its gradients on a mesh."""

import functools
import pathlib

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from cpjax.models import from_pretrained
from cpjax.models.step3p7 import Row, patchify

from .qwen3_5_cases import loss_of

GOLDENS = pathlib.Path(__file__).parent / "goldens"
FOLDER = GOLDENS / "step3p7"
WEIGHT = 0.3
"""Share of the losses of the heads of multi-token prediction."""


@functools.cache
def golden_model():
    return from_pretrained(FOLDER)


@functools.cache
def golden():
    return load_file(GOLDENS / "step3p7-images.safetensors")


def golden_rows(case, config):
    """The rows of a golden batch; its images are dealt out in the order of their placeholders."""
    crops = iter(case["pixel_values_local"])
    images = [
        patchify(config.vision, [np.moveaxis(view, 0, -1) for view in (*(next(crops) for _ in range(n)), whole)])
        for n, whole in zip(case["num_local_patches"], case["pixel_values"], strict=True)
    ]
    rows = []
    for ids, labels, mask in zip(case["input_ids"], case["labels"], case["attention_mask"], strict=True):
        ids, labels, media = ids[mask == 1], labels[mask == 1], []
        left = int((ids == config.image_token_id).sum())
        while left:
            media.append(images.pop(0))
            left -= len(media[-1].patches) // 16
        rows.append(Row(ids, labels, media=media))
    assert not images
    return rows


def value_and_grads(graph, buffers, mesh=None, transport="ring"):
    """(params, batch, sharder) -> loss and that of the heads over valid tokens, all logits, gradient of the losses.

    One program for all batches and sharders of the same shapes.
    """

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # halves the compile time
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params, batch, sharder):
        valid = (batch["labels"] >= 0).sum()

        def local(params, batch):
            model = nnx.merge(graph, params, buffers)
            options = {"transport": transport, "remat": "none"}  # which is quicker to compile
            hidden = model(batch, sharder, **options)
            heads = [(hidden, sharder.take_local(batch["labels"])), *model.ahead(hidden, batch, sharder, **options)]
            logits = [model.logits(hidden) for hidden, _ in heads]
            losses = [loss_of(own, labels) / valid for own, (_, labels) in zip(logits, heads, strict=True)]
            return losses if mesh is None else jax.lax.psum(losses, "cp"), logits

        fn = local
        if mesh is not None:
            spec = jax.sharding.PartitionSpec
            parts = spec(), spec(None, "cp")
            fn = jax.shard_map(local, mesh=mesh, in_specs=spec(), out_specs=parts, axis_names={"cp"})
        losses, logits = fn(params, batch)
        losses = losses[0], WEIGHT * sum(losses[1:]) / len(losses[1:])
        return sum(losses), (losses, logits)

    def call(params, batch, sharder):
        (_, aux), grads = run(params, batch, sharder)
        return *aux, grads

    return call
