"""Attention, forward + backward: masks x layouts and transports x lengths, beside three peers on the same mesh.

- `jax.nn.dot_product_attention`, left to XLA's partitioner, where its S x S scores fit;
- the function of the `ringattention` package (`pip install --no-deps ringattention einops`; it needs flax too), with
  the chunk size that is best for causal attention. The package does not import on current JAX, so the one module is
  loaded alone;
- torch's scaled_dot_product_attention on the CPU, the whole sequence in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Contender, Problem, Row, Settings, measure, on_mesh, reference, timed
from cpjax.attention import Mask, attention
from cpjax.shard import Packed, Sharder, layout_from_name, make_sharder, pack

HEADS, WIDTH = 8, 64

CHECKED = 256
"""Queries whose outputs, and through which the gradients, are compared with dense attention."""

DENSE = 4096
"""Longest sequence for contenders that hold S x S scores."""

CHUNKS = (256, 512, 1024, 2048)
"""What `ringattention` is offered; smaller ones are slower."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A causal mask, and what else makes a problem of it."""

    name: str
    window: int | None = None  # tokens, the query's own included
    documents: int = 1  # equally long
    kv_heads: int = HEADS
    dtype: str = "float32"

    def allowed(self, queries: Any, length: int) -> Any:
        """bool [queries, S]."""
        i, j = queries[:, None], np.arange(length)
        allowed = (j <= i) & (self.ids(length)[queries][:, None] == self.ids(length))
        return allowed if self.window is None else allowed & (i - j < self.window)

    def ids(self, length: int) -> np.ndarray:
        """int32 [S], 1-based."""
        return (1 + np.arange(length) * self.documents // length).astype(np.int32)


def cases(quick: bool) -> list[Case]:
    window = 16 if quick else 512
    return [
        Case("causal"),
        Case(f"window {window}", window=window),
        Case("16 documents", documents=16),
        Case(f"causal, {HEADS} heads on 2", kv_heads=2),
        Case("causal, bfloat16", dtype="bfloat16"),
    ]


WAYS = [("ring", "zigzag"), ("ring", "contiguous"), ("allgather", "zigzag"), ("ulysses", "zigzag")]


def run(settings: Settings) -> Iterator[list[Row]]:
    """The rows of one problem after the other."""
    for length in settings.lengths:
        causal = 0.0  # both are of the first case
        chunks: Sequence[int] = CHUNKS
        for case in cases(settings.quick):
            problem = make_problem(case, length)
            ways = [("ring", "packed"), *WAYS] if case.documents > 1 else WAYS
            unmasked = case.window is None and case.documents == 1
            if causal and (settings.quick or (unmasked and length > DENSE)):  # they would take long, and tell no more
                ways = ways[:1]
            contenders = [_cpjax(case, problem, settings.cp, *way) for way in ways]
            peer, chunks = _ringattention(case, problem, settings.cp, chunks)
            contenders += [peer, _jax_nn(case, problem, settings.cp), _torch(case, problem)]
            rows = measure("attention", case.name, length, contenders, settings.seconds)
            causal = causal or rows[0]["seconds"]
            for row in rows:
                if "seconds" in row:
                    row["of_causal"] = row["seconds"] / causal
            yield rows


def make_problem(case: Case, length: int) -> Problem:
    rng = np.random.default_rng(0)
    heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
    *tokens, cotangent = (rng.normal(size=(1, length, n, WIDTH)).astype(jnp.dtype(case.dtype)) for n in heads)
    rows = np.sort(rng.choice(length, min(length, CHECKED), replace=False))
    probe = np.zeros_like(cotangent)
    probe[:, rows] = cotangent[:, rows]
    allowed = case.allowed(rows, length)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, HEADS // case.kv_heads, 2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q[:, rows], k) * WIDTH**-0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)), v)

    wanted = reference(dense, tokens, cotangent[:, rows])
    return Problem(tuple(tokens), cotangent, probe, rows, wanted)


def _cpjax(case: Case, problem: Problem, cp: int, transport: str, layout: str) -> Contender:
    length = problem.cotangent.shape[1]
    sharder: Sharder
    if layout == "packed":
        sharder = pack(np.arange(case.documents + 1) * (length // case.documents), Packed(cp))
    else:
        sharder = make_sharder(length, layout_from_name(layout, cp))
    mask = Mask(window=(None if case.window is None else case.window - 1, None))

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        local = mask
        if case.documents > 1:
            ids = sharder.take_local(jnp.asarray(case.ids(length))[None])
            local = dataclasses.replace(mask, document_ids=ids, longest_document=length // case.documents)
        return attention(q, k, v, sharder=sharder, mask=local, transport=transport)

    order = sharder.indices(np.arange(cp))
    return on_mesh(f"cpjax {transport}, {layout}", problem, function, cp, order)


def _jax_nn(case: Case, problem: Problem, cp: int) -> Contender:
    name, length = "jax.nn.dot_product_attention", problem.cotangent.shape[1]
    if length > DENSE:
        return Contender(name, note="left out: holds S x S scores")

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        ids = jnp.asarray(case.ids(length))
        return jax.nn.dot_product_attention(
            q, k, v,
            mask=(ids[:, None] == ids)[None, None] if case.documents > 1 else None,
            is_causal=True,
            local_window_size=None if case.window is None else (case.window - 1, 0),
        )  # fmt: skip

    return on_mesh(name, problem, function, cp, manual=False)


@functools.cache
def _ringattention_module() -> Any:
    """The package's JAX module, or None if it is not installed."""
    spec = importlib.util.find_spec("ringattention")
    if spec is None or spec.origin is None:
        return None
    path = pathlib.Path(spec.origin).with_name("ringattention_jax.py")
    module_spec = importlib.util.spec_from_file_location("ringattention_jax", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def _ringattention(case: Case, problem: Problem, cp: int, chunks: Sequence[int]) -> tuple[Contender, Sequence[int]]:
    """With the best of these chunk sizes, in one run each; and that size, if it can run."""
    name, module, length = "ringattention", _ringattention_module(), problem.cotangent.shape[1]
    if module is None:
        return Contender(name, note="not installed: pip install --no-deps ringattention einops"), chunks
    if case.window is not None:
        return Contender(name, note="has no windows"), chunks
    local = length // cp
    ids = jnp.asarray(case.ids(length))[None] if case.documents > 1 else None
    repeats = HEADS // case.kv_heads
    candidates = {}
    for chunk in [n for n in chunks if local % n == 0] or [local]:
        settings = {
            "causal_block_size": 1, "query_chunk_size": chunk, "key_chunk_size": chunk, "deterministic": True,
            "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jnp.float32, "precision": None,
            "policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": False,
        }  # fmt: skip

        def function(q: jax.Array, k: jax.Array, v: jax.Array, settings: Any = settings) -> jax.Array:
            k, v = (jnp.repeat(x, repeats, 2) for x in (k, v))
            return module.ring_attention(q, k, v, None, ids, None, "cp", True, settings)

        note = f"chunks of {chunk}" + (", keys repeated" if repeats > 1 else "")
        candidates[chunk] = on_mesh(name, problem, function, cp, check_vma=False, note=note)
    best = min(candidates, key=lambda chunk: candidates[chunk].rounds[0])
    return candidates[best], [best]


def _torch(case: Case, problem: Problem) -> Contender:
    name, length = "torch SDPA on the CPU", problem.cotangent.shape[1]
    if importlib.util.find_spec("torch") is None:
        return Contender(name, note="not installed")
    if case.window is not None and length > DENSE:
        return Contender(name, note="left out: needs an S x S mask")
    import torch

    def heads_first(x: np.ndarray) -> Any:  # [documents, H, S / documents, D]
        tensor = torch.from_numpy(np.asarray(x, np.float32)).to(getattr(torch, case.dtype))
        return tensor.reshape(case.documents, -1, *x.shape[2:]).transpose(1, 2).contiguous()

    def tokens_first(x: Any) -> np.ndarray:
        return x.detach().transpose(1, 2).reshape(1, length, *x.shape[1::2]).float().numpy()

    q, k, v = (heads_first(x).requires_grad_() for x in problem.tokens)
    mask = None if case.window is None else torch.from_numpy(case.allowed(np.arange(length), length))

    def both(cotangent: Any) -> Any:
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=case.kv_heads < HEADS
        )
        return output, torch.autograd.grad(output, (q, k, v), cotangent)

    cotangent = heads_first(problem.cotangent)
    probe = heads_first(problem.probe)
    (output, gradients), first = timed(lambda: both(probe))
    error = problem.error(tokens_first(output), [tokens_first(x) for x in gradients])
    note = f"{torch.get_num_threads()} threads" + (", a row for each document" if case.documents > 1 else "")
    return Contender(name, lambda: both(cotangent), error, note=note, rounds=[first])
