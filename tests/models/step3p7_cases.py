"""What the tests of Step 3.7 share: golden files as rows, a small model with its batch, losses and gradients."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from cpjax.models import from_pretrained
from cpjax.models.step3p7 import STREAMS, Config, Model, Row, TextConfig, VisionConfig, patchify, prepare
from cpjax.shard import IGNORE, Identity, make_batch

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
            hidden, _, later = model.outputs(batch, sharder, ahead=True, **options)
            heads = [(hidden, sharder.take_local(batch["labels"])), *later]
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


WINDOW = 8  # longer than the 6 tokens of a chunk under cp 8, shorter than the 22 under cp 2
CONFIG = Config(
    text=TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_sliding_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, pad_token_id=0,
        layer_types=("sliding_attention",), mlp_layer_types=("sparse",), num_experts_per_tok=2, n_routed_experts=4,
        moe_intermediate_size=8, share_expert_dim=8, swiglu_limits=(0.5,), swiglu_limits_shared=(0.5,),
        num_nextn_predict_layers=1, mtp_layer_types=("full_attention",),
    ),
    vision=VisionConfig(
        num_hidden_layers=1, hidden_size=8, intermediate_size=16, num_attention_heads=1, num_channels=1, image_size=16,
        patch_size=2, layer_scale_init_value=1.0,
    ),
    image_token_id=1,
)  # fmt: skip
WHOLE, CROP = (16, 16, 1), (8, 8, 1)
"""Views of four tokens and of one."""


def document(rng, length, images):
    """A row of one document with images of (first token, crops), each whole view behind its crops."""
    ids, media = rng.integers(2, 32, length), []
    for start, crops in images:
        ids[start : start + crops + 4] = CONFIG.image_token_id
        media.append(patchify(CONFIG.vision, [rng.normal(size=shape) for shape in [CROP] * crops + [WHOLE]]))
    return Row(ids, np.where(ids > 1, ids, IGNORE), media=media)


@functools.cache
def documents():
    """An image is the first of all tokens and another the last; one more crosses the chunks of 11 and of 6 tokens."""
    rng = np.random.default_rng(0)
    rows = [
        [document(rng, 16, [(0, 2), (9, 0)]), document(rng, 25, [(3, 4), (21, 0)])],
        [document(rng, 19, [(2, 1)])],
    ]
    rows[0][1].labels[3:18] = IGNORE
    return rows


def host_batch(rows):
    joined = [
        Row(
            np.concatenate([d.input_ids for d in row]),
            np.concatenate([d.labels for d in row]),
            np.repeat(1 + np.arange(len(row)), [len(d.input_ids) for d in row]),
            [image for d in row for image in d.media],
        )
        for row in rows
    ]
    return prepare(CONFIG, joined, length=41, num_patches=448)


@functools.cache
def fresh_model():
    """Structure, float64 parameters and buffers, none of them neutral."""
    rng = np.random.default_rng(1)
    parts = nnx.split(nnx.eval_shape(lambda: Model(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float64)), nnx.Param, ...)

    def draw(leaf):
        scale = 0.3 if leaf.ndim < 3 else leaf.shape[-2] ** -0.5  # stacked vectors are 2-D
        return jnp.asarray(scale * rng.normal(size=leaf.shape))

    return parts[0], *(jax.tree.map(draw, part) for part in parts[1:])


@functools.cache
def program(mesh=None, transport="ring"):
    graph, _, buffers = fresh_model()
    return value_and_grads(graph, buffers, mesh, transport)


def run(run, rows, layout, padded_length=None):
    """Losses and gradients by name, as NumPy."""
    batch, sharder = make_batch(host_batch(rows), layout, streams=STREAMS, padded_length=padded_length)
    losses, _, grads = run(fresh_model()[1], batch, sharder)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {"losses": np.array(losses)} | {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@functools.cache
def dense():
    return run(program(), documents(), Identity())
