"""The recurrences on full sequences, as they are defined; oracles of the tests."""

import jax
import jax.numpy as jnp


def starts(document_ids):
    """bool [B, T]: the first token of the sequence and every token whose id differs from the one before."""
    return jnp.pad(document_ids[:, 1:] != document_ids[:, :-1], [(0, 0), (1, 0)], constant_values=True)


def causal_conv(x, weight, document_ids=None):
    """As a dense [T, T] matrix per channel: entry (t, s) is the tap that multiplies x[s] in y[t]."""
    length, width = x.shape[1], weight.shape[1]
    ids = jnp.zeros(x.shape[:2], int) if document_ids is None else document_ids
    number = jnp.cumsum(starts(ids), axis=1)
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    inside = (back >= 0) & (back < width) & (number[:, :, None] == number[:, None, :])
    taps = jnp.where(inside[..., None], weight.T[jnp.clip(width - 1 - back, 0, width - 1)], 0)
    return jnp.einsum("btsc,bsc->btc", taps, x)


def gated_delta_rule(q, k, v, log_decay, beta, document_ids=None):
    batch, length, heads, keys = q.shape
    ids = jnp.zeros((batch, length), int) if document_ids is None else document_ids

    def step(state, token):
        q, k, v, g, beta, start = token
        state = jnp.where(start[:, None, None, None], 0, jnp.exp(g)[..., None, None] * state)
        u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * u[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta, starts(ids))]
    _, out = jax.lax.scan(step, jnp.zeros((batch, heads, keys, v.shape[-1]), v.dtype), tokens)
    return jnp.moveaxis(out, 0, 1)


def ssd(x, dt, b, c, a, skip, document_ids=None):
    batch, length, heads, width = x.shape
    ids = jnp.zeros((batch, length), int) if document_ids is None else document_ids
    b, c = (jnp.repeat(v, heads // v.shape[2], axis=2) for v in (b, c))

    def step(state, token):
        x, dt, b, c, start = token
        state = jnp.where(start[:, None, None, None], 0, jnp.exp(a * dt)[..., None, None] * state)
        state = state + b[..., None] * (dt[..., None] * x)[..., None, :]
        return state, jnp.einsum("bhsp,bhs->bhp", state, c) + skip[:, None] * x

    tokens = [jnp.moveaxis(v, 1, 0) for v in (x, dt, b, c, starts(ids))]
    _, out = jax.lax.scan(step, jnp.zeros((batch, heads, b.shape[-1], width), x.dtype), tokens)
    return jnp.moveaxis(out, 0, 1)
