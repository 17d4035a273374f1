"""Collectives on CPUs have channels of their own, whatever made them (see `cpjax.channels`)."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cpjax import channels
from cpjax.exchange import permute
from cpjax.mesh import make_mesh

from .rendezvous import unordered


def handles(text):
    """Of all collectives of a lowered program."""
    return re.findall(r"channel_handle<handle = (\d+)", text)


def every_kind(x, w):
    """Each kind of collective, also in a rematerialised layer of a scan: x [2, 4], w [2, 4] of this rank -> []."""

    def layer(x, _):
        return permute(jnp.sin(x @ lax.all_gather(w, "cp", tiled=True)), "cp", 2, 1), None

    x, _ = lax.scan(jax.checkpoint(layer), x, None, length=3)
    x = x + lax.all_to_all(x, "cp", 0, 0) + lax.psum_scatter(lax.all_gather(x, "cp"), "cp")
    x = x + lax.pmax(lax.stop_gradient(x), "cp")
    return lax.psum((x + permute(x, "cp", 2, 1)).sum(), "cp")


def differentiated(mesh):
    run = jax.shard_map(every_kind, mesh=mesh, in_specs=(P("cp"), P("cp")), out_specs=P(), axis_names={"cp"})
    return jax.jit(jax.grad(run, (0, 1)))


@pytest.mark.quick
def test_every_collective_has_a_channel_of_its_own():
    """Those that autodiff makes, too, and those of a mesh with automatic axes."""
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    for mesh in make_mesh(cp=2), make_mesh(fsdp=2, cp=2):
        lowered = differentiated(mesh).lower(x, x)
        found = handles(lowered.as_text())
        assert len(found) > 8 and len(set(found)) == len(found)
        again = differentiated(mesh).lower(x, x)
        assert again.as_text() == lowered.as_text()  # or no program would be found in the compilation cache


def test_programs_for_other_devices_stay_as_they_are():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    exported = jax.export.export(differentiated(make_mesh(cp=2)), platforms=["cuda"])(x, x)
    assert set(handles(exported.mlir_module())) == {"1"}


def test_what_cannot_be_changed_is_said(monkeypatch):
    from jax.interpreters import mlir

    monkeypatch.delattr(mlir, "_lowerings")
    with pytest.warns(UserWarning, match="may meet; use a version of JAX that cpjax is tested with"):
        channels.give_own_channels()


@pytest.mark.quick
def test_two_that_do_not_need_each_other_do_not_meet():
    """100 runs of a program that aborts with jax 0.10 where all collectives have one channel."""
    root = pathlib.Path(__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.two_rings"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout.split() == ["equal"], run.stderr[-2000:]


@pytest.mark.parametrize(
    ("operands", "pairs"),
    [("%x", [("loop", "after")]), ("%y", [])],
)
def test_pairs_without_an_order_are_found(operands, pairs):
    text = f"""HloModule m

%body (p: f32[2]) -> f32[2] {{
  %p = f32[2]{{0}} parameter(0)
  ROOT %inside = f32[2]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={{{{0,1}}}}
}}

%condition (p: f32[2]) -> pred[] {{
  %p.1 = f32[2]{{0}} parameter(0)
  ROOT %c = pred[] constant(true)
}}

ENTRY %main (x: f32[2]) -> f32[2] {{
  %x = f32[2]{{0}} parameter(0)
  %before = f32[2]{{0}} collective-permute(%x), channel_id=2, source_target_pairs={{{{0,1}}}}
  %loop = f32[2]{{0}} while(%x), condition=%condition, body=%body
  %y = f32[2]{{0}} add(%loop, %before)
  ROOT %after = f32[2]{{0}} collective-permute({operands}), channel_id=1, source_target_pairs={{{{0,1}}}}
}}
"""
    assert unordered(text) == pairs
    assert unordered(text, by_channel=False) == [("before", "loop"), *pairs]
