"""Step 3.7 under context parallelism: losses and every gradient equal the unsharded ones (I1, I2, I3)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.step3p7 import STREAMS, Config, Model, Row, TextConfig, VisionConfig, patchify, prepare
from cpjax.shard import IGNORE, Identity, Packed, layout_from_name, make_batch

from .step3p7_cases import value_and_grads

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
    """Structure, parameters and buffers."""

    def create():
        return nnx.split(Model(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float64), nnx.Param, ...)[1:]

    graph = nnx.split(nnx.eval_shape(lambda: Model(CONFIG, rngs=nnx.Rngs(0))))[0]
    params, buffers = jax.jit(create)()
    return graph, params, jax.tree.map(lambda bias: bias + np.linspace(-0.3, 0.3, bias.shape[-1]), buffers)


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


def test_the_batch_holds_the_hard_cases():
    batch = host_batch(documents())
    ids = batch["input_ids"][0]
    assert ids[0] == ids[-1] == CONFIG.image_token_id and len(ids) == 41
    padded, sharder = make_batch(batch, layout_from_name("contiguous", 8), streams=STREAMS)
    where = sharder.layout.indices(sharder.padded_length, np.arange(8))
    assert sharder.local_length < WINDOW < 41 // 2
    assert (padded["labels"][:, where] == IGNORE).all((0, 2)).any(), "a rank without a label"
    crosses = (padded["vision_index"][0, where[:-1, -1]] >= 0) & (padded["vision_index"][0, where[1:, 0]] >= 0)
    assert crosses.any(), "an image over a boundary"


@pytest.mark.parametrize(
    ("name", "cp", "transport"),
    [("packed", 2, "ulysses"), ("zigzag", 4, "allgather"), ("contiguous", 8, "ring")],
)
def test_losses_and_every_gradient_equal_the_dense_ones(name, cp, transport):
    with jax.enable_x64(True):
        layout, length = (Packed(cp), 72) if name == "packed" else (layout_from_name(name, cp), None)
        found, expected = run(program(make_mesh(cp=cp), transport), documents(), layout, length), dense()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        largest = np.abs(value).max()
        assert largest > 0, key
        assert np.abs(found[key] - value).max() < 1e-11 * largest, key


def test_documents_have_the_losses_and_gradients_of_one_by_one():
    """Losses are sums over the valid tokens of each batch, so these are undone; shapes are those of the dense run."""
    with jax.enable_x64(True):
        expected = dense()
        total, count = {}, 0
        for row in documents():
            for alone in row:
                valid = int((host_batch([[alone], [alone]])["labels"][0] != IGNORE).sum())
                twice = run(program(), [[alone], [alone]], Identity())
                total = {key: total.get(key, 0) + valid * value for key, value in twice.items()}
                count += valid
    for key, value in expected.items():
        assert np.abs(total[key] / count - value).max() < 1e-11 * np.abs(value).max(), key
