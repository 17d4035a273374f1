"""Attention over selected blocks against a dense one, with the selection of a dense indexer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.sequence import attend, attend_blocks, select, top_k_blocks
from cpjax.shard import Contiguous, Zigzag, make_sharder
from tests.sequence.common import allowed_pairs, dense_blocks, documents, in_order, on_ranks

LENGTH, BLOCK, COUNT = 45, 4, 3  # blocks straddle ranks and runs, and the last one is not full


def dense(q, k, v, g, seen):
    """Output and dq, dk, dv of softmax attention in float64; seen bool [B, K, S, S]."""
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, group, 2) for x in (k, v))
    scale = q.shape[3] ** -0.5
    weights = np.exp(np.einsum("bqhd,bkhd->bhqk", q, wide_k) * scale) * np.repeat(seen, group, 1)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    inner = np.einsum("bqhd,bkhd->bhqk", g, wide_v)
    d_scores = scale * weights * (inner - (weights * inner).sum(-1, keepdims=True))
    dq = np.einsum("bhqk,bkhd->bqhd", d_scores, wide_k)

    def per_key_head(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)

    dk = per_key_head(np.einsum("bhqk,bqhd->bkhd", d_scores, q))
    dv = per_key_head(np.einsum("bhqk,bqhd->bkhd", weights, g))
    return [np.einsum("bhqk,bkhd->bqhd", weights, wide_v), dq, dk, dv]


@pytest.mark.parametrize(
    ("layout", "packed"),
    [(Contiguous(2), True), (Zigzag(2), False), (Contiguous(4), False), (Zigzag(4), True)],
    ids=str,
)
def test_f18_attention_over_the_best_blocks(layout, packed, monkeypatch):
    """MiniMax-M3's sparse layer: an indexer head for each of two key heads, and what its queries see of the blocks."""
    for module in (attend, select):
        monkeypatch.setattr(module, "_TILE", 5)
    rng = np.random.default_rng(0)
    shapes = (4, 6), (2, 6), (2, 5), (4, 5), (2, 3), (3,)
    q, k, v, g, index_q, index_k = (rng.normal(size=(1, LENGTH, *shape)) for shape in shapes)
    ids = documents([6, 1, 20, 15], 3) if packed else None

    def op(sharder, q, k, v, g, index_q, index_k, ids):
        where = {"block": BLOCK, "sharder": sharder, "document_ids": ids}
        chosen = top_k_blocks(index_q, index_k, COUNT, **where)
        out, pull = jax.vjp(lambda q, k, v: attend_blocks(q, k, v, chosen, **where), q, k, v)
        return chosen, out, *pull(g)

    with jax.enable_x64(True):
        outs = on_ranks(op, layout, LENGTH)(q, k, v, g, index_q, index_k, ids)
    chosen, *got = (in_order(x, layout, LENGTH) for x in outs)
    blocks = dense_blocks(index_q, index_k, COUNT, BLOCK, 1, True, ids)
    np.testing.assert_array_equal(chosen, blocks)
    inside = (blocks[..., None] == np.arange(LENGTH) // BLOCK).any(3)  # [B, S, K, keys]
    seen = np.moveaxis(inside, 2, 1) & allowed_pairs(LENGTH, True, ids)[:, None]
    assert seen[0, 0].sum() < 0.7 * allowed_pairs(LENGTH, True, ids).sum() or packed, "the selection must matter"
    for x, wanted in zip(got, dense(q, k, v, g, seen), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


def test_what_does_not_fit_is_refused():
    sharder = make_sharder(16, Zigzag(2))
    q, k, blocks = jnp.zeros((1, 8, 4, 3)), jnp.zeros((1, 8, 2, 3)), jnp.zeros((1, 8, 2, 1), jnp.int32)
    for wrong in ((q[:, :, :3], k, k, blocks), (q, k, k, blocks[:, :, :1]), (q, k, k[:, :7], blocks)):
        with pytest.raises(ValueError, match=r"attend_blocks was given q .* L=8"):
            attend_blocks(*wrong, block=4, sharder=sharder)
    for block in (0, -4):
        with pytest.raises(ValueError, match=f"block={block}: it must be at least 1"):
            attend_blocks(q, k, k, blocks, block=block, sharder=sharder)
    with pytest.raises(ValueError, match="scale=nan: give a finite number"):
        attend_blocks(q, k, k, blocks, block=4, sharder=sharder, scale=float("nan"))
    with pytest.raises(ValueError, match=r"k int32.*one floating dtype"):
        attend_blocks(q, k.astype(jnp.int32), k, blocks, block=4, sharder=sharder)
    with pytest.raises(ValueError, match="no size of 0"):
        attend_blocks(q, k, k, blocks[..., :0], block=4, sharder=sharder)
    with pytest.raises(ValueError, match=r"document_ids of shape \(1, 4\)"):
        attend_blocks(q, k, k, blocks, block=4, sharder=sharder, document_ids=jnp.ones((1, 4), jnp.int32))
