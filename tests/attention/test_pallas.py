"""The Pallas kernels: interpreted against numpy, and lowered for a GPU that is not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention, pallas
from cpjax.mesh import make_mesh
from cpjax.shard import Identity, Zigzag, make_sharder
from tests.attention.common import assert_equal, documents_of, problem, solve, solve_numpy

LENGTH = 90  # tiles of 64, 32 or 16 tokens, the last ones not full

CASES = [
    # cp, layout, transport; widths; heads; streams; static form
    ((1, "identity", "ring"), (32, 48), (4, 2), "documents padding vision prefix slices sinks",
     {"window": (20, None), "softcap": 2.0}),
    ((1, "identity", "ring"), (16, 16), (3, 1), "shared", {"scale": 0.7}),
    ((1, "identity", "ring"), (72, 40), (2, 2), "documents", {"causal": False, "window": (9, 5)}),
    ((2, "zigzag", "ring"), (16, 32), (4, 2), "documents sinks", {}),
    ((2, "contiguous", "ring"), (16, 16), (2, 1), "padding slices", {"causal": False}),
    ((2, "striped", "allgather"), (16, 16), (2, 2), "vision", {"window": (12, None)}),
    ((4, "packed", "ring_ulysses:2"), (16, 16), (4, 2), "documents", {}),
    ((2, "packed", "ring"), (16, 16), (2, 1), "documents", {"packed_rows": 2}),
]  # fmt: skip


def case_problem(widths, heads, streams, seed=0):
    rng = np.random.default_rng(seed)
    masks = {}
    if "documents" in streams:
        masks["documents"] = documents_of([40, 1, 30], [17, 70], length=LENGTH)
    if "padding" in streams:
        masks["padding"] = rng.random((2, LENGTH)) < 0.2
    if "vision" in streams:
        masks["vision_group_ids"] = np.repeat(rng.integers(-1, 3, (2, 6)).astype(np.int32), 15, 1)
    if "prefix" in streams:
        masks["prefix"] = rng.random((2, LENGTH)) < 0.1
    if "slices" in streams:
        masks["slices"] = np.array(
            [[0, 50, 0, 50, 1], [50, 90, 10, 60, 0], [20, 80, 30, 85, 3], [60, 90, 60, 90, 2]], np.int32
        )
    return problem(
        LENGTH, heads=heads[0], kv_heads=heads[1], width=widths[0], v_width=widths[1], sinks="sinks" in streams,
        shared="shared" in streams, **masks,
    )  # fmt: skip


@pytest.mark.parametrize(("where", "widths", "heads", "streams", "form"), CASES)
def test_equal_to_numpy(where, widths, heads, streams, form):
    """Every part of the mask, widths of one and of several powers of two, every walk; output and all gradients."""
    p = case_problem(widths, heads, streams)
    assert_equal(solve(p, *where, kernel="pallas", **form), solve_numpy(p, **form))  # numpy has no use for packed_rows


def test_bfloat16_is_as_near_as_the_dense_run():
    """Invariant I1: at most twice as far from float64 as blocks in plain XLA, which round like dense attention."""
    p = case_problem((32, 32), (4, 2), "documents")
    exact = solve_numpy(p)
    distances = {
        kernel: [np.abs(x.astype(np.float64) - y).max() for x, y in
                 zip(solve(p, 1, "identity", "ring", jnp.bfloat16, kernel=kernel), exact, strict=True)]
        for kernel in ("xla", "pallas")
    }  # fmt: skip
    assert (np.array(distances["pallas"]) <= 2 * np.array(distances["xla"])).all(), distances


@pytest.mark.quick
def test_rows_without_a_key_are_zero():
    p = problem(48, width=16, v_width=16, padding=np.ones((2, 48), bool))
    for x in solve(p, 2, "zigzag", "ring", kernel="pallas"):
        assert (x == 0).all()


def test_tiles_are_skipped_row_by_row():
    """One row has a document per tile, the other one document in all: neither visits what only the other needs."""
    documents = np.stack([np.repeat(np.arange(1, 9), 64), np.ones(512, np.int64)]).astype(np.int32)
    tokens = pallas.Tokens(
        jnp.arange(512).reshape(8, 1, 64), pallas.Streams(documents.reshape(2, 8, 64).swapaxes(0, 1))
    )
    _, count = pallas.partners(pallas.tile_mask(tokens, tokens, Mask().reach(512)).swapaxes(1, 2))
    np.testing.assert_array_equal(count, np.stack([np.ones(8), np.arange(1, 9)], 1))


def operands(dtype, width, v_width, heads=2, length=64):
    shape = jax.ShapeDtypeStruct((1, length, heads, width), dtype)
    return shape, shape, jax.ShapeDtypeStruct((1, length, heads, v_width), dtype)


@pytest.mark.parametrize(
    ("dtype", "width", "v_width"),
    [(jnp.float64, 64, 64), (jnp.bfloat16, 264, 64), (jnp.bfloat16, 64, 272), (jnp.float32, 256, 64)],
)
def test_what_the_kernels_do_not_take_is_refused_or_left_to_xla(dtype, width, v_width):
    def run(kernel):
        def f(*qkv):
            return attention(*qkv, sharder=make_sharder(64, Identity()), mask=Mask(), kernel=kernel)

        return jax.eval_shape(f, *operands(dtype, width, v_width))

    with jax.enable_x64(True):
        assert run("auto").shape == (1, 64, 2, v_width)
        with pytest.raises(ValueError, match="up to 256 numbers of 16 bits or 128 of 32 bits"):
            run("pallas")
    with pytest.raises(ValueError, match="unknown kernel 'cudnn'"):
        run("cudnn")


def test_a_gpu_gets_the_kernels():
    """Traced for a GPU, "auto" takes the kernels; forward and backward lower to three Triton programs."""
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")

    def loss(*qkv):
        return attention(*qkv, sharder=make_sharder(64, Identity()), mask=Mask()).astype(jnp.float32).sum()

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), axis_types=(), abstract_device=gpu)):
        text = gradient.trace(*operands(jnp.bfloat16, 128, 64)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_axes_of_size_one_beside_automatic_ones():
    """Rows split over fsdp while dp is 1; traced alone, as this went wrong before anything was compiled."""
    mesh = make_mesh(fsdp=2, cp=2)
    sharder = make_sharder(64, Zigzag(2))

    def local(q, k, v):
        return attention(q, k, v, sharder=sharder, mask=Mask(), kernel="pallas")

    over_cp = jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"), axis_names={"cp"})
    shape = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", "cp")))
    assert jax.eval_shape(jax.jit(over_cp), shape, shape, shape).shape == shape.shape
