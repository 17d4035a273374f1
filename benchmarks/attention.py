"""Time and memory of context-parallel attention, forward + backward, side by side in one run on one mesh.

    python benchmarks/attention.py                      # S = 4096, 8 heads x 64, float32, causal, cp = 4
    python benchmarks/attention.py --seq 8192 --kv-heads 2 --json out.json

Runs on as many GPUs as `--cp` if there are, else on virtual CPU devices. Only the ratios mean something. Contenders:

- cpjax: the ring under the zigzag and the contiguous layout, and the all-gather transport under zigzag;
- jax.nn.dot_product_attention, left to XLA's partitioner on the same mesh;
- the function of the `ringattention` package (`pip install --no-deps ringattention einops`; it needs flax too), with
  the best of several chunk sizes. The package does not import on current JAX, so the one module is loaded alone;
- torch's scaled_dot_product_attention on the CPU (if torch is installed), the whole problem with one process.

Every contender's output is compared with the dense one before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))


@dataclasses.dataclass
class Contender:
    """One way to compute output and gradients of the same problem."""

    name: str
    run: Callable[[], Any]  # computes and waits
    error: float  # largest difference of the output from the dense one
    temp_bytes: int | None = None  # per device
    seconds: list[float] = dataclasses.field(default_factory=list)


def main() -> None:
    args = _arguments()
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.cp}"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
        " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    )
    import jax
    import numpy as np

    shape = {"q": (args.heads, args.head_dim), "k": (args.kv_heads, args.head_dim)}
    shape |= {"v": shape["k"], "g": shape["q"]}
    rng = np.random.default_rng(0)
    host = {n: rng.normal(size=(args.batch, args.seq, *s)).astype(np.float32) for n, s in shape.items()}
    dense = np.asarray(
        jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))(host["q"], host["k"], host["v"])
    )

    contenders = _cpjax(args, host, dense)
    contenders += [_jax_nn(args, host, dense), *_ringattention(args, host, dense), *_torch(host, dense)]
    for _ in range(args.repeats):
        for contender in contenders:
            start = time.perf_counter()
            contender.run()
            contender.seconds.append(time.perf_counter() - start)

    print(
        f"attention forward + backward: B={args.batch} S={args.seq} H={args.heads} K={args.kv_heads} D={args.head_dim} "
        f"float32 causal, cp={args.cp}, {_devices(args.cp)[0].platform}, jax {jax.__version__}, "
        f"median of {args.repeats}"
    )
    medians = [statistics.median(c.seconds) for c in contenders]
    print(f"{'':42}{'ms':>9}{'ratio':>8}{'temp MiB/device':>17}{'max error':>11}")
    for contender, median in zip(contenders, medians, strict=True):
        temp = "-" if contender.temp_bytes is None else f"{contender.temp_bytes / 2**20:.1f}"
        print(f"{contender.name:42}{median * 1e3:9.1f}{median / medians[0]:8.2f}{temp:>17}{contender.error:11.1e}")
    if args.json:
        rows = [
            {"name": c.name, "seconds": m, "ratio": m / medians[0], "temp_bytes": c.temp_bytes, "max_error": c.error}
            for c, m in zip(contenders, medians, strict=True)
        ]
        record = {"problem": {k: v for k, v in vars(args).items() if k != "json"}, "jax": jax.__version__}
        args.json.write_text(json.dumps({**record, "contenders": rows}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096, help="global length, a multiple of 2 x cp")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: heads; ringattention takes no other")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, help="also write the table to this file")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    if args.seq % (2 * args.cp):
        parser.error(f"--seq {args.seq} must be a multiple of 2 x cp = {2 * args.cp}")
    return args


def _devices(cp: int) -> Any:
    import jax

    return (jax.devices() if jax.device_count() >= cp else jax.devices("cpu"))[:cp]


def _on_mesh(
    name: str,
    args: Any,
    host: Any,
    dense: Any,
    function: Any,
    order: Any = None,
    *,
    manual: bool = True,
    check_vma: bool = True,
) -> Contender:
    """A contender `function(q, k, v)`: in shard_map on local [B, L, ...], or (not manual) left to the partitioner.

    `order` says which token each slot of the sharded sequence holds.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((args.cp,), ("cp",), devices=_devices(args.cp), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, "cp")
    if manual:
        function = jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"}, check_vma=check_vma
        )
    order = np.arange(args.seq) if order is None else order
    operands = [jax.device_put(host[n][:, order], NamedSharding(mesh, spec)) for n in ("q", "k", "v", "g")]

    def output_and_gradients(q, k, v, g):
        output, pull = jax.vjp(function, q, k, v)
        return output, pull(g)

    compiled = jax.jit(output_and_gradients).lower(*operands).compile()
    output, _ = jax.block_until_ready(compiled(*operands))
    error = float(np.abs(np.asarray(output) - dense[:, order]).max())
    memory = compiled.memory_analysis()
    temp = None if memory is None else memory.temp_size_in_bytes
    return Contender(name, lambda: jax.block_until_ready(compiled(*operands)), error, temp)


def _cpjax(args: Any, host: Any, dense: Any) -> list[Contender]:
    import numpy as np

    from cpjax.attention import Mask, attention
    from cpjax.shard import layout_from_name, make_sharder

    result = []
    for transport, name in (("ring", "zigzag"), ("ring", "contiguous"), ("allgather", "zigzag")):
        layout = layout_from_name(name, args.cp)
        sharder = make_sharder(args.seq, layout)
        function = functools.partial(attention, sharder=sharder, mask=Mask(causal=True), transport=transport)
        order = layout.indices(args.seq, np.arange(args.cp)).reshape(-1)
        result.append(_on_mesh(f"cpjax {transport}, {name}", args, host, dense, function, order))
    return result


def _jax_nn(args: Any, host: Any, dense: Any) -> Contender:
    import jax

    function = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return _on_mesh("jax.nn.dot_product_attention", args, host, dense, function, manual=False)


def _ringattention(args: Any, host: Any, dense: Any) -> list[Contender]:
    """The best setting of the package's function; nothing, with a line that says why, if it cannot run."""
    import jax

    spec = importlib.util.find_spec("ringattention")
    if spec is None or spec.origin is None:
        print("ringattention is not installed and left out: pip install --no-deps ringattention einops")
        return []
    if args.kv_heads != args.heads:
        print("ringattention is left out: it needs as many key heads as query heads")
        return []
    path = pathlib.Path(spec.origin).with_name("ringattention_jax.py")
    module_spec = importlib.util.spec_from_file_location("ringattention_jax", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)

    local = args.seq // args.cp
    best: Contender | None = None
    for chunk in [c for c in (128, 256, 512, 1024, 2048) if local % c == 0]:
        settings = {
            "causal_block_size": 1, "query_chunk_size": chunk, "key_chunk_size": chunk, "deterministic": True,
            "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jax.numpy.float32, "precision": None,
            "policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": False,
        }  # fmt: skip

        def function(q, k, v, settings=settings):
            return module.ring_attention(q, k, v, None, None, None, "cp", True, settings)

        name = f"ringattention, chunks of {chunk}"
        contender = _on_mesh(name, args, host, dense, function, check_vma=False)
        for _ in range(3):
            start = time.perf_counter()
            contender.run()
            contender.seconds.append(time.perf_counter() - start)
        if best is None or min(contender.seconds) < min(best.seconds):
            best = contender
    if best is None:
        print(f"ringattention is left out: its chunks do not divide the {local} tokens of a rank")
        return []
    best.seconds.clear()
    return [best]


def _torch(host: Any, dense: Any) -> list[Contender]:
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed and left out")
        return []
    import numpy as np
    import torch

    q, k, v, g = (torch.from_numpy(host[n]).transpose(1, 2).contiguous() for n in ("q", "k", "v", "g"))
    for x in (q, k, v):
        x.requires_grad_()

    def run() -> Any:
        for x in (q, k, v):
            x.grad = None
        gqa = q.shape[1] != k.shape[1]
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        output.backward(g)
        return output

    error = float(np.abs(run().detach().transpose(1, 2).numpy() - dense).max())
    return [Contender(f"torch SDPA on the CPU, {torch.get_num_threads()} threads", run, error)]


if __name__ == "__main__":
    main()
