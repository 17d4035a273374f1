"""Sequence tools where documents are padded one by one: tokens then lie beyond S, with pads among them."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.sequence import pool, shift, top_k_blocks, top_k_keys
from cpjax.shard import Contiguous, Packed, Zigzag, pack
from tests.sequence.common import dense_blocks, documents, mesh_of
from tests.sequence.test_halo import dense_shift
from tests.sequence.test_select import dense_keys, index_inputs

LENGTHS, LENGTH = (5, 3, 9), 17
IDS = documents(LENGTHS)


def on_places(op, layout, *streams):
    """op(sharder, *local) of streams in the caller's coordinates, back in these; and the sharder."""
    sharder = pack(np.cumsum([0, *LENGTHS]), layout)
    assert sharder.padded_length > LENGTH

    def body(*streams):
        out = op(sharder, *(sharder.shard(x, fill=0) for x in streams))
        return jax.tree.map(lambda x: sharder.gather(x, fill=-9), out)

    run = jax.shard_map(body, mesh=mesh_of(layout), in_specs=P(), out_specs=P(), axis_names={"cp"}, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(run)(*streams)), sharder


@pytest.mark.quick
@pytest.mark.parametrize("layout", [Contiguous(2, 4), Zigzag(2, 4), Packed(2)], ids=str)
def test_shifts_and_selected_keys(layout):
    """Both reach the last document, whose padded positions are beyond the number of tokens."""
    tokens = np.arange(1, LENGTH + 1, dtype=np.int32)[None]
    q, k, weights = index_inputs(LENGTH, ties=False)

    def op(sharder, tokens, ids, *index):
        where = {"sharder": sharder, "document_ids": ids}
        return shift(tokens, 1, fill=-100, **where), top_k_keys(*index, 3, **where)

    (shifted, chosen), sharder = on_places(op, layout, tokens, IDS, q, k, weights)
    np.testing.assert_array_equal(shifted, dense_shift(tokens, 1, -100, IDS))
    wanted = dense_keys(q, k, weights, 3, True, IDS)
    np.testing.assert_array_equal(chosen, np.where(wanted < 0, -1, sharder.places[wanted]))


@pytest.mark.parametrize("layout", [Contiguous(2, 4), Zigzag(2, 4)], ids=str)
def test_pools_and_blocks(layout):
    """A ratio of 4 that every document is padded to: no block holds two documents, and every whole one is seen."""
    q, k, weights = index_inputs(LENGTH, ties=False)

    def op(sharder, ids, q, k, weights):
        where = {"sharder": sharder, "document_ids": ids}
        pools = pool(k, 4, 4, **where)
        return top_k_keys(q, pools, weights, 3, **where), top_k_blocks(q, k, 2, block=4, **where)

    (pools, blocks), sharder = on_places(op, layout, IDS, q, k, weights)
    starts = (0, 8, 12)  # of the documents, padded
    for token in range(LENGTH):
        start = starts[IDS[0, token] - 1]
        seen = [first for first in range(start, 24, 4) if first + 3 <= sharder.places[token]]
        assert sorted(p for p in pools[0, token] if p >= 0) == seen[:3]
    padded_q, padded_k = (np.zeros((1, sharder.padded_length, *x.shape[2:])) for x in (q, k))
    ids = np.zeros((1, sharder.padded_length), np.int32)
    for whole, x in ((padded_q, q), (padded_k, k), (ids, IDS)):
        whole[:, sharder.places] = x
    np.testing.assert_array_equal(blocks, dense_blocks(padded_q, padded_k, 2, 4, 1, True, ids)[:, sharder.places])
