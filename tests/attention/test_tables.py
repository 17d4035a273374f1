"""Attention on the layouts whose map depends on the batch: packed documents and dispatched chunks."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention
from cpjax.shard import Packed, SliceKind, make_batch
from tests.attention.common import Form, assert_equal, documents_of, problem, program, shard, solve, solve_numpy

pytestmark = pytest.mark.usefixtures("short_tiles")

FULL, CAUSAL, BOTH = SliceKind.FULL, SliceKind.CAUSAL, SliceKind.BI_CAUSAL

WHERE = [
    (4, "ring", jnp.float64),
    (2, "allgather", jnp.float64),
    (4, "ulysses", jnp.float64),
    (4, "ring", jnp.float32),
]


def assert_one_program(problems, cp, layout, transport, dtype, padded_length=None, **form):
    """Each problem equals its oracle, with maps that differ, and all of them run what the first one compiled."""
    compiled, maps = [], set()
    for p in problems:
        got = solve(p, cp, layout, transport, dtype, padded_length=padded_length, **form)
        assert_equal(got, solve_numpy(p, **form), dtype)
        compiled.append(program(transport, Form(**form))._cache_size())
        maps.add(shard(p, cp, layout, padded_length)[1].table.tobytes())
    assert len(set(compiled)) == 1, "a new batch is no new program"
    assert len(maps) == len(problems)


@pytest.mark.parametrize(
    ("cp", "transport", "dtype", "window"),
    [(*where, window) for where, window in zip(WHERE, (None, 5, None, 5), strict=True)],
)
def test_packed_documents(cp, transport, dtype, window):
    """Two rows that become one, other documents in each batch: short, long, single tokens, pads before and after."""
    batches = [[7, 11, 1, 14], [5, 25]], [[33], [1, 2, 3, 20]], [[16, 17], []]
    problems = [
        problem(33, documents=documents_of(*rows, length=33), sinks=True, seed=n) for n, rows in enumerate(batches)
    ]
    problems[2].document_ids[1, 9:21] = 4  # between pads
    form = {"window": (window, None)}
    assert_one_program(problems, cp, "packed", transport, dtype, padded_length=128, **form)


@pytest.mark.parametrize(("cp", "transport"), [(4, "ring"), (2, "allgather"), (4, "ring_ulysses:2")])
def test_packed_rows_with_maps_of_their_own(cp, transport):
    """Four rows that become two; images see themselves both ways, and a window is in the way of some documents."""
    rows = [[7, 11, 1, 14], [5, 25], [33], [1, 2, 3, 20]]
    groups = np.repeat(np.random.default_rng(0).integers(-1, 3, (4, 11)).astype(np.int32), 3, 1)
    p = problem(33, batch=4, documents=documents_of(*rows, length=33), sinks=True, vision_group_ids=groups)
    form = {"window": (5, None)}
    got = solve(p, cp, "packed", transport, jnp.float64, packed_rows=2, **form)
    assert_equal(got, solve_numpy(p, **form), jnp.float64)


def test_packed_rows_stay_on_their_devices():
    """From embeddings to attention and back; dp is automatic. What travels is one row's, or whether tiles have work."""
    ids = documents_of([7, 5], [12], [1, 2, 3], [4, 8], length=12)
    _, sharder = make_batch({"input_ids": ids, "document_ids": ids}, Packed(2), packed_rows=2)
    mesh = jax.make_mesh((2, 2), ("cp", "dp"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def loss(x, ids, sharder):
        def body(x, ids):
            local = sharder.take_local(x)
            mask = Mask(document_ids=sharder.take_local(ids))
            return jax.lax.psum((attention(local, local, sharder=sharder, mask=mask) ** 2).sum(), "cp")

        return jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"cp"})(x, ids)

    x, ids = (
        jax.ShapeDtypeStruct((2, sharder.padded_length, *more), dtype, sharding=jax.NamedSharding(mesh, P("dp")))
        for more, dtype in (((2, 8), jnp.float32), ((), jnp.int32))
    )
    text = jax.jit(jax.grad(loss)).lower(x, ids, sharder).compile().as_text()
    moved = re.findall(r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)\(", text)
    assert {kind for _, kind in moved} == {"collective-permute", "all-reduce"}
    one_row = re.compile(r"[fs]32\[(1|2,1),|\(?pred")  # or two tiles of one row
    assert [shape for shape, _ in moved if not one_row.match(shape)] == []


def mixed_masks(length: int) -> list[np.ndarray]:
    """Documents of very different length; a prefix that all see, and windows; images that see themselves both ways."""
    cuts = [0, 1, 3, 4, 30, 33, length]
    documents = [[a, b, a, b, CAUSAL] for a, b in itertools.pairwise(cuts)]
    windows = [[0, length, 0, 3, FULL], [3, 9, 3, 9, CAUSAL], [9, length, 4, length, BOTH]]
    images = []
    for start in range(0, length, 15):
        images += [[start, start + 6, 0, start + 6, FULL], [start + 6, start + 15, 0, start + 15, CAUSAL]]
    masks = [np.asarray(slices, np.int32) for slices in (documents, windows, images)]
    return [np.pad(slices, [(0, 6 - len(slices)), (0, 0)]) for slices in masks]  # empty slices fill up


@pytest.mark.parametrize(("cp", "transport", "dtype"), WHERE)
def test_dispatched_chunks_of_mixed_masks(cp, transport, dtype):
    problems = [problem(45, slices=slices, seed=n) for n, slices in enumerate(mixed_masks(45))]
    assert_one_program(problems, cp, "dispatched", transport, dtype, causal=False)


@pytest.mark.parametrize(("cp", "transport"), [(4, "ring"), (4, "ulysses")])
def test_u4_packed_rows_attend_as_every_document_alone(cp, transport):
    """Three rows in one, grouped heads: not even the oracle sees another document."""
    rows = [[7, 11, 1, 14], [33], [2, 3, 20]]
    p = problem(33, batch=3, documents=documents_of(*rows, length=33), sinks=True)
    packed = solve(p, cp, "packed", transport, jnp.float64, padded_length=128)
    for row, lengths in enumerate(rows):
        for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            own = np.s_[row : row + 1, start : start + length]
            alone = solve_numpy(type(p)(*(x[own] for x in p[:4]), p.sinks))
            assert_equal([x[own] for x in packed[:4]], alone[:4], jnp.float64)
