"""Halos and shifts in global order, on every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.sequence import halo, shift
from cpjax.shard import Contiguous, Identity, Striped, Zigzag, make_sharder
from tests.sequence.common import LAYOUTS, RUNS, Scattered, any_documents, documents, in_order, moved_bytes, on_ranks

DEPTHS = (0, 1, -1, 3, -4, 17, -100)


def dense_shift(x, depth, fill, ids=None):
    """Token by token."""
    out = np.full_like(x, fill)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            there = t + depth
            if 0 <= there < x.shape[1] and (ids is None or ids[row, t] == ids[row, there] != 0):
                out[row, t] = x[row, there]
    return out


@functools.cache
def all_shifts(layout, length):
    def op(sharder, x, ids):
        return [shift(x, depth, sharder=sharder, fill=-100, document_ids=ids) for depth in DEPTHS]

    return on_ranks(op, layout, length)


@settings(max_examples=60)
@given(st.sampled_from(LAYOUTS), any_documents(21), st.booleans())
def test_shift_is_that_of_the_whole_sequence(layout, ids, use_documents):
    tokens = np.random.default_rng(0).integers(1, 1000, size=(1, 21)).astype(np.int32)
    ids = ids if use_documents else None
    for depth, out in zip(DEPTHS, all_shifts(layout, 21)(tokens, ids), strict=True):
        np.testing.assert_array_equal(in_order(out, layout, 21), dense_shift(tokens, depth, -100, ids), str(depth))


@pytest.mark.parametrize("layout", [Identity(), Contiguous(4), Zigzag(2), Striped(2)], ids=str)
def test_gradient_of_a_shift_is_the_shift_back(layout):
    ids = documents([5, 1, 9, 4], 2)
    rng = np.random.default_rng(1)
    x, cotangent = rng.normal(size=(2, 1, 21, 3)).astype(np.float32)

    def op(sharder, x, cotangent, ids):
        def loss(x):
            return (shift(x, 2, sharder=sharder, fill=7.0, document_ids=ids) * cotangent).sum()

        return jax.grad(loss)(x)

    got = in_order(on_ranks(op, layout, 21)(x, cotangent, ids), layout, 21)
    np.testing.assert_array_equal(got, dense_shift(cotangent, -2, 0, ids))


@pytest.mark.parametrize("layout", RUNS, ids=str)
def test_halo_is_a_window_of_the_whole_sequence(layout):
    """Wider and narrower than the runs, to one side and to both."""
    length, widths = 21, [(0, 0), (1, 0), (0, 2), (3, 3), (9, 4)]
    x = np.random.default_rng(0).normal(size=(2, length, 2)).astype(np.float32)
    out = on_ranks(lambda s, x: [halo(x, *width, sharder=s) for width in widths], layout, length)(x)
    padded = layout.pad_length(length)
    run = padded // layout.cp // layout.runs
    for (before, after), got in zip(widths, out, strict=True):
        full = np.pad(x, [(0, 0), (before, padded - length + after), (0, 0)])
        for rank in range(layout.cp):
            for slot, start in enumerate(layout.run_starts(padded, rank)):
                np.testing.assert_array_equal(got[rank][:, slot], full[:, start : start + before + run + after])


@pytest.mark.parametrize("layout", [Contiguous(4), Zigzag(2)], ids=str)
def test_gradient_of_a_halo_returns_to_the_owner(layout):
    """Every token's gradient is the number of windows it appears in, run edges and edges of the sequence included."""

    def op(sharder, x):
        return jax.grad(lambda x: halo(x, 5, 2, sharder=sharder).sum())(x)

    got = in_order(on_ranks(op, layout, 16)(np.ones((1, 16), np.float32)), layout, 16)
    counts = np.zeros(16)
    for start in range(0, 16, 4):
        counts[max(start - 5, 0) : start + 6] += 1
    np.testing.assert_array_equal(got[0], counts)


@pytest.mark.parametrize(("layout", "slots"), [(Contiguous(4), 1), (Zigzag(4), 2)], ids=str)
def test_only_the_edges_of_runs_travel(layout, slots):
    """3 tokens of 32 bytes for each run, whatever the length of the runs."""

    def ahead(sharder, x):
        return shift(x, 3, sharder=sharder, fill=0)

    def back(sharder, x):
        return halo(x, 3, 0, sharder=sharder).reshape(1, -1, 8)

    for op in (ahead, back):
        short, long = (moved_bytes(op, layout, layout.cp * slots * run) for run in (16, 64))
        assert short == long
        assert {kind for kind, _ in short} == {"collective-permute"}
        assert {size for _, size in short} == {3 * 32}
        assert len(short) <= 2 * slots


def test_r07_targets_are_shifted_once_for_each_depth():
    """Multi-token prediction at depth k reads input_ids[p + 1 + k] from labels that are shifted already."""
    ids = documents([7, 5, 6], 2)
    tokens = np.where(ids > 0, np.arange(100, 120), 0).astype(np.int32)
    labels = dense_shift(tokens, 1, -100, ids)
    for layout in (Contiguous(2), Zigzag(2)):
        out = on_ranks(lambda s, x, d: [shift(x, k, sharder=s, fill=-100, document_ids=d) for k in (1, 2)], layout, 20)(
            labels, ids
        )
        for k, got in enumerate(out, 1):
            np.testing.assert_array_equal(in_order(got, layout, 20), dense_shift(tokens, 1 + k, -100, ids))


@pytest.mark.quick
def test_r09_no_target_crosses_documents():
    """Documents of 5, 3 and 8 tokens: the last depth + 1 tokens of each have no target."""
    ids = documents([5, 3, 8])
    tokens = np.arange(16, dtype=np.int32)[None]
    for layout in (Contiguous(2), Zigzag(4), Striped(4)):
        out = on_ranks(lambda s, x, d: [shift(x, k, sharder=s, fill=-100, document_ids=d) for k in (1, 2)], layout, 16)(
            tokens, ids
        )
        one, two = (np.flatnonzero(in_order(x, layout, 16)[0] == -100).tolist() for x in out)
        assert one == [4, 7, 15]
        assert two == [3, 4, 6, 7, 14, 15]


def test_what_does_not_fit_is_refused():
    x = jnp.zeros((1, 8, 3))
    with pytest.raises(ValueError, match=r"Striped\(cp=2.*use a contiguous or zigzag layout"):
        halo(x, 1, 0, sharder=make_sharder(16, Striped(2)))
    with pytest.raises(ValueError, match="before=-1, after=0"):
        halo(x, -1, 0, sharder=make_sharder(16, Zigzag(2)))
    with pytest.raises(ValueError, match=r"document_ids of shape \(1, 7\).*L=8"):
        shift(x, 1, sharder=make_sharder(16, Zigzag(2)), fill=0, document_ids=jnp.ones((1, 7), jnp.int32))
    with pytest.raises(ValueError, match=r"x of shape \(1, 8, 3\) on Scattered.*would gather all features"):
        shift(x, 1, sharder=make_sharder(16, Scattered(2)), fill=0)
