"""Windows and pools whose tokens may live on other ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.sequence import pool, windows
from cpjax.shard import Contiguous, Identity, Striped, Zigzag, make_sharder
from tests.sequence.common import any_documents, documents, moved_bytes, on_ranks


def dense_pool(x, length, stride, logits, ids):
    """{first: pooled values [B, ...]} in float64, window by window."""
    out = {}
    for first in range(0, x.shape[1], stride):
        rows = []
        for row in range(x.shape[0]):
            last = min(first + length, x.shape[1])
            places = [t for t in range(first, last) if ids is None or ids[row, t] == ids[row, first] != 0]
            weights = np.exp(logits[row, places])
            rows.append((weights * x[row, places]).sum(0) / weights.sum(0) if places else np.zeros(x.shape[2:]))
        out[first] = np.stack(rows)
    return out


def by_first(out):
    """{first: values [B, ...]} of the windows of all ranks; each must exist once."""
    found = {}
    for rank in range(out.first.shape[0]):
        for slot, first in enumerate(np.asarray(out.first)[rank]):
            if first >= 0:
                assert first not in found
                found[int(first)] = np.asarray(out.values)[rank, :, slot]
    return found


SHAPES = [(4, 4), (6, 2), (3, 5), (9, 16)]


@functools.cache
def all_pools(layout, length):
    def op(sharder, x, logits, ids):
        return [pool(x, *shape, sharder=sharder, logits=logits, document_ids=ids) for shape in SHAPES]

    return on_ranks(op, layout, length)


@settings(max_examples=25)
@given(
    st.sampled_from([Identity(), Contiguous(3), Contiguous(8), Zigzag(4)]),
    any_documents(21),
    st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_pools_are_those_of_the_whole_sequence(layout, ids, options):
    use_documents, weighted = options
    x, logits = np.random.default_rng(0).normal(size=(2, 1, 21, 3))
    ids = ids if use_documents else None
    with jax.enable_x64(True):
        outs = all_pools(layout, 21)(x, logits if weighted else None, ids)
    for shape, out in zip(SHAPES, outs, strict=True):
        found = by_first(out)
        wanted = dense_pool(x, *shape, logits if weighted else np.zeros_like(x), ids)
        assert sorted(found) == sorted(wanted)
        for first, values in wanted.items():
            np.testing.assert_allclose(found[first], values, rtol=1e-12, atol=1e-13)
        kept = np.asarray(out.first) >= 0
        np.testing.assert_array_equal(np.asarray(out.last)[kept], np.asarray(out.first)[kept] + shape[0] - 1)


@pytest.mark.parametrize("layout", [Contiguous(3), Zigzag(2)], ids=str)
def test_gradients_equal_those_of_one_rank(layout):
    """Windows of 6 at stride 4 on runs of 7 and of 5 tokens: both edges of every run lie inside windows."""
    ids = documents([9, 2, 8], 1)
    rng = np.random.default_rng(1)
    x, logits = rng.normal(size=(2, 1, 20, 2))

    def op(sharder, x, logits, ids):
        def loss(x, logits):
            out = pool(x, 6, 4, sharder=sharder, logits=logits, document_ids=ids)
            scale = jnp.where(out.first < 0, 0, 1.0 + out.first)[None, :, None]
            return (jnp.sin(out.values) * scale).sum()

        return jax.grad(loss, (0, 1))(x, logits)

    with jax.enable_x64(True):
        one = on_ranks(op, Contiguous(1), 20)(x, logits, ids)
        many = on_ranks(op, layout, 20)(x, logits, ids)
    order = layout.inverse(layout.pad_length(20))
    for got, wanted in zip(many, one, strict=True):
        got = np.moveaxis(np.asarray(got), 0, 1).reshape(1, -1, 2)[:, order][:, :20]
        np.testing.assert_allclose(got, np.asarray(wanted)[0], rtol=1e-12, atol=1e-12)


def test_two_series_of_overlapping_windows():
    """DeepSeek-V4's sparse compressor: a window's entry mixes series a of the window before with its own series b."""
    ratio, length, width = 4, 24, 3
    rng = np.random.default_rng(2)
    kv, gate = rng.normal(size=(2, 1, length, 2 * width))
    wanted = []
    for w in range(length // ratio):
        own, past = np.s_[0, w * ratio : (w + 1) * ratio, width:], np.s_[0, max(w - 1, 0) * ratio : w * ratio, :width]
        values, weights = np.concatenate([kv[past], kv[own]]), np.exp(np.concatenate([gate[past], gate[own]]))
        wanted.append((weights * values).sum(0) / weights.sum(0))

    def op(sharder, kv, gate):
        kv = windows(kv, ratio, ratio, sharder=sharder, before=ratio)
        gate = windows(gate, ratio, ratio, sharder=sharder, before=ratio).values
        early = jnp.arange(2 * ratio)[:, None] < ratio
        values, gate = (jnp.where(early, x[..., :width], x[..., width:]) for x in (kv.values, gate))
        weights = jax.nn.softmax(jnp.where(kv.inside[..., None], gate, -jnp.inf), axis=2)
        return kv._replace(values=(weights * values).sum(2))

    with jax.enable_x64(True):
        for layout in (Contiguous(2), Zigzag(2), Contiguous(8)):  # runs of 12, 6 and 3 tokens
            found = by_first(on_ranks(op, layout, length)(kv, gate))
            got = np.stack([found[w * ratio][0] for w in range(length // ratio)])
            np.testing.assert_allclose(got, np.stack(wanted), rtol=1e-12)


def test_only_the_halo_travels():
    def op(shape):
        return lambda sharder, x: pool(x, *shape, sharder=sharder).values

    assert moved_bytes(op((4, 4)), Contiguous(4), 64) == []
    assert moved_bytes(op((8, 4)), Contiguous(4), 64) == moved_bytes(op((8, 4)), Contiguous(4), 256)
    assert moved_bytes(op((8, 4)), Contiguous(4), 64) == [("collective-permute", 4 * 32)]
    assert sum(size for _, size in moved_bytes(op((6, 6)), Zigzag(2), 64)) <= 2 * 2 * 5 * 32


def test_what_does_not_fit_is_refused():
    sharder = make_sharder(16, Zigzag(2))
    x = jnp.zeros((1, 8, 3))
    with pytest.raises(ValueError, match=r"Striped\(cp=2.*use a contiguous or zigzag layout"):
        windows(x, 2, 2, sharder=make_sharder(16, Striped(2)))
    with pytest.raises(ValueError, match="length=0, stride=2"):
        windows(x, 0, 2, sharder=sharder)
    with pytest.raises(ValueError, match=r"logits \(1, 8, 2\)"):
        pool(x, 2, 2, sharder=sharder, logits=x[..., :2])
