"""Which collectives of a compiled program for CPUs could meet that should not."""

import itertools
import re

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all")


def unordered(text: str, by_channel: bool = True) -> list[tuple[str, str]]:
    """Pairs of instructions that use collectives of one kind and channel, and of which none needs the other's result.

    Only where one of them is a loop or another call: of plain ones in one computation XLA starts each after the end of
    the one before (see `cpjax.channels`).

    Args:
        text: of a compiled module.
        by_channel: False: as if all had the same channel.
    """
    computations = {}
    for name, body in re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^}", text, re.M | re.S):
        computations[name] = re.findall(r"^ +(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)$", body, re.M)

    uses: dict[str, set[tuple[str, str]]] = {}

    def used(computation):
        """(kind, channel) of all collectives in it and in what it calls."""
        if computation not in uses:
            uses[computation] = set().union(*map(meets, computations[computation]))
        return uses[computation]

    def meets(instruction):
        _, opcode, rest = instruction
        if opcode in COLLECTIVES:
            channel = re.search(r"channel_id=(\d+)", rest)
            return {(opcode, channel[1] if channel and by_channel else "")}
        called = re.findall(r"%(\S+?)[,} ]", rest.partition("), ")[2] + " ")
        return set().union(*(used(name) for name in called if name in computations))

    found = []
    for instructions in computations.values():
        needs: dict[str, int] = {}  # one bit for each instruction that exchanges something
        exchanging: list[tuple[str, str, set[tuple[str, str]]]] = []
        for name, opcode, rest in instructions:
            needs[name] = 0
            for operand in re.findall(r"%([\w.-]+)", rest.partition("), ")[0]):
                needs[name] |= needs.get(operand, 0)
            if met := meets((name, opcode, rest)):
                needs[name] |= 1 << len(exchanging)
                exchanging.append((name, opcode, met))
        for (i, (a, kind_a, met_a)), (_, (b, kind_b, met_b)) in itertools.combinations(enumerate(exchanging), 2):
            if {kind_a, kind_b} - set(COLLECTIVES) and met_a & met_b and not needs[b] >> i & 1:
                found.append((a, b))
    return found
