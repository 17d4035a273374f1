"""Plans: what is read off a compiled program, and what the ring compiles to for eight GPUs that are not here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention
from cpjax.mesh import compiler_options
from cpjax.plan import Collective, Report, analyse, find_collectives, gpu_mesh, plan_attention
from cpjax.shard import Zigzag, make_sharder

# JAX caches such programs, and cannot read them back.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry:UserWarning")

HLO = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%fused_add (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %sum = f32[8,4]{1,0} add(%a, %a)
}

%gemm (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (c: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %c = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%c), index=1
  %permute-start = (f32[8,4]{1,0}, f32[8,4]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %light = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%fused_add
  %heavy = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%gemm
  %permute-done = f32[8,4]{1,0} collective-permute-done(%permute-start)
  %late-start = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %light.2 = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%fused_add
  %late-done = f32[32,4]{1,0} all-gather-done(%late-start)
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%c, %permute-done)
}

%condition (d: (s32[], f32[8,4])) -> pred[] {
  %d = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%d, %d), direction=LT
}

%scatter (e: f32[8,4]) -> f32[2,4] {
  %e = f32[8,4]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[2,4]{1,0} reduce-scatter(%e), replica_groups=[2,4]<=[8], dimensions={0}
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %loop = (s32[], f32[8,4]{1,0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %scatter-start = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%p), calls=%scatter
  %kernel = f32[8,4]{1,0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"
  %scatter-done = f32[2,4]{1,0} async-done(%scatter-start)
  %sum.1 = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%fused_add
  ROOT %out = f32[8,4]{1,0} copy(%p)
}
"""  # noqa: E501


def test_collectives_their_times_bytes_and_what_runs_beside_them():
    assert set(find_collectives(HLO)) == {
        Collective("collective-permute", 7, 8 * 4 * 4, ("fusion heavy",)),
        Collective("all-gather", 7, 32 * 4 * 4 * 3 // 4, ()),  # only an addition beside it
        Collective("reduce-scatter", 1, 8 * 4 * 4 * 3 // 4, ("__cudnn$fmhaSoftmax",)),
        Collective("all-reduce", 1, 2 * 8 * 4 * 4 // 2, ()),
    }


def test_a_report_says_what_is_exposed_and_what_does_not_fit():
    collectives = (Collective("all-gather", 2, 3 << 20, ()), Collective("all-reduce", 1, 1 << 20, ("while loop",)))
    report = Report({"arguments": 1 << 30, "peak": 3 << 30}, collectives, available=2 << 30)
    assert report.sent == 7 << 20 and not report.fits
    assert "DOES NOT FIT in 2,048" in str(report) and "EXPOSED" in str(report) and "while loop" in str(report)


def test_gpus_that_cannot_be_planned_for_are_refused():
    with pytest.raises(ValueError, match="unknown GPU 'h900'"):
        gpu_mesh({"cp": 8}, gpu="h900")
    with pytest.raises(ValueError, match="8 devices cannot be split over 3 hosts"):
        gpu_mesh({"cp": 8}, hosts=3)
    for hosts, cp in ((0, 8), (1, 0), (1, -2)):
        with pytest.raises(ValueError, match="all must be at least 1"):
            gpu_mesh({"cp": cp}, hosts=hosts)
    with pytest.raises(ValueError, match="batch 0 was asked for"):
        plan_attention(length=64, cp=8, hosts=1, **ATTENTION | {"batch": 0})


def test_a_cpu_mesh_has_no_options():
    assert compiler_options(jax.make_mesh((2,), ("cp",))) == {}


@pytest.fixture
def gpus():
    try:
        return gpu_mesh({"cp": 8})
    except ValueError as error:
        pytest.skip(str(error))


ATTENTION = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "gpu": "h200",
             "layout": "zigzag", "transport": "ring"}  # fmt: skip


@pytest.mark.parametrize(("hosts", "cp"), [(1, 8), (2, 16)])
def test_every_permute_of_the_ring_is_hidden(gpus, hosts, cp):
    length = 1024 * cp
    reports = plan_attention(length=length, cp=cp, hosts=hosts, **ATTENTION)
    kv = 1024 * 2 * (64 + 64) * 2
    forward, both = (reports[name].collectives for name in ("forward", "forward and backward"))
    assert [(c.times, c.bytes) for c in forward] == [(cp - 1, kv)] and forward[0].beside
    assert not [c for c in both if not c.beside]
    # Backward: kv before the loop, kv and the float32 gradients in it.
    assert reports["forward and backward"].sent - reports["forward"].sent == cp * kv + (cp - 1) * 2 * kv


def test_a_permute_that_is_waited_for_is_exposed(gpus):
    def f(x):
        for _ in range(2):
            x = jax.lax.ppermute(x, "cp", [(r, (r + 1) % 8) for r in range(8)])
            x = x @ x
        return x

    sharding = NamedSharding(gpus, P("cp"))
    x = jax.ShapeDtypeStruct((8 * 256, 256), jnp.bfloat16, sharding=sharding)
    compiled = jax.jit(jax.shard_map(f, mesh=gpus, in_specs=P("cp"), out_specs=P("cp"))).lower(x).compile()
    report = analyse(compiled)
    assert [(c.kind, c.bytes, c.beside) for c in report.collectives] == 2 * [("collective-permute", 256 * 256 * 2, ())]
    assert report.memory["arguments"] == 256 * 256 * 2 and report.fits


@pytest.mark.parametrize(("dtype", "width", "streams"), [("bfloat16", 256, False), ("float32", 128, True)])
def test_kernels_fit_the_chip_and_split_rows_and_heads(gpus, dtype, width, streams):
    """The widest heads that the kernels take compile for an H200, and beside a ring of two ranks nothing is sent."""
    mesh = gpu_mesh({"dp": 2, "cp": 2, "tp": 2})
    sharder = make_sharder(256, Zigzag(2))

    def local(q, k, v, ids):
        groups = ids % 3 if streams else None
        mask = Mask(document_ids=ids if streams else None, vision_group_ids=groups, window=(90, None))
        return attention(q, k, v, sharder=sharder, mask=mask, softcap=5.0 if streams else None)

    def loss(*args):
        over_cp = jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"), axis_names={"cp"})
        return over_cp(*args).astype(jnp.float32).sum()

    def shape(heads):
        sharding = NamedSharding(mesh, P("dp", "cp", "tp"))
        return jax.ShapeDtypeStruct((2, 256, heads, width), dtype, sharding=sharding)

    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=NamedSharding(mesh, P("dp", "cp")))
    args = shape(4), shape(2), shape(2), ids
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile()
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 6  # at home and after the hop
    assert {c.kind for c in find_collectives(compiled.as_text())} == {"collective-permute"}


def test_kernels_lower_in_rematerialised_layers_beside_other_axes(gpus):
    mesh = gpu_mesh({"dp": 2, "cp": 2, "tp": 2})
    sharder = make_sharder(256, Zigzag(2))

    def local(x):
        @jax.checkpoint
        def layer(x, _):
            return x + attention(x, x, x, sharder=sharder, mask=Mask()), None

        return jax.lax.scan(layer, x, length=2)[0]

    def loss(x):
        over_cp = jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"), axis_names={"cp"})
        return over_cp(x).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16", sharding=NamedSharding(mesh, P("dp", "cp", "tp")))
    assert "attention_dkv_kernel" in jax.jit(jax.grad(loss)).lower(x).as_text()
