"""The README's example runs, and gives the gradients that it promises."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.attention import Mask, dense_attention

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.quick
def test_example_gives_the_dense_loss_and_gradients():
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 11, (2, 21))
    targets = np.where(rng.random((2, 21)) < 0.5, rng.integers(0, 11, (2, 21)), -100)
    params = {"embed": rng.normal(size=(11, 16)).astype("f4"), "head": rng.normal(size=(16, 11)).astype("f4")}
    scope = {"tokens": tokens, "targets": targets, "params": params}
    exec(example, scope)

    def dense(params):
        x = params["embed"][tokens]
        q = x.reshape(2, 21, 4, -1)
        x = dense_attention(q, q, q, mask=Mask(causal=True)).reshape(x.shape)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(x @ params["head"]), jnp.maximum(targets, 0)[..., None], -1)
        return -jnp.sum(jnp.where(targets != -100, log_p[..., 0], 0)) / (targets != -100).sum()

    value, grads = jax.value_and_grad(dense)(jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(scope["value"], value, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(scope["grads"][name], grad, atol=1e-5 * np.abs(grad).max())
