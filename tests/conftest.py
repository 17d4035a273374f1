"""Eight virtual CPU devices, a quick compiler and a persistent compilation cache for every test."""

import gc
import os
import pathlib

from tests.fast import FLAGS

# XLA's CPU collectives abort when a rank arrives late; eight ranks on two cores do.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    " --xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update(
    "jax_compilation_cache_dir",
    str(pathlib.Path(__file__).parent.parent / ".cache" / f"jax-{jax.__version__}"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

gc.set_threshold(100_000, 20, 20)  # tracing makes many objects that stay; to look at them took a fifth of its time

hypothesis.settings.register_profile("cpjax", deadline=None)  # the first example compiles
hypothesis.settings.load_profile("cpjax")


LONGEST = (
    "test_run", "test_capabilities", "test_qwen3_5_cp", "test_step", "test_processes", "test_gemma4_parity",
    "test_walkthrough", "test_benchmarks", "test_qwen3_5_layouts", "test_equal_dense", "test_notebooks", "test_check",
)  # fmt: skip
"""Files that take long, the longest first: one that starts last keeps all workers but one waiting."""


def pytest_collection_modifyitems(items):
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 20_000
"""Of the 65,530 that Linux allows a process (vm.max_map_count); the largest tests add some thousands."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Drops compiled programs while the process may still map memory.

    Each program that XLA compiles for CPUs keeps some twenty mappings, and a worker compiles thousands. When no more
    are allowed, LLVM says "Cannot allocate memory" and XLA then dies by a segmentation fault: in the compiler, or
    wherever the program is first touched, such as where it is serialised for the cache.
    """
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
