"""One step of decoding against dense attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.attention import Mask, cached_attention, dense_attention


@pytest.mark.quick
def test_the_last_token_of_dense_attention():
    """Rows end at different slots, start behind pads, and what the others hold does not matter."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(rng.normal(size=(2, 9, heads, width))) for heads, width in ((6, 4), (2, 4), (2, 3)))
        slots = np.arange(9)
        readable = np.stack([slots < 7, (slots >= 2) & (slots < 5)])
        k = k.at[~readable].set(np.inf)
        v = v.at[~readable].set(1e9)
        got = jax.jit(cached_attention)(q[:, -1], k.swapaxes(1, 2), v.swapaxes(1, 2), readable=readable)
        dense = jax.jit(functools.partial(dense_attention, mask=Mask(causal=True)))
        for row, mask in enumerate(readable):
            kept = np.flatnonzero(mask)
            wanted = dense(*(x[row : row + 1, kept] for x in (jnp.broadcast_to(q[:, -1:], q.shape), k, v)))[0, -1]
            np.testing.assert_allclose(got[row], wanted, rtol=0, atol=1e-14)
