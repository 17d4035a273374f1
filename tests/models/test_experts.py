"""Experts against a loop over tokens and choices in float64, on meshes, and what the balance loss sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.mesh import make_mesh
from cpjax.models.common.experts import RouterSums, apply_experts, balance_loss, route, router_sums
from cpjax.varying import vary_over

B, L, D, F, E, K = 2, 24, 6, 5, 8, 3


def activation(gate, up):
    return jax.nn.silu(gate) * up


@functools.cache
def inputs():
    """Uneven routing: expert 0 has nearly all tokens, expert 6 none, and one rank of eight is all pads in a row."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(B, L, E)) + np.array([3, 0, 0, 0, 0, 0, -50, 0])
    pads = np.arange(L) >= np.array([[L], [L - 5]])
    kernels = [rng.normal(size=shape) for shape in ((E, D, F), (E, D, F), (E, F, D))]
    return [rng.normal(size=(B, L, D)), logits, *kernels, rng.normal(size=(B, L, D))], pads


def oracle():
    """Output and gradients of sum(output x target) by hand."""
    (x, logits, gate, up, down, target), pads = inputs()
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    out, grads = np.zeros_like(x), [np.zeros_like(a) for a in (x, logits, gate, up, down)]
    for row, token in zip(*np.nonzero(~pads), strict=True):
        own, chosen = x[row, token], np.argsort(-probabilities[row, token])[:K]
        picked = probabilities[row, token, chosen]
        weights, dout, dweights = picked / picked.sum(), target[row, token], []
        for expert, weight in zip(chosen, weights, strict=True):
            g, u = own @ gate[expert], own @ up[expert]
            sigmoid = 1 / (1 + np.exp(-g))
            hidden = g * sigmoid * u
            out[row, token] += weight * hidden @ down[expert]
            dweights.append(dout @ (hidden @ down[expert]))
            dhidden = weight * down[expert] @ dout
            dg, du = dhidden * u * sigmoid * (1 + g * (1 - sigmoid)), dhidden * g * sigmoid
            grads[0][row, token] += gate[expert] @ dg + up[expert] @ du
            grads[2][expert] += np.outer(own, dg)
            grads[3][expert] += np.outer(own, du)
            grads[4][expert] += weight * np.outer(hidden, dout)
        grads[1][row, token, chosen] = weights * (dweights - weights @ dweights)
    return out, grads


def mixture(x, logits, gate, up, down, pads):
    routing = route(jax.nn.softmax(logits), K)
    return apply_experts(x, routing, gate, up, down, padding_mask=pads, activation=activation, count=E)


def held(kernel, ep):
    """The experts of this rank."""
    count = E // ep
    return jax.lax.dynamic_slice_in_dim(kernel, jax.lax.axis_index("cp") * ep // jax.lax.axis_size("cp") * count, count)


MESHES = [
    (None, 1),
    (dict(cp=4), 1),
    (dict(cp=2, fsdp=2), 1),
    (dict(dp=2, cp=1), 1),
    (dict(cp=4), 2),
    (dict(cp=4), 4),
    (dict(cp=8), 4),
    (dict(cp=4, fsdp=2), 2),
]


@pytest.mark.parametrize(("sizes", "ep"), MESHES)
def test_output_and_every_gradient(sizes, ep):
    """Rows over automatic axes, tokens over the manual one, experts too where ep > 1; in float64."""
    expected, expected_grads = oracle()
    with jax.enable_x64(True):
        (*operands, target), pads = (jax.tree.map(jnp.asarray, part) for part in inputs())
        mesh = sizes and make_mesh(**sizes)
        manual = frozenset(["cp"] if sizes and sizes["cp"] > 1 else ())

        def local(operands, target, pads):
            operands = jax.tree.map(lambda x: vary_over(x, manual), operands)

            def loss(operands):
                tokens, kernels = operands[:2], operands[2:]
                out = mixture(*tokens, *(held(kernel, ep) if ep > 1 else kernel for kernel in kernels), pads)
                return (out * target).sum(), out

            (_, out), grads = jax.value_and_grad(loss, has_aux=True)(operands)
            return out, [*grads[:2], *jax.lax.psum(grads[2:], tuple(manual))]

        tokens = P(None, "cp")
        if manual:
            parts = [tokens, tokens, P(), P(), P()]
            specs = dict(in_specs=(parts, tokens, tokens), out_specs=(tokens, parts))
            local = jax.shard_map(local, mesh=mesh, **specs, axis_names=manual, check_vma=True)
        if mesh:
            rows = jax.sharding.NamedSharding(mesh, P(("dp", "fsdp")))
            operands[:2], target, pads = jax.device_put((operands[:2], target, pads), rows)
        with jax.set_mesh(mesh) if mesh else jax.default_matmul_precision("highest"):
            compiled = jax.jit(local).lower(operands, target, pads).compile()
        out, grads = compiled(operands, target, pads)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    assert not np.asarray(out)[pads].any()
    for found, grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(found, grad, rtol=1e-11, atol=1e-11)
    if sizes:
        program = compiled.as_text()
        assert "all-gather(" not in program, "rows or tokens were gathered"
        assert ("collective-permute(" in program) == (ep > 1), "tokens travel where experts are split"


def test_bfloat16_adds_in_float32():
    """Half a thousand equal experts' outputs of 1 / 512 sum to one, which bfloat16 would not reach."""
    k = 512
    x, ones = np.ones((1, 1, 1), jnp.bfloat16), np.ones((k, 1, 1), jnp.bfloat16)

    @jax.jit
    def run(x):
        routing = route(jnp.full((1, 1, k), 0.5), k)
        mask = jnp.zeros((1, 1), bool)
        return apply_experts(x, routing, ones, ones, ones, padding_mask=mask, activation=jnp.multiply, count=k)

    out = run(x)
    assert out.dtype == jnp.bfloat16 and out.item() == 1


def test_a_bias_changes_the_choice_but_not_the_weights():
    scores = jnp.array([[[0.9, 0.5, 0.4, 0.1]]])
    bias = jnp.array([-1, 0, 0, 1.0])
    experts, weights = route(scores, 2, bias=bias, renormalise=False)
    np.testing.assert_array_equal(experts, [[[3, 1]]])
    np.testing.assert_array_equal(weights, scores[..., jnp.array([3, 1])])
    np.testing.assert_allclose(route(scores, 2, bias=bias).weights, [[[1 / 6, 5 / 6]]], rtol=1e-6)
    slope = jax.grad(lambda bias: route(scores, 2, bias=bias).weights[0, 0, 0])(bias)
    assert not slope.any()


@pytest.mark.quick
def test_balance_loss_of_parts_sums_to_that_of_the_whole():
    """With the gradient of probabilities alone, and pads nowhere in it."""
    (_, logits, *_), pads = inputs()
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1)[..., :K]
    real = ~pads
    share = np.bincount(chosen[real].ravel(), minlength=E) / real.sum()
    expected = E * (share * probabilities[real].mean(0)).sum()

    def sums(probabilities, part):
        experts = route(probabilities, K).experts
        return router_sums(probabilities[part], experts[part], jnp.asarray(pads[part]))

    def total(probabilities):
        parts = [sums(probabilities, slice(row, row + 1)) for row in range(B)]
        whole = jax.tree.map(lambda *leaves: sum(leaves), RouterSums.zero(E, probabilities), *parts)
        return sum(balance_loss(part, whole.chosen, whole.tokens) for part in parts)

    value, slope = jax.jit(jax.value_and_grad(total))(jnp.asarray(probabilities, jnp.float32))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(slope, np.where(pads[..., None], 0, E * share / real.sum()), rtol=1e-5)
    assert len({float(x) for x in share}) > 3
