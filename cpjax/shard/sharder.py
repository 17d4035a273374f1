"""The sharder: a layout with the lengths it was captured for, and the verbs that move tensors through it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.exchange import all_gather, check_axis
from cpjax.shard.layout import Contiguous, Layout, Rank, TableLayout, invert
from cpjax.varying import varying_axes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "places"],
    meta_fields=["layout", "length", "padded_length", "axis_name", "rows"],
)
@dataclasses.dataclass(frozen=True)
class Sharder:
    """Moves tensors between the caller's sequence and this rank's part of it.

    The verbs are called inside the body of a `jax.shard_map` that is manual over `axis_name`; with cp = 1 they
    need no mesh. Lengths are static, so a new length is a new trace, never a silent mis-shard. What depends on the
    batch, `table` and `places`, is data: pass such a sharder to `jax.jit` as an argument, and a new batch is no new
    trace.

    Attributes:
        layout: who owns which token.
        length: S, the caller's length.
        padded_length: T >= S, a multiple of `layout.divisor`; any T if there are `places`.
        axis_name: mesh axis of the cp ranks.
        rows: input rows that were flattened into the one sequence of S tokens; 1: no rows were flattened.
        table: int32 [cp, L], each row ascending: the map of a layout that depends on the batch, else None. Where rows
            of the batch have other maps: [B, cp, L].
        places: int32 [S], where in 0 .. T-1 each of the caller's tokens went, -1 for a pad that was dropped; None if
            token i stays at i. [B, S] beside a table for each row.
    """

    layout: Layout
    length: int
    padded_length: int
    axis_name: str = "cp"
    rows: int = 1
    table: Any = None
    places: Any = None

    def __post_init__(self) -> None:
        if not all(isinstance(n, (int, np.integer)) for n in (self.length, self.padded_length)):
            raise ValueError(
                f"a sharder was given length {self.length!r} and padded length {self.padded_length!r}: both must be "
                "integers"
            )
        self.layout.check_length(self.padded_length)
        if self.length < 1 or (self.places is None and self.length > self.padded_length):
            raise ValueError(
                f"length {self.length} does not fit the padded length {self.padded_length}: it must be 1 .. that"
            )

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def by_row(self) -> bool:
        """Whether each row of the batch has a map of its own. Rows are then the axis before that of tokens."""
        return self.table is not None and self.table.ndim == 3

    @property
    def _sequences(self) -> int:
        return len(self.places) if self.places is not None and self.places.ndim > 1 else 1

    @property
    def local_length(self) -> int:
        """L = T / cp."""
        return self.padded_length // self.cp

    @property
    def end(self) -> int:
        """S, where the caller's tokens end in global order; T if they have `places`, with pads among them."""
        return self.length if self.places is None else self.padded_length

    def rank(self) -> Any:
        """This rank's number: traced inside `shard_map`, 0 when cp = 1.

        Raises:
            ValueError: outside of a `shard_map` that is manual over `axis_name`, or one of another number of ranks.
        """
        if self.cp == 1:
            return 0
        check_axis(self.axis_name, self.cp)
        return jax.lax.axis_index(self.axis_name)

    def indices(self, rank: Rank) -> Any:
        """Global position of each token of a rank, in local order and always ascending: the one map of all layouts.

        Args:
            rank: int, numpy ranks [...], or a traced integer.

        Returns:
            int32 [..., L], or [B, ..., L] by row; NumPy if the rank, and the table if there is one, are concrete.

        Raises:
            ValueError: a concrete rank outside 0 .. cp-1, or a table of another shape.
        """
        if self.table is None:
            return self.layout.indices(self.padded_length, rank)
        if self.table.ndim > 3 or self.table.shape[-2:] != (self.cp, self.local_length):
            raise ValueError(
                f"the table of {self.layout} has shape {self.table.shape}: it must be [cp, L] or [B, cp, L], with "
                f"(cp, L) = {(self.cp, self.local_length)}; take one sharder of several that were stacked"
            )
        rank = self.layout.check_rank(rank)
        table = jnp.asarray(self.table) if isinstance(rank, jax.Array) else self.table
        return table[:, rank] if self.by_row else table[rank]

    def positions(self) -> jax.Array:
        """int32 [L], or [B, L] by row: global position of each of this rank's tokens."""
        return jnp.asarray(self.indices(self.rank()))

    def inverse(self) -> Any:
        """int32 [T], or [B, T] by row: where each global position lies in the concatenation of all ranks' tokens."""
        return invert(self.indices(np.arange(self.cp)), self.padded_length, by_row=self.by_row)

    def sources(self) -> Any:
        """int32 [T], or [B, T] by row: which of the caller's S tokens lies at each global position, -1 for a pad."""
        places = np.arange(self.length, dtype=np.int32) if self.places is None else self.places
        return invert(places, self.padded_length, by_row=places.ndim > 1)

    def contiguous(self) -> Sharder:
        """The same tokens and lengths in contiguous order, for `convert`."""
        return dataclasses.replace(self, layout=Contiguous(self.cp), table=None)

    def take_local(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """This rank's tokens of a full-length tensor; differentiable.

        The transpose scatters each rank's cotangent to its own positions; `shard_map` sums these over ranks for an
        input that is the same on all of them, so embeddings and towers receive the dense gradient.

        Args:
            x: [..., T, ...], the padded length along `axis`.

        Returns:
            [..., L, ...].

        Raises:
            ValueError: the axis is not T long.
        """
        self._check(x, axis, (self.padded_length,), "take_local", "pad it with make_batch, or use shard(x, fill=...)")
        if self.cp == 1:
            return x
        return take(x, self.positions(), axis, unique_indices=True, indices_are_sorted=True)

    def shard(self, x: jax.Array, *, fill: Any = None, axis: int = 1) -> jax.Array:
        """This rank's tokens of a tensor in the caller's coordinates.

        Args:
            x: [..., S, ...] or [..., T, ...] along `axis` (S is meant if both are the same and tokens have `places`);
                or, where rows were flattened, [..., rows, S / rows, ...] with tokens along `axis` (by row, B x rows).
            fill: value of pad tokens; required when x is S long and there may be pads.

        Returns:
            [..., L, ...]; flattened rows are one row, [..., 1, L, ...] (by row: B rows).

        Raises:
            ValueError: any other length, padding is needed and `fill` was not given, or S = L (T = cp S) and the
                tensor varies over the ranks, so that it may be sharded already. `shard_map` knows that with
                check_vma=True; with check_vma=False, where S = L, a second `shard` is not noticed.
        """
        self._check_axis(x, axis, "shard")
        axis %= np.ndim(x)
        count = self._sequences
        if self.rows > 1 and np.shape(x)[max(axis - 1, 0) : axis + 1] == (count * self.rows, self.length // self.rows):
            x = x.reshape(*x.shape[: axis - 1], count, self.length, *x.shape[axis + 1 :])
        self._check(x, axis, (self.length, self.padded_length), "shard", "give the tensor in one of these lengths")
        if x.shape[axis] != self.length or (self.places is None and self.length == self.padded_length):
            return self.take_local(x, axis)
        if self.cp > 1 and self.length == self.local_length and self.axis_name in varying_axes(x):
            raise ValueError(
                f"shard was given {self.length} tokens that are not the same on all ranks, and {self.layout} over "
                f"S={self.length}, T={self.padded_length} leaves each rank as many: it cannot be told whether they "
                "are sharded already; if not, pad the tensor to T and use take_local"
            )
        if fill is None:
            raise ValueError(
                f"shard was given {x.shape[axis]} tokens and must pad them to {self.padded_length}: say with which "
                "value, fill=..."
            )
        if self.places is not None:
            sources = jnp.asarray(self.sources())
            return _take_or_fill(x, take(sources, self.positions(), sources.ndim - 1), fill, axis)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.padded_length - self.length)
        return self.take_local(jnp.pad(x, widths, constant_values=fill), axis)

    def gather(self, x: jax.Array, *, axis: int = 1, trim: bool = True, fill: Any = None) -> jax.Array:
        """All ranks' tokens in global order; differentiable.

        Every rank gets the full tensor. The gradient is the SUM over the ranks that consume it: a loss computed
        alike on all ranks from the gathered tensor, and not averaged over them, yields cp times the gradient of one.

        Args:
            x: [..., L, ...] along `axis`.
            trim: give it in the caller's coordinates, S long, instead of T: pads are dropped, tokens go back to where
                they came from, and [..., 1, L, ...] of flattened rows becomes [..., rows, S / rows, ...].
            fill: value at the caller's pads that were dropped; required to trim where tokens have `places`.

        Raises:
            ValueError: the axis is not L long, or `fill` is needed and was not given.
        """
        self.check_local(x, axis, "gather")
        axis %= x.ndim
        if trim and self.places is not None and fill is None:
            raise ValueError(
                "gather was asked for the caller's coordinates, of which pads may have been dropped: say which value "
                "these get, fill=..., or keep the padded sequence, trim=False"
            )
        if self.cp > 1:
            x = jnp.moveaxis(all_gather(x, self.axis_name, self.cp), 0, axis)
            x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        if trim and self.places is not None:
            places = jnp.asarray(self.places)
            inverse = jnp.broadcast_to(jnp.asarray(self.inverse()), (*places.shape[:-1], self.padded_length))
            where = jnp.take_along_axis(inverse, jnp.maximum(places, 0), axis=-1)
            x = _take_or_fill(x, jnp.where(places < 0, -1, where), fill, axis)
            if self.rows > 1 and axis > 0 and x.shape[axis - 1] == self._sequences:
                x = x.reshape(*x.shape[: axis - 1], -1, self.length // self.rows, *x.shape[axis + 1 :])
            return x
        if self.cp > 1:
            x = take(x, self.inverse(), axis, unique_indices=True)
        return jax.lax.slice_in_dim(x, 0, self.length, axis=axis) if trim else x

    def check_local(self, x: Any, axis: int, verb: str) -> None:
        """Raises ValueError unless `axis` of x holds this rank's L tokens."""
        self._check(x, axis, (self.local_length,), verb, "give this rank's own tokens")

    def _check_axis(self, x: Any, axis: int, verb: str) -> None:
        if not -np.ndim(x) <= axis < np.ndim(x):
            raise ValueError(
                f"{verb} was given shape {np.shape(x)}, which has no axis {axis}: name the token axis, axis=..."
            )

    def _check(self, x: Any, axis: int, lengths: tuple[int, ...], verb: str, hint: str) -> None:
        self._check_axis(x, axis, verb)
        shape = np.shape(x)
        if self.by_row and (axis % len(shape) == 0 or shape[axis - 1] != len(self.table)):
            raise ValueError(
                f"{verb} was given shape {shape} with tokens on axis {axis}, but {self.layout} has {len(self.table)} "
                "maps, one for each row of the batch: the axis before that of the tokens must be of these rows"
            )
        if shape[axis] not in lengths:
            wanted = " or ".join(str(n) for n in dict.fromkeys(lengths))
            if verb == "shard" and self.rows > 1:
                wanted += f" (or {self.rows} rows of {self.length // self.rows})"
            raise ValueError(
                f"{verb} was given {shape[axis]} tokens on axis {axis} of shape {shape}, but {self.layout} over "
                f"S={self.length}, T={self.padded_length} needs {wanted}: {hint}"
            )


def take(x: jax.Array, index: Any, axis: int, **promises: Any) -> jax.Array:
    """x at `index` along `axis`: [L] for all rows, or [B, L] where each row, on the axis before, has its own."""
    index = jnp.asarray(index)
    if index.ndim == 1:
        return jnp.take(x, index, axis=axis, mode="clip", **promises)
    rows = axis % x.ndim - 1
    own = jax.vmap(lambda x, i: jnp.take(x, i, axis=rows, mode="clip", **promises), (rows, 0), rows)
    return own(x, index)


def _take_or_fill(x: jax.Array, index: Any, fill: Any, axis: int) -> jax.Array:
    """`take`, with `fill` where the index is negative."""
    index = jnp.asarray(index)
    there = index >= 0
    there = there.reshape(*there.shape, *[1] * (x.ndim - 1 - axis))
    return jnp.where(there, take(x, jnp.maximum(index, 0), axis), jnp.asarray(fill, x.dtype))


def make_sharder(length: int, layout: Layout, axis_name: str = "cp", *, padded_length: int | None = None) -> Sharder:
    """A sharder for sequences of `length` tokens, padded by default to the smallest length the layout can split.

    Raises:
        ValueError: a layout that depends on the batch, or lengths that do not fit.
    """
    if isinstance(layout, TableLayout):
        layout.indices(length, 0)
    return Sharder(layout, length, layout.pad_length(length) if padded_length is None else padded_length, axis_name)
