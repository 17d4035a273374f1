"""Layouts: which rank owns which token of a sequence, as pure index maps.

A layout is one function, `indices(T, rank)`: the global positions of a rank's tokens in local order. Everything
else (inverse, positions, masks, pictures) derives from it. `T` is the padded global length, `L = T / cp` the local one.
Where the map depends on the batch (`TableLayout`), the sharder holds it: code that must work for every layout asks
`Sharder.indices(rank)`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

Rank = Any  # a Python int, a numpy array of ranks, or a traced integer (`lax.axis_index`)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Base of all layouts: hashable, compared by value, safe as a static argument.

    Attributes:
        cp: number of ranks.
        multiple: every rank's length is a multiple of it (tensor-parallel size, compression ratio ...).
    """

    cp: int
    multiple: int = 1

    name: ClassVar[str]
    runs: ClassVar[int]
    """Equal runs of consecutive positions a rank holds, in local order; 0 if it does not hold runs."""

    def __post_init__(self) -> None:
        for field in ("cp", "multiple"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field}={value!r} given to {type(self).__name__}: it must be an integer >= 1")

    @property
    def divisor(self) -> int:
        """The padded length is a multiple of this: cp x lcm(runs, multiple)."""
        return self.cp * math.lcm(max(self.runs, 1), self.multiple)

    def pad_length(self, length: int) -> int:
        """The smallest valid padded length T >= length (at least one divisor)."""
        if length < 1:
            raise ValueError(f"a sequence of length {length} was given: there must be at least one token to shard")
        return -(-length // self.divisor) * self.divisor

    def indices(self, padded_length: int, rank: Rank) -> Any:
        """Global position of each local token, in local order and always ascending.

        Args:
            padded_length: T, a multiple of `divisor`.
            rank: int or numpy ranks [...] (gives numpy), or a traced scalar (gives a traced array).

        Returns:
            int32 [..., L].

        Raises:
            ValueError: T is not a multiple of `divisor`, or a concrete rank lies outside 0 .. cp-1.

        >>> Zigzag(2).indices(8, 0)
        array([0, 1, 6, 7], dtype=int32)
        """
        self.check_length(padded_length)
        rank = self.check_rank(rank)
        return self._indices(np.arange(padded_length // self.cp, dtype=np.int32), rank[..., None])

    def check_length(self, padded_length: int) -> None:
        """Raises ValueError unless T is a multiple of `divisor`."""
        if padded_length < 1 or padded_length % self.divisor:
            raise ValueError(
                f"length {padded_length} cannot be split by {self}: it must be a multiple of {self.divisor}; "
                f"pad it to {self.pad_length(max(padded_length, 1))}"
            )

    def check_rank(self, rank: Rank) -> Any:
        """`rank` as an array; raises ValueError if a concrete one lies outside 0 .. cp-1."""
        if not isinstance(rank, jax.Array):
            rank = np.asarray(rank, np.int32)
            if ((rank < 0) | (rank >= self.cp)).any():
                raise ValueError(f"rank {rank} given to {self}: ranks go from 0 to {self.cp - 1}")
        return rank

    def _indices(self, local: np.ndarray, rank: Any) -> Any:
        """`indices` for local slots 0 .. L-1 and ranks with a trailing axis of one."""
        raise NotImplementedError

    def inverse(self, padded_length: int) -> np.ndarray:
        """int32 [T]: where each global position lies in the concatenation of all ranks' tokens."""
        return invert(self.indices(padded_length, np.arange(self.cp)), padded_length)

    def run_starts(self, padded_length: int, rank: Rank) -> Any:
        """Global position of the first token of each local run, int32 [..., runs]."""
        if self.runs == 0:
            raise ValueError(f"{self} does not hold runs of consecutive tokens; use a contiguous or zigzag layout")
        return self.indices(padded_length, rank)[..., :: padded_length // self.cp // self.runs]


class Contiguous(Layout):
    """Rank r owns positions r L .. (r+1) L - 1."""

    name = "contiguous"
    runs = 1

    def _indices(self, local: np.ndarray, rank: Any) -> Any:
        return local + rank * local.size


class Zigzag(Layout):
    """Of 2 cp equal chunks, rank r owns chunks r and 2 cp - 1 - r, which balances causal attention.

    Called round-robin, head-tail or dual-chunk swap elsewhere.
    """

    name = "zigzag"
    runs = 2

    def _indices(self, local: np.ndarray, rank: Any) -> Any:
        return self.place(local, local.size // 2, rank)

    def place(self, local: Any, chunk: Any, rank: Any) -> Any:
        """Position of local slot `local` when chunks have `chunk` tokens; all three may be arrays."""
        head = local + rank * chunk
        tail = local + (2 * self.cp - 2 - rank) * chunk  # local - chunk is the slot inside the second chunk
        second = local >= chunk
        return head * ~second + tail * second


class Striped(Layout):
    """Rank r owns positions r, r + cp, r + 2 cp ... (striped attention, arXiv 2311.09431)."""

    name = "striped"
    runs = 0

    def _indices(self, local: np.ndarray, rank: Any) -> Any:
        return local * self.cp + rank


class TableLayout(Layout):
    """Base of layouts whose map depends on the batch: a table int32 [cp, L] in the sharder, passed as data."""

    runs = 0

    def indices(self, padded_length: int, rank: Rank) -> Any:
        """Raises ValueError: only the sharder knows."""
        raise ValueError(
            f"the map of {self} depends on the batch: make its sharder with make_batch, pack or dispatch, and ask "
            "sharder.indices(rank)"
        )


class Packed(TableLayout):
    """Zigzag inside each document of a packed stream, so that every document's attention is balanced by itself.

    Each document is padded to a multiple of `divisor`. Sharders: `make_batch`, `pack`.
    """

    name = "packed"

    @property
    def divisor(self) -> int:
        return Zigzag(self.cp, self.multiple).divisor


@dataclasses.dataclass(frozen=True)
class Dispatched(TableLayout):
    """Chunks of `chunk_size` tokens, equally many for each rank, chosen to balance the area of a mask of slices.

    Sharders: `dispatch`.
    """

    chunk_size: int = 512

    name: ClassVar[str] = "dispatched"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(f"chunk_size={self.chunk_size!r} given to Dispatched: it must be an integer >= 1")

    @property
    def divisor(self) -> int:
        return self.cp * math.lcm(self.chunk_size, self.multiple)


@dataclasses.dataclass(frozen=True)
class Identity(Layout):
    """The whole sequence on one rank, so that callers never branch on cp."""

    cp: int = 1

    name: ClassVar[str] = "identity"
    runs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cp != 1:
            raise ValueError(f"cp={self.cp} given to Identity: it holds the whole sequence, so cp must be 1")

    def _indices(self, local: np.ndarray, rank: Any) -> Any:
        return local + rank * 0


_LAYOUTS: dict[str, type[Layout]] = {
    cls.name: cls for cls in (Identity, Contiguous, Zigzag, Striped, Packed, Dispatched)
}


def layout_from_name(name: str, cp: int, multiple: int = 1) -> Layout:
    """The layout called `name`, one of identity, contiguous, zigzag, striped, packed, dispatched; cp = 1: `Identity`.

    Raises:
        ValueError: an unknown name, or "identity" with cp > 1.
    """
    if name not in _LAYOUTS:
        raise ValueError(f"unknown layout {name!r}: choose one of {', '.join(sorted(_LAYOUTS))}")
    cls = Identity if cp == 1 else _LAYOUTS[name]
    return cls(cp=cp, multiple=multiple)


def invert(order: Any, size: int, *, by_row: bool = False) -> Any:
    """int32 [size]: where each of 0 .. size - 1 stands in the flattened `order`, -1 for those missing.

    Negative entries of `order` are left out. NumPy gives NumPy, a JAX array a JAX array.

    Args:
        by_row: the first axis of `order` counts independent orders: int32 [B, size].
    """
    if by_row and isinstance(order, jax.Array):
        return jax.vmap(lambda own: invert(own, size))(order)
    if by_row:
        return np.stack([invert(own, size) for own in order])
    order = order.reshape(-1)
    if isinstance(order, jax.Array):
        where = jnp.where(order < 0, size, order)  # out of bounds, hence dropped
        slots = jnp.arange(order.size, dtype=jnp.int32)
        return jnp.full(size, -1, jnp.int32).at[where].set(slots, mode="drop")
    inverse = np.full(size, -1, np.int32)
    inverse[order[order >= 0]] = np.flatnonzero(order >= 0)
    return inverse
