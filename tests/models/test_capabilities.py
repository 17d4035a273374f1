"""The README's table of capabilities: each family is run on every layout, by every transport, with all it can do."""

import dataclasses
import functools
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models import FAMILIES, family
from cpjax.models.capabilities import LAYOUTS, NO, TRANSPORTS, YES, capabilities, update
from cpjax.shard import Dispatched, Identity, SliceKind, Stream, dispatch, layout_from_name, make_batch
from tests.rendezvous import unordered

from . import test_gemma4_parity, test_qwen3_5_cp, test_qwen3_5_layouts, test_step3p7_cp
from .families import CONFIGS

README = pathlib.Path(__file__).parent.parent.parent / "README.md"

LENGTH = 61

WAYS = [
    ("gemma4", "striped", 2, "ulysses"),
    ("gemma4", "packed", 2, "ring"),
    ("gemma4", "dispatched", 2, "allgather"),
    ("qwen3_5_moe", "striped", 2, "ulysses"),
    ("qwen3_5_moe", "packed", 2, "ring"),
    ("qwen3_5_moe", "dispatched", 2, "allgather"),
]
"""What the tests of each family leave out."""

ELSEWHERE = {
    test_gemma4_parity.test_loss_and_every_gradient_equal_the_dense_ones: "gemma4",
    test_qwen3_5_cp.test_loss_and_every_gradient_equal_the_dense_ones: None,
    test_qwen3_5_layouts.test_documents_have_the_loss_and_every_gradient_of_one_by_one: "qwen3_5",
    test_step3p7_cp.test_losses_and_every_gradient_equal_the_dense_ones: "step3p7",
}
"""These, and of which family, if they do not name it; they name layout, cp and transport, or use the ring."""


@functools.cache
def subject(name):
    """Structure, float64 parameters, none of them neutral, and buffers of the narrow model; and the batch of a row."""
    module = family(name)
    config = module.reduced(CONFIGS[name])
    row = module.synthetic_row(config, LENGTH, 128, np.random.default_rng(0), documents=2)
    if capabilities(name)["video"] == YES:  # the last image becomes one
        ids, media = row.input_ids.copy(), [*row.media[:-1], dataclasses.replace(row.media[-1], modality="video")]
        tokens = len(media[-1].patches) // config.vision.spatial_merge_size**2
        ids[np.flatnonzero(ids == config.image_token_id)[-tokens:]] = config.video_token_id
        row = dataclasses.replace(row, input_ids=ids, media=media)
    rng = np.random.default_rng(1)
    model = nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0), dtype=jnp.float64))
    graph, params, buffers = nnx.split(model, nnx.Param, ...)

    def draw(leaf):
        scale = 0.5 if leaf.ndim < 3 else leaf.shape[-2] ** -0.5
        return jnp.asarray(scale * rng.normal(size=leaf.shape))

    def fill(path, leaf):  # linear layers of the towers are clipped to what lies between buffers
        name = jax.tree_util.keystr(path)
        return jnp.full(leaf.shape, -3.0 if "_min" in name else 3.0 if "_max" in name else 1.0)

    params, buffers = jax.tree.map(draw, params), jax.tree_util.tree_map_with_path(fill, buffers)
    return graph, params, buffers, module.prepare(config, [row])


def results(name, layout, transport="ring"):
    """Logits of the row's tokens, those of heads of multi-token prediction behind them, [n, S, V]; and the gradient of
    every parameter, of a sum of the logits with weights."""
    graph, params, buffers, host = subject(name)
    weights = np.random.default_rng(2).normal(size=(1, LENGTH, family(name).reduced(CONFIGS[name]).text.vocab_size))
    streams = {**family(name).STREAMS, "weights": Stream(1, 0.0)}
    batch, sharder = make_batch({**host, "weights": weights}, layout, streams=streams)

    def local(params, buffers, batch):
        model = nnx.merge(graph, params, buffers)
        options = {"transport": transport, "remat": "none"}  # which is quicker to compile
        if getattr(model, "mtp", ()):
            hidden, _, later = model.outputs(batch, sharder, ahead=True, **options)
            hidden = jnp.concatenate([hidden, *(state for state, _ in later)])
        else:
            hidden = model(batch, sharder, **options)
        logits = model.logits(hidden)
        total = (sharder.take_local(batch["weights"]) * logits).sum()
        return total if sharder.cp == 1 else jax.lax.psum(total, "cp"), logits

    run = local
    if sharder.cp > 1:
        spec = jax.sharding.PartitionSpec
        parts, mesh = (spec(), spec(None, "cp")), make_mesh(cp=sharder.cp)
        run = jax.shard_map(local, mesh=mesh, in_specs=spec(), out_specs=parts, axis_names={"cp"})
    options = {"xla_backend_optimization_level": 0}  # halves the compile time
    both = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=options)
    both = both.lower(params, buffers, batch).compile()
    assert not unordered(both.as_text())
    (_, by_rank), grads = both(params, buffers, batch)
    sources = sharder.sources()
    inverse = sharder.inverse() if sharder.cp > 1 else np.arange(LENGTH)
    places = np.argsort(np.where(sources < 0, LENGTH, sources), kind="stable")[:LENGTH]
    return {"logits": np.asarray(by_rank)[:, inverse][:, places]} | {
        jax.tree_util.keystr(path): np.asarray(grad) for path, grad in jax.tree_util.tree_leaves_with_path(grads)
    }


@functools.cache
def dense(name):
    return results(name, Identity())


def layout_of(layout, cp, name):
    if layout != "dispatched":
        return layout_from_name(layout, cp)
    starts = np.flatnonzero(np.diff(subject(name)[3]["document_ids"][0], prepend=0))
    ends = [*starts[1:], LENGTH]
    slices = [[a, b, a, b, SliceKind.CAUSAL] for a, b in zip(starts, ends, strict=True)]
    return dispatch(slices, LENGTH, Dispatched(cp, chunk_size=2))[0]


@pytest.mark.parametrize(("name", "layout", "cp", "transport"), WAYS)
def test_logits_and_every_gradient_equal_the_unsharded_ones(name, layout, cp, transport):
    with jax.enable_x64(True):
        found, expected = results(name, layout_of(layout, cp, name), transport), dense(name)
    assert expected["logits"].std() > 0.1 and found.keys() == expected.keys()
    for key, wanted in expected.items():
        largest = np.abs(wanted).max()
        assert largest > 0, key
        assert np.abs(found[key] - wanted).max() < 1e-11 * largest, key


@pytest.mark.parametrize("name", CONFIGS)
def test_the_row_has_all_that_the_family_can_do(name):
    with jax.enable_x64(True):
        graph, *state, batch = subject(name)
    model, config = nnx.merge(graph, *state), family(name).reduced(CONFIGS[name])
    ids = batch["input_ids"]
    has = {
        "packed documents": set(batch["document_ids"].flat) == {1, 2},
        "images": (ids == config.image_token_id).any() and "pixel_values" in batch,
        "video": hasattr(config, "video_token_id") and (ids == config.video_token_id).any(),
        "sound": "audio_features" in batch and (batch["audio_index"] >= 0).any(),
        "layers over ranks (pp)": "pp" in inspect.signature(make_mesh).parameters,
        "experts over ranks (ep)": any("experts" in path for path, _ in nnx.to_flat_state(state[0])),
        "heads of multi-token prediction": bool(getattr(model, "mtp", ())),
    }
    can = capabilities(name)
    assert {feature: YES if found else NO for feature, found in has.items()} == {
        row: can[row] for row in can if row not in (*LAYOUTS, *TRANSPORTS)
    }


def test_every_layout_transport_and_cp_of_each_family_has_its_test():
    cases = [(name, {"name": layout, "cp": cp, "transport": transport}) for name, layout, cp, transport in WAYS]
    for test, name in ELSEWHERE.items():
        [mark] = [mark for mark in test.pytestmark if mark.name == "parametrize"]
        for values in mark.args[1]:
            case = dict(zip(mark.args[0], values, strict=True))
            cases.append((name or case["family"], case))
    tested = {
        (name, row)
        for name, case in cases
        for row in (case["name"], case.get("transport", "ring").split(":")[0], case["cp"])
    }
    assert tested == {(name, row) for name in FAMILIES for row in (*LAYOUTS, *TRANSPORTS, 2, 4, 8)}
    assert all(capabilities(name)[row] != NO for name, row in tested if row in (*LAYOUTS, *TRANSPORTS))


def test_the_readme_has_the_table_of_today():
    assert update(README.read_text()) == README.read_text()
