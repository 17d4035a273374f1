"""What a program will take on GPUs that are not there: `python -m cpjax.plan --help`.

XLA compiles for a described GPU topology through the CUDA plugin, with no GPU and no driver (the extra `plan` installs
it). The compiled, scheduled program then tells the memory of each device, every collective with its bytes, and the
computation that runs while it is under way. It tells no time: a collective with computation beside it may still be the
slower of the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX offers the CUDA compiler without a GPU only then

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention
from cpjax.mesh import automatic_mesh, compiler_options
from cpjax.shard import layout_from_name, make_sharder


class Gpu(NamedTuple):
    """A GPU to compile for: its name, bytes of memory, bytes per second that its memory and its NVLink move."""

    name: str
    memory: int
    bandwidth: int
    link: int


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000, 450_000_000_000),
    "h200": Gpu("NVIDIA H200", 151_397_597_184, 4_800_000_000_000, 450_000_000_000),
}
"""The GPUs that `gpu_mesh` knows; links are counted one way."""

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 minor: 0 }}
  device_memory_size: {memory} memory_bandwidth: {bandwidth}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{name}"
"""


def gpu_mesh(axes: Mapping[str, int], *, gpu: str = "h200", hosts: int = 1) -> Mesh:
    """A mesh of GPUs that programs can be compiled for, and not run on.

    Args:
        axes: size of each mesh axis, outermost first; devices are numbered host by host.
        gpu: "h100" or "h200".
        hosts: number of machines, over which the devices are split evenly.

    Raises:
        ValueError: an unknown GPU, devices that the hosts do not divide, or no CUDA plugin that compiles without a GPU.
    """
    if gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}: choose one of {', '.join(GPUS)}")
    if min(hosts, *axes.values()) < 1:
        raise ValueError(f"a mesh of {dict(axes)} on {hosts} hosts was asked for: all must be at least 1")
    devices = math.prod(axes.values())
    if devices % hosts:
        raise ValueError(f"{devices} devices cannot be split over {hosts} hosts: make them a multiple")
    name, memory, bandwidth, _ = GPUS[gpu]
    target = _TARGET.format(name=name, memory=memory, bandwidth=bandwidth)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=f"1x{hosts}x{devices // hosts}"
        )
    except (NotImplementedError, RuntimeError) as error:  # which one depends on the version of JAX
        raise ValueError(
            "JAX cannot compile for GPUs here: install the extra, in a clone by pip install '.[plan]', and "
            f"set JAX_PLATFORMS=cpu before JAX is imported ({str(error).splitlines()[0]})"
        ) from None
    return automatic_mesh(np.array(topology.devices).reshape(tuple(axes.values())), tuple(axes))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
        kind: "collective-permute", "all-gather", "all-reduce", "reduce-scatter" or "all-to-all".
        times: how often it runs in a step.
        bytes: what one device sends each time; ring algorithms are assumed for gathers and reductions.
        beside: the matrix products, kernels and loops of them that run between its start and its end; none: the
            devices wait for it.
    """

    kind: str
    times: int
    bytes: int
    beside: tuple[str, ...]

    def __str__(self) -> str:
        beside = ", ".join(self.beside) or "EXPOSED"
        return f"{self.kind:<18} {self.times:>4} x {self.bytes / 2**20:>9.2f} MiB   {beside}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled program takes on one device.

    Attributes:
        memory: bytes by kind: arguments, outputs, temporaries, peak and host.
        collectives: in the order of the program's text.
        available: bytes of memory of the device.
    """

    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    available: int

    @property
    def fits(self) -> bool:
        """Whether the peak is at most what the device has; XLA itself does not refuse more."""
        return self.memory["peak"] <= self.available

    @property
    def sent(self) -> int:
        """Bytes that one device sends in a step."""
        return sum(c.times * c.bytes for c in self.collectives)

    def __str__(self) -> str:
        sizes = "   ".join(f"{kind} {size / 2**20:,.1f}" for kind, size in self.memory.items())
        verdict = "fits" if self.fits else "DOES NOT FIT"
        lines = [f"memory per device, MiB:   {sizes}   ({verdict} in {self.available / 2**20:,.0f})"]
        lines += [f"sent per device and step: {self.sent / 2**20:,.1f} MiB"]
        return "\n".join([*lines, *(f"  {collective}" for collective in self.collectives)])


def analyse(compiled: jax.stages.Compiled, gpu: str = "h200") -> Report:
    """The report of a program that was compiled for `gpu_mesh(...)`.

    >>> compiled = jax.jit(step).lower(*shapes).compile()   # ShapeDtypeStructs with shardings on the mesh
    >>> print(analyse(compiled))
    """
    stats: Any = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes - stats.alias_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
    memory["peak"] = sum(memory.values())
    memory["host"] = stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes
    return Report(memory, tuple(find_collectives(compiled.as_text() or "")), GPUS[gpu].memory)


_KINDS = "collective-permute|all-gather|all-reduce|reduce-scatter|all-to-all"
_OTHERS = "collective-broadcast|ragged-all-to-all"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    op: str
    rest: str

    @property
    def calls(self) -> list[str]:
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)  # of a conditional all are counted
        return re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", self.rest) + re.findall(
            r"%?([\w.-]+)", branches[1] if branches else ""
        )


def find_collectives(text: str) -> list[Collective]:
    """The collectives of a scheduled HLO module, whose instructions are in the order of execution.

    Raises:
        ValueError: a collective whose bytes cannot be told: of a kind, a data type or groups that are not known here.
    """
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    computations, entry = _parse(text)
    times = {entry: 1}
    for name in _callers_first(computations, entry):
        for instruction in computations[name]:
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.rest)
            for called in instruction.calls:
                times[called] = times.get(called, 0) + times[name] * (int(trips[1]) if trips else 1)
    heavy = {name for name in computations if _is_heavy(name, computations)}

    wrapped = {called for all_ in computations.values() for i in all_ if i.op == "async-start" for called in i.calls}
    found = []
    for name, instructions in computations.items():
        if name not in times or name in wrapped:
            continue
        for position, start in enumerate(instructions):
            collective = _collective(start, computations)
            if collective is None:
                continue
            done = next((i for i in range(position, len(instructions)) if _ends(instructions[i], start)), position)
            beside = tuple(
                _label(other)
                for other in instructions[position + 1 : done]
                if _does_work(other, heavy) and _collective(other, computations) is None
            )
            found.append(Collective(_kind(collective), times[name], _bytes_sent(collective, devices), beside))
    return found


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%(\S+) \(.*\{\s*$", line):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            computations[current].append(_Instruction(*found.groups()))
    return computations, entry


def _callers_first(computations: dict[str, list[_Instruction]], entry: str) -> list[str]:
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order or name not in computations:
            return
        for instruction in computations[name]:
            for called in instruction.calls:
                visit(called)
        order.append(name)

    visit(entry)
    return order[::-1]


def _is_heavy(name: str, computations: dict[str, list[_Instruction]]) -> bool:
    """Whether a computation holds a matrix product, a convolution or a kernel, by itself or in what it calls."""
    return any(
        instruction.op in ("dot", "convolution", "custom-call")
        or any(_is_heavy(called, computations) for called in instruction.calls if called in computations)
        for instruction in computations.get(name, ())
    )


def _does_work(instruction: _Instruction, heavy: set[str]) -> bool:
    return instruction.op in ("dot", "convolution", "custom-call") or any(c in heavy for c in instruction.calls)


def _collective(instruction: _Instruction, computations: dict[str, list[_Instruction]]) -> _Instruction | None:
    """The collective that an instruction is, or starts; None for others."""
    if re.fullmatch(rf"({_OTHERS})(-start)?", instruction.op):
        raise ValueError(f"what a {instruction.op} sends is not known here: {_said(instruction)}")
    if re.fullmatch(rf"({_KINDS})(-start)?", instruction.op):
        return instruction
    if instruction.op == "async-start":
        inside = [other for called in instruction.calls for other in computations.get(called, ())]
        return next((other for other in inside if re.fullmatch(_KINDS, other.op)), None)
    return None


def _kind(collective: _Instruction) -> str:
    return collective.op.removesuffix("-start")


def _ends(instruction: _Instruction, start: _Instruction) -> bool:
    return instruction.op.endswith("-done") and f"%{start.name})" in instruction.rest


def _label(instruction: _Instruction) -> str:
    if target := re.search(r'custom_call_target="([^"]+)"', instruction.rest):
        return target[1]
    return f"{instruction.op} {instruction.name}"


def _said(instruction: _Instruction) -> str:
    """The beginning of its line in the program's text."""
    return f"%{instruction.name} = {instruction.shape} {instruction.op}({instruction.rest}"[:300]


def _bytes_sent(collective: _Instruction, devices: int) -> int:
    """What one member of the group sends; several arrays may go in one collective."""
    shape, started = collective.shape, collective.op.endswith("-start")
    if _kind(collective) == "collective-permute":
        shape = re.sub(r"(, u32\[\]){2}\)$", ")", shape)  # handles that some backends add
    total = sum(
        math.prod(int(size) for size in dimensions.split(",") if size) * _bits(dtype, collective)
        for dtype, dimensions in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    )  # of a start, operands and results, but for all-reduce; of the others results alone
    if _kind(collective) == "collective-permute":
        return total // (16 if started else 8)
    members = _members(collective, devices)
    others = members - 1
    share = {  # of the total
        "all-gather": others / members,
        "all-gather-start": others / (members + 1),
        "reduce-scatter": others,
        "reduce-scatter-start": others / (members + 1),
        "all-reduce": 2 * others / members,
        "all-reduce-start": 2 * others / members,
        "all-to-all": others / members,
        "all-to-all-start": others / members / 2,
    }[collective.op]
    return round(total * share / 8)


def _bits(dtype: str, collective: _Instruction) -> int:
    """Of a number: the type's name begins with them, as in bf16, s8 or f8e4m3fn."""
    if dtype == "pred":
        return 8
    bits = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    if bits is None:
        raise ValueError(f"the data type {dtype} is not known here: {_said(collective)}")
    return int(bits[1])


_AXIS = r"'((?:[^'\\]|\\.)*)'"
_MESH = re.compile(
    rf"mesh\[((?:{_AXIS}=\d+,?)*)\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? \{{((?:{_AXIS}(?::\(\d+\)\d+)?,?)+)\}}"
)


def _members(collective: _Instruction, devices: int) -> int:
    """How many devices exchange something with each other, of all those of the program.

    XLA lists the groups, as `{{0,1},{2,3}}` or `{}` for one of all devices; counts off groups of one size, as
    `[4,2]<=[2,4]T(1,0)`; or names the mesh axes that a group extends over, as `mesh['a'=2,'b'=8] {'a','b':(2)4}`, where
    4 is the size of a part of the axis b.

    Raises:
        ValueError: groups in none of these forms.
    """
    text = collective.rest.partition("replica_groups=")[2]
    if re.match(r"\{\}", text):
        return devices
    if listed := re.match(r"\{(\{\d+(?:,\d+)*\}(?:,\{\d+(?:,\d+)*\})*)\}", text):
        return max(len(group.split(",")) for group in listed[1].split("},"))
    if counted := re.match(r"\[\d+,(\d+)\]<=\[", text):
        return int(counted[1])
    if named := _MESH.match(text):
        sizes = {name: int(size) for name, size in re.findall(rf"{_AXIS}=(\d+)", named[1])}
        axes = re.findall(rf"{_AXIS}(?::\(\d+\)(\d+))?", named[3])
        if all(name in sizes for name, _ in axes):
            return math.prod(int(part) if part else sizes[name] for name, part in axes)
    groups = text[:100] or "none"
    raise ValueError(f"groups of devices are not known here as they are written, {groups}: {_said(collective)}")


def main() -> int:
    """The command line: plans the forward and backward pass of attention on a GPU topology."""
    parser = argparse.ArgumentParser(prog="python -m cpjax.plan", description=__doc__)
    parser.add_argument("--length", type=int, default=131_072, help="tokens of the sequence (default: 131072)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key and value heads (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="width of a head (default: 128)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--cp", type=int, default=8, help="devices that the sequence is split over (default: 8)")
    parser.add_argument("--hosts", type=int, default=1, help="machines that hold them (default: 1)")
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS))
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "striped", "zigzag"])
    parser.add_argument("--transport", default="ring")
    options = parser.parse_args()
    try:
        for name, report in plan_attention(**vars(options)).items():
            print(f"{name}\n{report}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def plan_attention(
    *,
    length: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    cp: int,
    hosts: int,
    gpu: str,
    layout: str,
    transport: str,
) -> dict[str, Report]:
    """Reports of causal attention, "forward" and "forward and backward"; the arguments are those of the command line.

    Raises:
        ValueError: arguments that do not fit each other, or as `gpu_mesh` raises.
    """
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    if small := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
        raise ValueError(f"attention with {', '.join(small)} was asked for: all must be at least 1")
    mesh = gpu_mesh({"cp": cp}, gpu=gpu, hosts=hosts)
    sharder = make_sharder(length, layout_from_name(layout, cp))

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, sharder=sharder, mask=Mask(causal=True), transport=transport)

    over_cp = jax.shard_map(forward, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"), axis_names={"cp"})

    def both(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> Any:
        return jax.vjp(over_cp, q, k, v)[1](grad)

    def shape(heads: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P(None, "cp"))
        return jax.ShapeDtypeStruct(
            (batch, sharder.padded_length, heads, head_dim), jnp.dtype(dtype), sharding=sharding
        )

    q, kv, options = shape(heads), shape(kv_heads), compiler_options(mesh)
    return {
        "forward": analyse(jax.jit(over_cp, compiler_options=options).lower(q, kv, kv).compile(), gpu),
        "forward and backward": analyse(jax.jit(both, compiler_options=options).lower(q, kv, kv, q).compile(), gpu),
    }


if __name__ == "__main__":
    sys.exit(main())
