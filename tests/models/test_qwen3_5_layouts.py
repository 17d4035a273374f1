"""Qwen3.5 on layouts without runs, whose linear layers work in contiguous order: the dense loss and gradients (I1)."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.qwen3_5 import STREAMS, Config, Model, Row, TextConfig, VisionConfig, patchify, prepare
from cpjax.shard import Dispatched, Identity, Packed, SliceKind, Striped, dispatch, make_batch

from .qwen3_5_cases import loss_of

ROW, PADDED = 21, 56
HIDDEN = 20

CONFIG = Config(
    text=TextConfig(
        vocab_size=32, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=6,
        layer_types=("linear_attention", "linear_attention", "full_attention") * 2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, pad_token_id=0, mtp_num_hidden_layers=1, partial_rotary_factor=0.5,
        mrope_section=(2, 1, 1),
    ),
    vision=VisionConfig(
        depth=1, hidden_size=8, intermediate_size=16, num_heads=1, in_channels=1, patch_size=2, out_hidden_size=HIDDEN,
        num_position_embeddings=4,
    ),
    image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4, tie_word_embeddings=False,
)  # fmt: skip

ROWS = [[[13, 5], [21]], [[7], [9, 11]]]
"""Lengths of the documents of two batches of two rows; one of 21 tokens has an image of six, the others of one."""


@functools.cache
def batch_of(number):
    """The host batch of the rows, and one of each document alone, in the same shapes."""
    rng = np.random.default_rng(number)
    documents, rows = [], []
    for lengths in ROWS[number]:
        row = []
        for length in lengths:
            wide = length == ROW
            ids = rng.integers(5, 32, length)
            ids[3 : 9 if wide else 4] = CONFIG.image_token_id
            labels = np.where(rng.random(length) < 0.6, ids, -100)
            image = patchify(CONFIG.vision, rng.normal(size=(8, 12, 1) if wide else (4, 4, 1)))
            row.append(Row(ids, labels, media=[image]))
        documents += row
        rows.append(
            Row(
                np.concatenate([d.input_ids for d in row]),
                np.concatenate([d.labels for d in row]),
                np.repeat(1 + np.arange(len(row)), lengths),
                [image for d in row for image in d.media],
            )
        )
    sizes = {"length": ROW, "num_patches": 24}
    return prepare(CONFIG, rows, **sizes), [prepare(CONFIG, [document], **sizes) for document in documents]


def compiled(mesh, batch, sharder, remat="none"):
    """Parameters, and `(params, batch, sharder, valid) -> (loss, gradients)` for sharders and batches like these."""
    graph, params = nnx.split(Model(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float64))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # halves the compile time
    @jax.value_and_grad
    def loss_and_gradients(params, batch, sharder, valid):
        def local(params, batch):
            model = nnx.merge(graph, params)
            hidden, _, later = model.outputs(batch, sharder, ahead=True, remat=remat)
            heads = [(hidden, sharder.take_local(batch["labels"])), *later]
            return jax.lax.psum(sum(loss_of(model.logits(hidden), labels) for hidden, labels in heads), "cp")

        spec = jax.sharding.PartitionSpec()
        total = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"})(params, batch)
        return total / valid

    return params, loss_and_gradients.lower(params, batch, sharder, 1).compile()


def flat(loss, grads):
    return {"loss": np.asarray(loss)} | {
        jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(grads)
    }


def valid_labels(number):
    return int((batch_of(number)[0]["labels"] >= 0).sum())


@functools.cache
def one_by_one():
    """Loss and gradients of each of the two batches, summed over its documents, each run alone and unsharded."""
    documents = [[make_batch(d, Identity(), streams=STREAMS) for d in batch_of(n)[1]] for n in (0, 1)]
    params, run = compiled(make_mesh(), *documents[0][0])
    found = [[flat(*run(params, *d, valid_labels(n))) for d in documents[n]] for n in (0, 1)]
    return [{name: sum(d[name] for d in batch) for name in batch[0]} for batch in found]


def balanced(number, cp):
    """A dispatched sharder for the documents of both rows."""
    cuts = [np.cumsum([0, *lengths]) for lengths in ROWS[number]]
    slices = [[a, b, a, b, SliceKind.CAUSAL] for cut in cuts for a, b in itertools.pairwise(cut)]
    return dispatch(slices, ROW, Dispatched(cp, chunk_size=2))[0]


@functools.cache
def sharded(name, cp):
    """Parameters, the program compiled for the first batch, and both batches with their sharders.

    Under the packed layout layers are rematerialised, as when training; otherwise not, which is quicker to compile.
    """
    batches = []
    for number in (0, 1):
        layout = {"packed": Packed(cp), "striped": Striped(cp), "dispatched": balanced(number, cp)}[name]
        padded = PADDED if name == "packed" else None
        batches.append(make_batch(batch_of(number)[0], layout, streams=STREAMS, padded_length=padded))
    remat = "layer" if name == "packed" else "none"
    return *compiled(make_mesh(cp=cp), *batches[0], remat), batches


@pytest.mark.parametrize(("name", "cp"), [("packed", 4), ("striped", 2), ("dispatched", 2)])
def test_documents_have_the_loss_and_every_gradient_of_one_by_one(name, cp):
    """Two batches, whose documents differ in number and length, are data of one program."""
    with jax.enable_x64(True):
        params, run, batches = sharded(name, cp)
        for number, (batch, sharder) in enumerate(batches):
            found, wanted = flat(*run(params, batch, sharder, valid_labels(number))), one_by_one()[number]
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                largest = np.abs(value).max()
                assert largest > 0, key
                assert np.abs(found[key] - value).max() < 1e-11 * largest, key


def test_two_linear_layers_take_one_exchange_in_and_one_out():
    """Per group: forward, once more in the backward, and for the gradients; `convert` has the formula of the bytes."""
    with jax.enable_x64(True):
        _, run, batches = sharded("packed", 4)
    length, others = batches[0][1].local_length, 3
    kinds = "all-gather|reduce-scatter|collective-permute|all-to-all"
    moved = re.findall(rf"= \(?f64\[([\d,]*),{HIDDEN}\].*? ({kinds})(?:-start)?\(", run.as_text())
    first, second = -(-length // 4), length // 4 + others
    assert collections.Counter(moved) == {
        (f"1,{first}", "collective-permute"): 6 * others,
        (f"1,{second}", "collective-permute"): 6 * others,
    }
    assert others * (first + second) < 2 * length + 4**2
