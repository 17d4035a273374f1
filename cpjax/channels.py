"""Every collective of a program for CPUs gets a channel of its own.

JAX lowers all collectives of a program with the same channel (1; seen with jax 0.10 and 0.12). XLA's CPU runtime tells
two of a kind apart by nothing else: devices that run the same program meet at (run, devices, channel). Its thunk
executor starts those of one computation in the same order on all devices, one after the end of the other, but a loop
counts as started when its body waits for something: the next collective may then run beside those of the loop. With one
channel both meet in one rendezvous: XLA aborts ("id < num_threads"), waits for ever, or, where as many have come as one
of them needs, swaps data without a word. It takes a loop with a ring, a collective that neither needs its result nor
shares its memory, and a schedule that puts the latter behind the former, such as keys and values that two layers share
and a ring of another layer, or the head's gradient and the backward loop over layers. Read in XLA's
backends/cpu/runtime: collective_thunk.cc, thunk_executor.cc (scheduling edges), while_thunk.cc, and in
service/rendezvous.h.

With channels of their own such a pair may run side by side: data are never mixed. So that this holds for what autodiff,
scans and rematerialisation make too, it is done where JAX lowers the primitive. What XLA's partitioner adds over
automatic axes has its own channels already. Only a function under its own `jax.jit` that is called twice in one program
is lowered once, and both calls have its channels: inside of a step, do not jit what exchanges data. There is no order:
a pair in flight may block twice as many of XLA's threads, of which there is one for each device. 4,500 runs of a
program like `tests/two_rings.py`, with four devices on two loaded cores, all ended.

Programs for GPUs are left as they are. There collectives go to one stream, which runs them one after the other in the
order of the schedule (openxla/xla pull request 17749), and the latency-hiding scheduler lets none overlap that share
more than one device, as their launches could wait for each other (19026, 47467).
"""

from __future__ import annotations

import warnings
from typing import Any

PRIMITIVES = frozenset(
    {"ppermute", "psum", "pmax", "pmin", "all_gather", "all_to_all", "ragged_all_to_all", "reduce_scatter"}
    | {"psum_invariant", "all_gather_invariant", "all_gather_reduced", "unreduced_psum", "unreduced_reduce_scatter"}
)
"""Names of JAX's collectives that XLA's CPU runtime has."""


def give_own_channels() -> None:
    """From here on, for every program that this process lowers for CPUs; done by whatever in cpjax exchanges data.

    JAX has no public way to choose a channel. Where what is used of its insides has changed, programs keep the one
    channel, and a warning says so.
    """
    try:
        from jax.interpreters import mlir
        from jaxlib.mlir.dialects import stablehlo

        rules = {prim: entry.rule for prim, entry in mlir._lowerings.items() if prim.name in PRIMITIVES}
        for prim, rule in rules.items():
            mlir.register_lowering(prim, _with_own_channel(rule, stablehlo), platform="cpu", cacheable=False)
    except (ImportError, AttributeError, TypeError) as error:
        warnings.warn(
            f"this JAX lowers collectives in a way that cpjax does not know ({error}): on CPUs, collectives that do "
            "not depend on each other may meet; use a version of JAX that cpjax is tested with",
            stacklevel=2,
        )


def _with_own_channel(rule: Any, stablehlo: Any) -> Any:
    """A lowering rule that does what `rule` does, on a channel that no other collective of the module has."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        results = rule(ctx, *operands, **params)
        for result in results:
            op = result.owner
            if getattr(op, "name", None) == "stablehlo.reshape":  # follows a reduce-scatter that is not tiled
                op = op.operands[0].owner
            # Among groups of one rank, there may be none: the operand is the result.
            if "channel_handle" in getattr(op, "attributes", ()):
                kind = stablehlo.ChannelHandle(op.attributes["channel_handle"]).channel_type
                handle = stablehlo.ChannelHandle.get(ctx.module_context.new_channel(), kind)
                op.attributes["channel_handle"] = handle
        return results

    return lower
