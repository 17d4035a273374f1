"""Records in a packed row give the loss and the gradients that they give one by one (I1)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.loss import cross_entropy
from cpjax.mesh import make_mesh
from cpjax.models.qwen3_5 import STREAMS, Qwen3_5, prepare
from cpjax.shard import IGNORE, Zigzag, make_batch
from cpjax.train.data import Dataset, Encoder, RecordsConfig
from tests.data.common import chat, make_folder, png, write_jsonl

TOKENS, PATCHES = 352, 128


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    encoder = Encoder.from_folder(make_folder(path / "model", **layers))
    (path / "a.png").write_bytes(png(16, 24))
    (path / "b.png").write_bytes(png(30, 16))
    records = [
        chat("<image> or <image>?", "the first", "why?", "so", images=["a.png", "b.png"]),
        chat("how many?", "two birds in the garden"),
        chat("what is <image>?", "a cat", images=["b.png"]),
    ]
    file = write_jsonl(path / "a.jsonl", records)
    options = RecordsConfig(files=[str(file)], tokens=TOKENS, patches=PATCHES)
    return Dataset.open(options, encoder)


@pytest.fixture(scope="module")
def model(dataset):
    with jax.enable_x64(True):
        return nnx.split(Qwen3_5(dataset.encoder.processor.config, rngs=nnx.Rngs(0), dtype=jnp.float64))


@functools.cache
def compiled(graph, cp):
    """(parameters, batch, sharder) -> sum of the losses of all tokens; at cp=1 its gradients too.

    Gradients of packed rows under context parallelism are compared in tests/models.
    """
    spec = jax.sharding.PartitionSpec

    def total(params, batch, sharder):
        model = nnx.merge(graph, params)
        labels = sharder.take_local(batch["labels"])
        loss, _ = cross_entropy(model(batch, sharder, remat="none"), model.head(), labels, valid_tokens=1)
        return jax.lax.psum(loss, "cp")

    over_cp = jax.shard_map(total, mesh=make_mesh(cp=cp), in_specs=spec(), out_specs=spec(), axis_names={"cp"})
    fn = jax.value_and_grad(over_cp) if cp == 1 else lambda *arguments: (over_cp(*arguments), None)
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def run(model, dataset, pack, cp):
    """Loss and gradients of the records as one row, and its number of targets."""
    row, _ = dataset.row(pack)
    batch = prepare(dataset.encoder.processor.config, [row], length=TOKENS, num_patches=PATCHES)
    batch, sharder = make_batch(batch, Zigzag(cp), streams=STREAMS)
    graph, params = model
    loss, grads = compiled(graph, cp)(params, batch, sharder)
    return float(loss), grads, int((batch["labels"] != IGNORE).sum())


@pytest.mark.quick
def test_a_packed_row_equals_its_records_one_by_one(dataset, model):
    [pack] = dataset.packs
    assert sorted(pack) == [0, 1, 2]
    with jax.enable_x64(True):
        alone = [run(model, dataset, [index], 1) for index in pack]
        loss, targets = sum(loss for loss, _, _ in alone), sum(targets for _, _, targets in alone)
        grads = jax.tree.map(lambda *parts: sum(parts), *(grads for _, grads, _ in alone))
        assert loss > 10
        packed = run(model, dataset, pack, 1)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), packed[1], grads)
        for total, _, count in (packed, run(model, dataset, pack, 2)):
            assert count == targets
            np.testing.assert_allclose(total, loss, rtol=1e-10)
