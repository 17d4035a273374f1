"""Blockwise attention as Pallas kernels for NVIDIA GPUs: operands, results and formulas are those of `blockwise`.

One program of a kernel owns a tile and walks the list of tiles that hold an allowed partner of it: for the output and
for dq a tile of queries walks tiles of keys, for dkv a tile of keys walks tiles of queries. Scores never leave the
chip, and no two programs add to one number, so that results repeat bit by bit.

The kernels go through Pallas' Triton backend, which serves every GPU since Ampere; on other devices they are
interpreted, slowly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P

from cpjax.attention.blockwise import Rule, State, absorb, accumulation_dtype, partners
from cpjax.attention.mask import Streams, Tokens, pair_mask, tile_mask
from cpjax.mesh import HEAD_AXES, ROW_AXES, device_platform, splitting_axes
from cpjax.varying import vary_over, varying_axes

MAX_TILE = 64
"""Longest tile: the scores of two tiles and the sums of one fit the registers of a program."""

MIN_TILE = 16
"""Shortest tile, and the unit of widths: what the tensor cores take."""

MAX_BYTES = 512
"""Widest keys and values, per token: tiles of more do not fit the 227 KiB that an H100 has on chip."""


def supports(width: int, v_width: int, dtype: Any) -> bool:
    """Whether the kernels take queries and keys of `width`, values of `v_width` and this dtype."""
    size = jnp.dtype(dtype).itemsize
    return size <= 4 and max(width, v_width) * size <= MAX_BYTES


def widen(x: jax.Array) -> jax.Array:
    """x with zeros behind its last axis up to a multiple of `MIN_TILE`; they change no product."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % MIN_TILE)])


def forward(state: State, q: jax.Array, kv: jax.Array, queries: Tokens, keys: Tokens, rule: Rule) -> State:
    """See `blockwise.forward`."""
    width, v_width = q.shape[-1], kv.shape[-1] - rule.values

    def output_kernel(state, q, kv, queries, keys, order, count, out):
        own, q_parts = _tokens(queries), _load(q, (), 0, width)

        def visit(m, here):
            j = order[m]
            values = _load(kv, (j,), rule.values, v_width)
            scores, _ = rule.score(_contract(q_parts, _load(kv, (j,), 0, width)))
            scores = jnp.where(pair_mask(own, _tokens(keys, (j,)), rule.reach)[0], scores, -jnp.inf)
            return absorb(here, scores, lambda p: [_dot(p.astype(part.dtype), part, 1, 0) for part in values])

        parts: Any = _load(state.output, (), 0, v_width)
        here = State(parts, state.peak[...], state.total[...])
        here = lax.fori_loop(0, count[...], visit, here)
        _store(out.output, 0, here.output)
        out.peak[...], out.total[...] = here.peak, here.total

    own = jax.tree.map(lambda _: _QUERY_TILE, state)
    tokens = _token_parts(queries, "tile"), _token_parts(keys, None)
    return _call(
        output_kernel,
        (state, q, kv, queries, keys, *partners(_some(queries, keys, rule))),
        (own, _QUERY_TILE, _ALL_TILES, *tokens, _LIST, _LIST),
        state,
        own,
    )


def backward(
    dq: jax.Array,
    q: jax.Array,
    kv: jax.Array,
    grad: jax.Array,
    peak: jax.Array,
    total: jax.Array,
    delta: jax.Array,
    queries: Tokens,
    keys: Tokens,
    rule: Rule,
) -> tuple[jax.Array, jax.Array]:
    """See `blockwise.backward`."""
    width, v_width = q.shape[-1], kv.shape[-1] - rule.values
    rows = grad, peak, 1 / total, delta
    some = _some(queries, keys, rule)

    def weights(q_parts, k_parts, v_parts, grad_parts, statistics, queries, keys):
        """p and ds of one pair of tiles, [queries, keys]."""
        peak, weight, delta = (x[:, None] for x in statistics)
        scores, slope = rule.score(_contract(q_parts, k_parts))
        mask = pair_mask(queries, keys, rule.reach)[0]
        p = jnp.where(mask, jnp.exp(scores - peak) * weight, 0)
        return p, p * (_contract(grad_parts, v_parts) - delta) * slope

    def dq_kernel(dq, q, kv, rows, queries, keys, order, count, out):
        own, q_parts = _tokens(queries), _load(q, (), 0, width)
        grad, *statistics = rows
        grad_parts, statistics = _load(grad, (), 0, v_width), [x[...] for x in statistics]

        def visit(m, dq):
            j = order[m]
            k_parts, v_parts = _load(kv, (j,), 0, width), _load(kv, (j,), rule.values, v_width)
            _, ds = weights(q_parts, k_parts, v_parts, grad_parts, statistics, own, _tokens(keys, (j,)))
            return [x + _dot(ds.astype(k.dtype), k, 1, 0) for x, k in zip(dq, k_parts, strict=True)]

        zero = [jnp.zeros(part.shape, out.dtype) for part in q_parts]
        parts = lax.fori_loop(0, count[...], visit, zero)
        for (first, size), part in zip(_parts(width), parts, strict=True):
            at = pl.ds(first, size)
            out[at] = dq[at] + part.T  # transposed, as `blockwise` has it

    tokens = _token_parts(queries, "tile"), _token_parts(keys, None)
    dq = _call(
        dq_kernel,
        (dq, q, kv, rows, queries, keys, *partners(some)),
        (_QUERY_TILE_TRANSPOSED, _QUERY_TILE, _ALL_TILES, (_QUERY_TILE,) * 4, *tokens, _LIST, _LIST),
        dq,
        _QUERY_TILE_TRANSPOSED,
    )

    def dkv_kernel(q, kv, rows, queries, keys, order, count, out):
        own = _tokens(keys)
        k_parts, v_parts = _load(kv, (), 0, width), _load(kv, (), rule.values, v_width)
        grad, *statistics = rows
        groups = jnp.int32(q.shape[1])  # q is [n, G, t, D] here

        def visit(m, carry):
            i, g = order[lax.div(m, groups)], lax.rem(m, groups)
            q_parts, grad_parts = _load(q, (i, g), 0, width), _load(grad, (i, g), 0, v_width)
            there = [x[i, g, ...] for x in statistics]
            p, ds = weights(q_parts, k_parts, v_parts, grad_parts, there, _tokens(queries, (i,)), own)
            dk, dv = carry
            dk = [x + _dot(ds.astype(q.dtype), part, 0, 0) for x, part in zip(dk, q_parts, strict=True)]
            dv = [x + _dot(p.astype(grad.dtype), part, 0, 0) for x, part in zip(dv, grad_parts, strict=True)]
            return dk, dv

        zero = [[jnp.zeros(part.shape, out.dtype) for part in parts] for parts in (k_parts, v_parts)]
        dk, dv = lax.fori_loop(0, count[...] * groups, visit, tuple(zero))
        if rule.values:
            _store(out, rule.values, dv)
        else:
            dk = [x + y for x, y in zip(dk, dv, strict=True)]
        _store(out, 0, dk)

    tokens = _token_parts(queries, None), _token_parts(keys, "tile")
    dkv = _call(
        dkv_kernel,
        (q, kv, rows, queries, keys, *partners(some.swapaxes(0, 2))),
        (_ALL_TILES, _KEY_TILE, (_ALL_TILES,) * 4, *tokens, _LIST, _LIST),
        jax.ShapeDtypeStruct(kv.shape, accumulation_dtype(q)),
        _KEY_TILE,
    )
    return dq, dkv


def _some(queries: Tokens, keys: Tokens, rule: Rule) -> jax.Array:
    """`tile_mask`, but [nq, B or 1, nk]."""
    return tile_mask(queries, keys, rule.reach).swapaxes(1, 2)


class _Part(tuple):
    """Which part of an operand a program sees: of leading axes that have a name its own element, of all others all.

    A program has a "tile", a "row" of the batch, and a "head" of keys, with or without one of its "group" of queries.
    """

    def axes(self, x: Any) -> list[tuple[str | None, int]]:
        """Name and size of all axes of x."""
        return list(itertools.zip_longest(self, x.shape))


_QUERY_TILE = _Part(("tile", "row", "head", "group"))
_QUERY_TILE_TRANSPOSED = _Part(("tile", "row", "head", None, "group"))
_KEY_TILE = _Part(("tile", "row", "head"))
_ALL_TILES = _Part((None, "row", "head"))
_LIST = _Part(("tile", "row"))


def _token_parts(tokens: Tokens, tile: str | None) -> Tokens:
    def parts(tree, *names):
        return jax.tree.map(lambda _: _Part(names), tree)

    by_row = {name: parts(getattr(tokens, name), tile, "row") for name in ("positions", "streams")}
    return parts(tokens, tile)._replace(**by_row)


def _call(kernel: Callable[..., None], operands: Any, parts: Any, out: Any, out_parts: Any) -> Any:
    """Runs `kernel(*operands, out)`, which gets refs to those parts.

    Results look like `out`; where that is the first operand, they take its place in memory. XLA cannot split a kernel
    over automatic axes of the mesh: left to it, every device would gather and compute all rows and heads. So the axes
    that split them (`cpjax.mesh.ROW_AXES` and `HEAD_AXES`) are manual around the kernel.
    """
    in_place = range(len(jax.tree.leaves(out)) if out is operands[0] else 0)
    flat, structure = jax.tree.flatten(operands)
    out_flat, out_structure = jax.tree.flatten(out)
    restore, restore_out = (functools.partial(jax.tree.unflatten, x) for x in (structure, out_structure))
    parts, out_parts = (jax.tree.leaves(x, is_leaf=lambda x: isinstance(x, _Part)) for x in (parts, out_parts))

    def flat_kernel(*refs):
        kernel(*restore(refs[: len(flat)]), restore_out(refs[len(flat) :]))

    def sizes(flat):
        found = {"tile": 1, "row": 1, "head": 1, "group": 1}
        for x, part in zip(flat, parts, strict=True):
            found |= {name: max(size, found[name]) for name, size in part.axes(x) if name}
        return found

    def local(*flat):
        own = sizes(flat)

        def block(x, part):
            def index(tile, row, head):
                group, head = head % own["group"], head // own["group"]
                ids = {"tile": tile, "row": row, "head": head, "group": group}
                return tuple(ids[name] if name and size > 1 else 0 for name, size in part.axes(x))

            return pl.BlockSpec(tuple(None if name else size for name, size in part.axes(x)), index)

        varying = functools.reduce(frozenset.union, map(varying_axes, flat))
        alike = [vary_over(x, varying) for x in flat]
        axis_type = jax.typeof(alike[0]).manual_axis_type
        shapes = [
            jax.ShapeDtypeStruct(
                [own[name] if name else size for name, size in part.axes(x)], x.dtype, manual_axis_type=axis_type
            )
            for x, part in zip(out_flat, out_parts, strict=True)
        ]
        results = pl.pallas_call(
            flat_kernel,
            grid=(own["tile"], own["row"], own["head"] * own["group"]),
            in_specs=list(map(block, alike, parts)),
            out_specs=list(map(block, shapes, out_parts)),
            out_shape=shapes,
            input_output_aliases={i: i for i in in_place},
            compiler_params=triton.CompilerParams(num_warps=4 if shapes[0].shape[-1] <= 128 else 8, num_stages=2),
            interpret=device_platform() != "gpu",
            name=f"attention_{kernel.__name__}",
        )(*alike)
        return tuple(results)

    mesh, total = jax.sharding.get_abstract_mesh(), sizes(flat)
    automatic = {name for name in mesh.auto_axes if mesh.shape[name] > 1}
    axes = {"row": splitting_axes(ROW_AXES, total["row"]), "head": splitting_axes(HEAD_AXES, total["head"])}
    if automatic:

        def spec(x, part):
            return P(*(axes.get(name) if size > 1 else None for name, size in part.axes(x)))

        local = jax.shard_map(
            local,
            in_specs=tuple(map(spec, flat, parts)),
            out_specs=tuple(map(spec, out_flat, out_parts)),
            axis_names=automatic,
        )
        # All operands or none are known early: else rematerialisation computes parts of the body ahead and keeps them,
        # with the outer manual axes in their sharding, which JAX does not lower.
        flat = jax.lax.optimization_barrier(flat)
    return restore_out(local(*flat))


def _tokens(tokens: Tokens, tile: tuple[Any, ...] = ()) -> Tokens:
    """What the refs of tokens hold of a tile, as of a batch of one row."""
    at = *tile, ...
    positions = tokens.positions[at][None]
    streams = Streams(*(None if x is None else x[at][None] for x in tokens.streams))
    if tokens.slices is None:
        return Tokens(positions, streams)
    return Tokens(positions, streams, _Entries(tokens.slices, tile), tokens.count[at])


class _Entries:
    """The entries of one tile of a ref, read one by one."""

    def __init__(self, ref: Any, tile: tuple[Any, ...]) -> None:
        self.ref, self.tile = ref, tile

    def __getitem__(self, index: tuple[Any, ...]) -> jax.Array:
        return self.ref[(*self.tile, *index)]


def _parts(width: int) -> list[tuple[int, int]]:
    """(first, size) of the powers of two that make up a width: a block on chip has no other size."""
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _load(ref: Any, tile: tuple[Any, ...], first: int, width: int) -> list[jax.Array]:
    """Columns first .. first + width of a tile [t, ..], in blocks."""
    return [ref[(*tile, slice(None), pl.ds(first + start, size))] for start, size in _parts(width)]


def _store(ref: Any, first: int, parts: list[jax.Array]) -> None:
    for part in parts:
        ref[:, pl.ds(first, part.shape[1])] = part
        first += part.shape[1]


def _dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _contract(x: list[jax.Array], y: list[jax.Array]) -> jax.Array:
    """Products [t, t'] of tokens over all columns."""
    return sum(_dot(a, b, 1, 1) for a, b in zip(x, y, strict=True))  # type: ignore
