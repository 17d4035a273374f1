"""Plans: what is read off a compiled program, and what the ring compiles to for eight GPUs that are not here."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


LINES = """HloModule jit_f, is_scheduled=true, num_partitions={devices}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  {line}
  ROOT %out = f32[8,4]{{1,0}} copy(%p)
}}
"""


def sent(line, devices=8):
    """Kind and bytes of the one collective in a line of a program."""
    [collective] = find_collectives(LINES.format(line=line, devices=devices))
    return collective.kind, collective.bytes


COMPILED = {
    # jax 0.10.2, CPU
    "%a = f32[128,4]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, "
    "use_global_device_ids=true": ("all-gather", 128 * 4 * 4 // 2),
    "%a = f32[16,64]{1,0} all-gather(%p), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}": (
        "all-gather", 16 * 64 * 4 // 2),
    "%a = (f32[1,8,1,32]{3,2,1,0}, f32[1,8,1,32]{3,2,1,0}) all-to-all(%x, %y), channel_id=1, "
    "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}": ("all-to-all", 8 * 32 * 4),
    "%a = f32[64,64]{1,0} all-gather(%p), channel_id=1, replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, "
    "dimensions={0}": ("all-gather", 64 * 64 * 4 * 7 // 8),
    # jax 0.12.0, CPU
    "%a = (f32[1,8,1,32]{3,2,1,0}, f32[1,8,1,32]{3,2,1,0}) all-to-all(%x, %y), channel_id=1, "
    "replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}": ("all-to-all", 8 * 32 * 4),
    "%a = f32[64,4]{1,0} all-reduce(%p), channel_id=1, replica_groups=mesh['dp'=2,'cp'=2,'tp'=2] {'dp','cp','tp'}, "
    "use_global_device_ids=true, to_apply=%region_0.0": ("all-reduce", 2 * 64 * 4 * 4 * 7 // 8),
    # jax 0.12.0, H200
    "%a = ((f32[64,4]{1,0}), f32[8,4]{1,0}) reduce-scatter-start(%p), channel_id=1, replica_groups=mesh['cp'=8] "
    "{'cp'}, dimensions={0}, to_apply=%region_1.0": ("reduce-scatter", 8 * 4 * 4 * 7),
    "%a = ((f32[64,4]{1,0}), f32[64,4]{1,0}) all-to-all-start(%p), channel_id=1, replica_groups=mesh['cp'=4,'fsdp'=2] "
    "{'fsdp'}, dimensions={0}": ("all-to-all", 64 * 4 * 4 // 2),
    # as XLA's own tests write them
    "%a = bf16[4]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4,'c'=4,'d'=2], device_ids=([4,16]T(1,0)) "
    "{'a','b':(1)2,'d'}, dimensions={0}": ("all-gather", 4 * 2 * 7 // 8),
    "%a = bf16[4]{0} all-gather(%p), replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}, dimensions={0}": (
        "all-gather", 4),
    "%a = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%region_0.0": ("all-reduce", 2 * 32 * 7 // 8),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("line", COMPILED)
def test_bytes_of_lines_of_both_versions(line):
    assert sent(line) == COMPILED[line]


def test_numbers_of_any_width_and_scalars_count():
    def all_reduce(shape):
        return sent(f"%a = {shape} all-reduce(%p), replica_groups={{{{0,1}}}}, to_apply=%f")[1]

    widths = {"f8e4m3fn": 1, "pred": 1, "s4": 0.5, "bf16": 2, "u32": 4, "c128": 16, "f32": 4}
    assert {dtype: all_reduce(f"{dtype}[8,3]{{1,0}}") / 24 for dtype in widths} == widths
    assert all_reduce("f32[]") == 4 and all_reduce("(f32[2]{0}, bf16[])") == 10
    assert sent("%a = (s8[6], s8[6], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}")[1] == 6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%a = f32[8] all-reduce(%p), replica_groups=V9<0:8>, to_apply=%f", r"groups of devices .*V9<0:8>"),
        ("%a = f32[8] all-reduce(%p), replica_groups=mesh['a'=8] {'b'}, to_apply=%f", "groups of devices .* {'b'}"),
        ("%a = f32[8] all-reduce(%p), replica_groups=mesh['a'=8] 'a', to_apply=%f", "groups of devices .* 'a'"),
        ("%a = f32[8] all-gather(%p), dimensions={0}", "groups of devices"),
        ("%a = nvfp[8] all-reduce(%p), replica_groups={{0,1}}, to_apply=%f", "the data type nvfp is not known"),
        ("%a = f32[8] ragged-all-to-all(%p), replica_groups={{0,1}}", "what a ragged-all-to-all sends is not known"),
    ],
)
def test_what_is_not_known_is_an_error_and_not_nothing(line, words):
    with pytest.raises(ValueError, match=words):
        sent(line)


MESHES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 8)


@st.composite
def axes_of_meshes(draw):
    """Sizes of the axes of a mesh, and some of these axes."""
    sizes = draw(MESHES)
    return sizes, draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))


@given(axes_of_meshes(), st.sampled_from(["", ", device_ids=([2,4]T(1,0))", ", device_ids=(1,0)"]))
def test_all_ways_to_write_groups_say_the_same(chosen, order):
    sizes, axes = chosen
    devices, members = math.prod(sizes), math.prod(sizes[axis] for axis in axes)
    turned = [axis for axis in range(len(sizes)) if axis not in axes] + axes
    groups = np.arange(devices).reshape(sizes).transpose(turned).reshape(-1, members).tolist()
    listed = "},{".join(",".join(map(str, group)) for group in groups)
    extents, permutation = ",".join(map(str, sizes)), ",".join(map(str, turned))
    names = ",".join(f"'it\\'s {axis}'={size}" for axis, size in enumerate(sizes))
    whole = ",".join(f"'it\\'s {axis}'" for axis in axes)
    parts = ",".join(
        f"'a':({math.prod(sizes[:axis])}){sizes[axis]}" for axis in axes
    )  # of one axis that holds them all
    forms = [
        f"{{{{{listed}}}}}", f"[{devices // members},{members}]<=[{extents}]T({permutation})",
        f"mesh[{names}]{order} {{{whole}}}", f"mesh['a'={devices}]{order} {{{parts}}}",
    ]  # fmt: skip
    forms += ["{}"] if members == devices else []
    for form in forms:
        line = f"%a = s8[{members * 6}]{{0}} all-gather(%p), channel_id=1, replica_groups={form}, dimensions={{0}}"
        assert sent(line, devices) == ("all-gather", 6 * (members - 1)), form


@pytest.mark.quick
@settings(max_examples=8)
@given(axes_of_meshes(), st.sampled_from(["float32", "int8"]))
def test_collectives_of_compiled_programs_on_any_axes_of_a_mesh(chosen, dtype):
    sizes, axes = chosen
    names = tuple("abc"[: len(sizes)])
    over, members = tuple(names[axis] for axis in axes), math.prod(sizes[axis] for axis in axes)
    mesh = jax.make_mesh(sizes, names, devices=jax.devices()[: math.prod(sizes)])

    def f(x):
        each = jax.lax.psum(x, over), jax.lax.all_gather(x, over, tiled=True)
        each += jax.lax.psum_scatter(x, over, tiled=True), jax.lax.all_to_all(x, over, 0, 0, tiled=True)
        return tuple(array + x.dtype.type(n + 1) for n, array in enumerate(each))

    specs = {"in_specs": P(names), "out_specs": (P(names),) * 4}
    x = jax.ShapeDtypeStruct((24 * math.prod(sizes), 5), dtype, sharding=NamedSharding(mesh, P(names)))
    compiled = jax.jit(jax.shard_map(f, mesh=mesh, check_vma=False, **specs)).lower(x).compile()
    bytes_, others = 24 * 5 * np.dtype(dtype).itemsize, members - 1
    found = {(c.kind, c.bytes) for c in find_collectives(compiled.as_text()) if c.bytes}
    wanted = {
        ("all-reduce", 2 * bytes_ * others // members), ("all-gather", bytes_ * others),
        ("reduce-scatter", bytes_ * others // members), ("all-to-all", bytes_ * others // members),
    }  # fmt: skip
    assert found == (wanted if others else set())


def test_branches_of_a_conditional_count():
    text = HLO.replace(
        "%sum.1 = ", "%choice = f32[8,4]{1,0} conditional(%p, %p, %p), branch_computations={%x, %y}\n  %sum.1 = "
    )
    text = text.replace(
        "%condition (d",
        """%x (e: f32[8,4]) -> f32[8,4] {
  ROOT %e = f32[8,4]{1,0} parameter(0)
}

%y (e: f32[8,4]) -> f32[8,4] {
  %e = f32[8,4]{1,0} parameter(0)
  ROOT %g = f32[8,4]{1,0} all-to-all(%e), replica_groups={{0,1}}, dimensions={0}
}

%condition (d""",
    )
    assert set(find_collectives(text)) - set(find_collectives(HLO)) == {Collective("all-to-all", 1, 64, ())}


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
