"""Mixtures of experts: choosing experts, grouped products with their weights, and the sums that a balance loss takes.

No token is ever dropped and pads reach no expert. The tokens are sorted by expert; then one expert after another works
on tiles of its own, as many as it has. So the work is that of the chosen experts alone, on every backend (XLA makes of
`jax.lax.ragged_dot`, where it has no kernel for it, a product of all tokens with all experts), shapes are static, and
nothing k times as large as the hidden states is ever held.

Expert parallelism (ep) splits the experts over the ranks of the mesh axis cp, which hold all the tokens: ep divides cp.
The cp / ep ranks that are neighbours gather, and share, the same E / ep experts; the ep ranks at a distance of cp / ep
have all experts between them, and pass their tokens round. A chunk of tokens hops from rank to rank together with the
sum of what they made of it, which comes home after ep hops (`cpjax.exchange.go_round`). A rank so sends ep x N x D
numbers twice, in the dtype of the activations and in float32, where it would otherwise gather the other experts:
3 x E x D x F of them in each layer, in the forward pass and again in the backward pass. Compiled for 8 H200, a layer
of Qwen3.5-35B-A3B (E 256, D 2,048, F 512, k 8) with 16,384 tokens a rank takes 2.1 GiB with ep 8 where ep 1 takes 3.9,
and sends 3.4 GiB where ep 1 sends 2.8; of the former all but 4 % has computation beside it, of the latter a third.

Why not an all-to-all: for no token to be dropped its static shapes need room for all tokens of all ranks, as a token
may choose any experts: the same bytes at once (with k of the order of ep most tokens go to most ranks anyway), ep times
the memory, and nothing to hide them behind. All-gathering the tokens and reduce-scattering the outputs is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from cpjax.exchange import go_round
from cpjax.mesh import ROW_AXES, splitting_axes
from cpjax.varying import vary_over, varying_axes

MAX_TILE = 512
"""Most tokens that an expert works on at once."""

Activation = Callable[[jax.Array, jax.Array], jax.Array]
"""(gate, up) -> hidden, element by element, for instance silu(gate) * up."""


class Routing(NamedTuple):
    """The k experts of each token.

    Attributes:
        experts: int32 [B, L, k], all of a token different.
        weights: float32 or wider [B, L, k], what each expert's output is multiplied by.
    """

    experts: jax.Array
    weights: jax.Array


class RouterSums(NamedTuple):
    """Sums over tokens, and layers, that are not pads; to be added over ranks and microbatches.

    Attributes:
        chosen: [E], how often each expert was chosen; has no gradient.
        probabilities: [E], of the router's probabilities.
        tokens: scalar, number of tokens x layers.
    """

    chosen: jax.Array
    probabilities: jax.Array
    tokens: jax.Array

    @classmethod
    def zero(cls, count: int, like: jax.Array) -> RouterSums:
        """Before any token, for `count` experts; float32 or as wide as `like`, and varying over ranks as it does."""
        dtype = jnp.promote_types(like.dtype, jnp.float32)
        zeros = jnp.zeros(count, dtype)
        return jax.tree.map(lambda x: vary_over(x, varying_axes(like)), cls(zeros, zeros, jnp.zeros((), dtype)))


def route(scores: jax.Array, k: int, *, bias: jax.Array | None = None, renormalise: bool = True) -> Routing:
    """The k experts with the highest scores.

    Args:
        scores: [B, L, E], softmax or sigmoid of the router's logits, in float32 or wider.
        bias: [E], added to the scores for the choice alone (arXiv 2408.15664).
        renormalise: whether the weights, which are the chosen scores, shall sum to one.
    """
    wanted = lax.stop_gradient(scores if bias is None else scores + bias)
    experts = _on_rows(lambda wanted, _: lax.top_k(wanted, k)[1], (wanted,))
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights)


def router_sums(probabilities: jax.Array, experts: jax.Array, padding_mask: jax.Array) -> RouterSums:
    """What one layer adds to the sums.

    Args:
        probabilities: [B, L, E].
        experts: [B, L, k].
        padding_mask: [B, L], True = pad.
    """
    count, dtype = probabilities.shape[-1], probabilities.dtype
    real = ~padding_mask
    hits = (experts[..., None] == jnp.arange(count)).any(-2) & real[..., None]
    return RouterSums(
        hits.sum((0, 1), dtype=jnp.int32).astype(dtype),  # a sum of ones in float32 ends at 2^24
        jnp.where(real[..., None], probabilities, 0).sum((0, 1)),
        real.sum(dtype=jnp.int32).astype(dtype),
    )


def balance_loss(sums: RouterSums, chosen: jax.Array, tokens: jax.Array) -> jax.Array:
    """E sum_e f_e P_e: f_e the share of tokens that chose expert e, P_e its mean probability (arXiv 2101.03961, 4-6).

    It is linear in the sums of probabilities, so that parts of a batch may be given one by one and their losses added,
    as long as `chosen` and `tokens` are those of the whole batch.

    Args:
        sums: of a part of the batch.
        chosen, tokens: as of `RouterSums`, of the whole batch.
    """
    shares = lax.stop_gradient(chosen) / jnp.maximum(tokens, 1) ** 2
    return len(chosen) * (shares * sums.probabilities).sum()


class Experts(nnx.Module):
    """E gated MLPs, down(activation(gate(x), up(x))), kernels stacked [E, in, out].

    `scale` is that of the initial down projection; otherwise initialised as `Linear`.

    Attributes:
        ep: parts that the experts are split into under context parallelism, see `share_experts`.
    """

    ep: int = 1

    def __init__(
        self, count: int, features: int, hidden: int, *, activation: Activation, scale: float = 1.0, dtype: Any,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        def kernel(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (count, inputs, outputs), dtype) * (scale * inputs**-0.5)
            return nnx.Param(values.astype(dtype))

        self.activation, self.count = activation, count
        self.gate_proj, self.up_proj = kernel(features, hidden), kernel(features, hidden)
        self.down_proj = kernel(hidden, features, scale)

    def __call__(self, x: jax.Array, routing: Routing, padding_mask: jax.Array) -> jax.Array:
        """x [B, L, features] -> the same shape; zero for pads."""
        kernels = self.gate_proj[...], self.up_proj[...], self.down_proj[...]
        return apply_experts(
            x, routing, *kernels, padding_mask=padding_mask, activation=self.activation, count=self.count
        )


def share_experts(model: nnx.Module, ep: int) -> None:
    """Lets ranks of cp share the experts of a model: each works with 1 / ep of them, see `sharding.check_ep`."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            module.ep = ep


def apply_experts(
    x: jax.Array,
    routing: Routing,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    padding_mask: jax.Array,
    activation: Activation,
    count: int,
) -> jax.Array:
    """Sum over each token's experts of weight x down(activation(gate(x), up(x))).

    Products are made in x's dtype; outputs are weighted and added in float32 or wider.

    Args:
        x: [B, L, D].
        routing: of each token.
        gate, up: [E, D, F], or inside a `shard_map` over cp the E / ep that rank r holds, those from
            floor(r ep / cp) E / ep on; the tokens then go round the ranks that hold the others.
        down: [E, F, D] or [E / ep, F, D].
        padding_mask: [B, L], True = pad; these reach no expert and get zero.
        activation: of the family.
        count: E.

    Returns:
        [B, L, D] in x's dtype.
    """
    experts = jnp.where(padding_mask[..., None], count, routing.experts)  # for pads, one that does not exist
    kernels = tuple(kernel.astype(x.dtype) for kernel in (gate, up, down))
    # Outside of the custom derivative JAX itself adds the gradients of kernels that are the same on all ranks.
    return _mix(*_alike((x, routing.weights, experts, kernels)), activation, count)


def _alike(operands: Any) -> Any:
    """All varying over the same manual axes."""
    axes = frozenset[Any]().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(operands)))
    return jax.tree.map(lambda leaf: vary_over(leaf, axes), operands)


class _Tiles(NamedTuple):
    """Where the N tokens of the experts are.

    Attributes:
        order: int32 [N k + tile], slots (token k + choice) sorted by expert; then slots that do not exist.
        ends: int32 [E], where the slots of each expert end.
        sizes: int32 [E], and how many there are.
        k: choices of a token.
        tile: slots of a tile.
    """

    order: jax.Array
    ends: jax.Array
    sizes: jax.Array
    k: int
    tile: int

    @classmethod
    def of(cls, experts: jax.Array, held: int, count: int) -> _Tiles:
        """From the experts [N, k], of which this rank holds the first `held`, and there are `count`.

        A tile is half as long as an expert has tokens on average, so that few of its slots are empty.
        """
        flat, tile = experts.reshape(-1), 8
        while tile < min(MAX_TILE, len(flat) // (2 * count)):
            tile *= 2
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        sizes = jnp.zeros(held, jnp.int32).at[flat].add(1, mode="drop")
        return cls(jnp.pad(order, (0, tile)), jnp.cumulative_sum(sizes), sizes, experts.shape[-1], tile)

    def each(self, end: jax.Array, size: jax.Array, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """carry = body(slots, tokens, carry) over the tiles of one expert; empty slots are out of bounds."""

        def step(number: jax.Array, carry: Any) -> Any:
            first = end - size + number * self.tile
            place = first + jnp.arange(self.tile, dtype=jnp.int32)
            slots = lax.dynamic_slice_in_dim(self.order, first, self.tile)
            slots = jnp.where(place < end, slots, len(self.order) + self.k * place)  # each is another token
            return body(slots, slots // self.k, carry)

        return lax.fori_loop(0, (size + self.tile - 1) // self.tile, step, carry)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0)


def _dot(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    return jnp.matmul(x, y, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mix(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    kernels: tuple[jax.Array, ...],
    activation: Activation,
    count: int,
) -> jax.Array:
    """`apply_experts`; pads have an expert beyond the last."""

    def forward(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: tuple[jax.Array, ...]) -> jax.Array:
        tiles = _Tiles.of(experts, len(kernels[0]), count)

        def expert(out: jax.Array, own: Any) -> tuple[jax.Array, None]:
            end, size, (gate, up, down) = own

            def tile(slots: jax.Array, tokens: jax.Array, out: jax.Array) -> jax.Array:
                own = _rows(x, tokens)
                made = _dot(activation(own @ gate, own @ up), down, out.dtype)
                made *= _rows(weights.reshape(-1), slots)[:, None]
                return out.at[tokens].add(made, mode="drop", unique_indices=True)

            return tiles.each(end, size, tile, out), None

        zero = vary_over(jnp.zeros(x.shape, weights.dtype), varying_axes(x))
        return lax.scan(expert, zero, (tiles.ends, tiles.sizes, kernels))[0]

    def work(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[()]]:
        x, weights, experts = chunk
        return _on_rows(forward, (x, weights, _held(experts, kernels, count)), kernels), ()

    return _go_round(work, (x, weights, experts), kernels, count)[0].astype(x.dtype)


def _go_round(work: Callable[[Any], Any], chunk: Any, kernels: Sequence[jax.Array], count: int) -> Any:
    """Where ranks hold different experts, chunks of tokens go round all that have those of `count` between them."""
    ep = count // len(kernels[0])
    return go_round(work, chunk, "cp", lax.axis_size("cp"), ep) if ep > 1 else work(chunk)


def _held(experts: jax.Array, kernels: Sequence[jax.Array], count: int) -> jax.Array:
    """The numbers of experts among those that this rank holds; of others, one beyond the last."""
    held = len(kernels[0])
    if held == count:
        return experts
    own = experts - lax.axis_index("cp") // (lax.axis_size("cp") * held // count) * held
    return jnp.where((own >= 0) & (own < held), own, held)


def _mix_fwd(*operands: Any) -> Any:
    return _mix(*operands), operands[:-2]


def _mix_bwd(activation: Activation, count: int, operands: Any, dout: jax.Array) -> Any:
    """Computes each tile's hidden values anew."""
    x, weights, experts, kernels = operands
    wide, held = weights.dtype, len(kernels[0])
    summed = kernels[0].dtype if held == count else wide  # of several hops

    def backward(x: jax.Array, weights: jax.Array, experts: jax.Array, dout: jax.Array, kernels: Any) -> Any:
        axes, tiles = varying_axes(x), _Tiles.of(experts, held, count)

        def expert(carry: Any, own: Any) -> Any:
            end, size, (gate, up, down) = own

            def tile(slots: jax.Array, tokens: jax.Array, carry: Any) -> Any:
                dx, dweights, dgate, dup, ddown = carry
                own, dmade = _rows(x, tokens), _rows(dout, tokens)
                weight = _rows(weights.reshape(-1), slots)[:, None]
                hidden, pull = jax.vjp(activation, own @ gate, own @ up)
                dhidden = _dot(dmade, down.T, wide)
                dweight = (dhidden * hidden.astype(wide)).sum(-1)
                dg, du = pull((dhidden * weight).astype(x.dtype))
                into = _dot(dg, gate.T, wide) + _dot(du, up.T, wide)
                return (
                    dx.at[tokens].add(into, mode="drop", unique_indices=True),
                    dweights.at[slots].set(dweight, mode="drop", unique_indices=True),
                    dgate + _dot(own.T, dg, wide),
                    dup + _dot(own.T, du, wide),
                    ddown + _dot(hidden.T, (dmade * weight).astype(x.dtype), wide),
                )

            zeros = (vary_over(jnp.zeros(kernel.shape, wide), axes) for kernel in (gate, up, down))
            dx, dweights, *dkernels = tiles.each(end, size, tile, (*carry, *zeros))
            return (dx, dweights), tuple(dkernel.astype(summed) for dkernel in dkernels)

        zeros = (vary_over(jnp.zeros(shape, wide), axes) for shape in (x.shape, weights.size))
        (dx, dweights), dkernels = lax.scan(expert, tuple(zeros), (tiles.ends, tiles.sizes, kernels))
        return (dx, dweights.reshape(weights.shape)), dkernels

    def work(chunk: tuple[jax.Array, ...]) -> Any:
        (x, dout), weights, experts = chunk
        return _on_rows(backward, (x, weights, _held(experts, kernels, count), dout), kernels, sums=True)

    # One array of the two, as XLA on GPUs hides two large permutes at a time: this one and that of dx.
    (dx, dweights), dkernels = _go_round(work, (jnp.stack((x, dout)), weights, experts), kernels, count)
    dkernels = tuple(dkernel.sum(0).astype(kernels[0].dtype) for dkernel in dkernels)  # over devices, once
    return dx.astype(x.dtype), dweights, None, dkernels


_mix.defvjp(_mix_fwd, _mix_bwd)


def _on_rows(function: Callable[..., Any], arrays: Sequence[jax.Array], kernels: Any = (), sums: bool = False) -> Any:
    """function(*arrays, kernels) on tokens [N, ...] of arrays [B, L, ...], its results [B, L, ...] again.

    Where automatic mesh axes split the rows, every device takes its own: left to the compiler, sorting and choosing
    the largest would bring all rows to all devices.

    Args:
        sums: the function gives a pair; of the second part each device's own is left, along a new first axis.
    """
    axes = splitting_axes(ROW_AXES, len(arrays[0]))

    def local(arrays: tuple[jax.Array, ...], kernels: Any) -> Any:
        shape = arrays[0].shape[:2]
        flat, kernels = _alike(([x.reshape(-1, x.shape[-1]) for x in arrays], kernels))
        out = function(*flat, kernels)
        tokens, total = out if sums else (out, None)
        tokens = jax.tree.map(lambda x: x.reshape(*shape, -1), tokens)
        return (tokens, jax.tree.map(lambda x: x[None], total)) if sums else tokens

    if not axes:
        return local(tuple(arrays), kernels)
    spec = P(axes)
    on_devices = jax.shard_map(local, in_specs=(spec, P()), out_specs=spec, axis_names=set(axes), check_vma=False)
    out = on_devices(tuple(arrays), kernels)
    return jax.tree.map(lambda x: vary_over(x, varying_axes(arrays[0])), out)
