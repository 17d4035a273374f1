"""Adapters: PEFT's numbers and files, merging, what is refused, and gradients under recomputation and sharding."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from cpjax.loss import cross_entropy
from cpjax.mesh import make_mesh
from cpjax.models import from_pretrained, hf_names
from cpjax.models.common.layers import Linear
from cpjax.models.qwen3_5 import STREAMS, prepare
from cpjax.shard import IGNORE, Identity, layout_from_name, make_batch, make_sharder
from cpjax.train.config import LoraConfig
from cpjax.train.dropout import draw_anew, start_dropout
from cpjax.train.lora import (
    Adapter,
    add_adapters,
    load_adapter,
    merge,
    merge_adapters,
    save_adapter,
    weight_table,
)
from cpjax.train.step import merge_model, split_model
from tests.models.qwen3_5_cases import FOLDER, GOLDENS, golden, golden_rows

from . import small

KINDS = {
    "lora": LoraConfig(rank=4, alpha=8, targets=["q_proj", "down_proj", "in_proj_qkv", r"attn\.qkv"]),
    "dora": LoraConfig(rank=2, alpha=6, rslora=True, dora=True, targets=["k_proj", "gate_proj"]),
}


def adapter_folder(kind):
    return GOLDENS / f"qwen3_5-{kind}"


def adapted(kind):
    """The golden model with the adapter that PEFT has saved."""
    model = from_pretrained(FOLDER)
    found = load_adapter(model, adapter_folder(kind))
    assert (found.rank, found.alpha, found.rslora, found.dora) == (
        KINDS[kind].rank, KINDS[kind].alpha, KINDS[kind].rslora, KINDS[kind].dora
    )  # fmt: skip
    return model


@functools.cache
def forward(graphdef):
    config = from_pretrained(FOLDER).config
    batch, sharder = make_batch(prepare(config, golden_rows(golden("images"), config)), Identity(), streams=STREAMS)

    def logits(state):
        model = nnx.merge(graphdef, state)
        return model.logits(model(batch, sharder))

    return jax.jit(logits, compiler_options=small.FAST)


def logits_of(model):
    real = golden("images")["attention_mask"] == 1
    graphdef, state = nnx.split(model)
    return np.asarray(forward(graphdef)(state))[real]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft_also_after_merging(kind):
    """Loading what PEFT has saved; the merged model is a plain one."""
    wanted = load_file(GOLDENS / "qwen3_5-adapters.safetensors")[kind][golden("images")["attention_mask"] == 1]
    model = adapted(kind)
    got = logits_of(model)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
    assert np.abs(wanted - golden("images")["logits"][golden("images")["attention_mask"] == 1]).max() > 0.05
    merge_adapters(model)
    assert not nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    np.testing.assert_allclose(logits_of(model), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_peft(kind, tmp_path):
    """Saving what was loaded gives PEFT's tensors, bit for bit, and no other target; so does loading it again."""
    out, before = tmp_path / "adapter", adapter_folder(kind)
    model = from_pretrained(FOLDER)
    load_adapter(model, before, KINDS[kind])  # as the options say
    save_adapter(model, out, KINDS[kind], "qwen3_5")
    tensors, wanted = (load_file(folder / "adapter_model.safetensors") for folder in (out, before))
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, wanted[name], err_msg=name)
    config, peft = (json.loads((folder / "adapter_config.json").read_text()) for folder in (out, before))
    assert {key: peft[key] for key in config if key != "target_modules"} == {
        key: value for key, value in config.items() if key != "target_modules"
    }
    names = {name.rpartition(".")[2] for name in peft["target_modules"]}
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == names
    again = from_pretrained(FOLDER)
    load_adapter(again, out)
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.LoRAParam) for m in (model, again)))


def test_merging_on_the_command_line(tmp_path):
    out = tmp_path / "merged"
    assert merge(adapter_folder("lora"), out, str(FOLDER)) == 0
    model = adapted("lora")
    merge_adapters(model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(from_pretrained(out)), nnx.state(model))
    with pytest.raises(ValueError, match="exists already"):
        merge(adapter_folder("lora"), out, str(FOLDER))


@pytest.mark.parametrize("dora", [False, True])
def test_a_fresh_adapter_changes_nothing_and_the_low_rank_term_is_never_a_matrix(dora):
    rng = np.random.default_rng(0)
    linear = Linear(12, 10, dtype=jnp.float32, rngs=nnx.Rngs(0))
    kernel, x = linear.kernel[...], jnp.asarray(rng.normal(size=(3, 12)), jnp.float32)
    plain = linear(x)
    linear.adapter = Adapter(kernel, LoraConfig(rank=2, alpha=3, dora=dora), jax.random.key(0))
    np.testing.assert_array_equal(linear(x), plain)

    linear.adapter.b = nnx.LoRAParam(jnp.asarray(rng.normal(size=(2, 10)), jnp.float32))
    whole = np.asarray(kernel) + 1.5 * np.asarray(linear.adapter.a[...]) @ np.asarray(linear.adapter.b[...])
    if dora:
        whole *= np.linalg.norm(kernel, axis=0) / np.linalg.norm(whole, axis=0)
    np.testing.assert_allclose(linear(x), np.asarray(x) @ whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(linear.adapter.merged(kernel), whole, rtol=1e-5, atol=1e-6)
    products = [eqn for eqn in jax.make_jaxpr(linear)(x).eqns if eqn.primitive.name == "dot_general"]
    inner = [eqn for eqn in products if eqn.outvars[0].aval.shape == (12, 10)]
    assert len(products) >= 3 and not inner


@pytest.mark.quick
def test_only_adapters_are_trained_and_named():
    model = small.make_model()
    add_adapters(model, LoraConfig(rank=2, targets=["q_proj", "layers.*mlp"], dora=True))
    names = {weight.path: weight.names for weight in weight_table(model)}
    _, params, frozen = split_model(model, (), names)
    assert len(params) == 4 * 3 and all(".adapter." in name for name in params)
    assert set(frozen) == set(hf_names(model)) and params.keys() <= names.keys()
    assert names["layers.slots.0.mixer.q_proj.adapter.b"] == tuple(
        f"base_model.model.model.language_model.layers.{i}.self_attn.q_proj.lora_B.weight" for i in range(2)
    )
    _, fewer, _ = split_model(model, ["mlp"], names)
    assert len(fewer) == 3
    low = small.make_model(dtype="bfloat16")
    add_adapters(low, LoraConfig(rank=2))
    assert {array.dtype for array in split_model(low)[1].values()} == {jnp.dtype("float32")}
    with pytest.raises(ValueError, match="'lm_head' matches no parameter"):
        add_adapters(model, LoraConfig(rank=2, targets=["lm_head"]))


MERGER = ["norm.weight", "norm.bias", *(f"linear_fc{i}.{part}" for i in (1, 2) for part in ("kernel", "bias"))]


def test_modules_trained_whole_are_saved_with_the_adapter_and_merged(tmp_path):
    """In float32 where the model is bfloat16, and bfloat16 again once merged; under the names of PEFT."""
    options = LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["embed_tokens", "merger"])
    model = from_pretrained(FOLDER, dtype=jnp.bfloat16)
    add_adapters(model, options)
    _, params, _ = split_model(model)
    whole = {"embed_tokens", *(f"visual.{name}" for name in MERGER)}
    assert {name for name in params if ".adapter." not in name} == whole and len(whole) == 7
    assert {array.dtype for array in params.values()} == {jnp.dtype("float32")}
    model.embed_tokens = nnx.LoRAParam(model.embed_tokens[...] + 0.01, dtype_before=jnp.bfloat16)
    save_adapter(model, tmp_path / "adapter", options, str(FOLDER))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == [
        "model.language_model.embed_tokens",
        *(f"model.visual.merger.{name}" for name in ("linear_fc1", "linear_fc2", "norm")),
    ]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    np.testing.assert_array_equal(
        tensors["base_model.model.model.language_model.embed_tokens.weight"], model.embed_tokens[...]
    )
    assert "base_model.model.model.visual.merger.linear_fc1.bias" in tensors
    for given in (None, options):
        again = from_pretrained(FOLDER, dtype=jnp.bfloat16)
        load_adapter(again, tmp_path / "adapter", given)
        jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.LoRAParam) for m in (model, again)))
    merge_adapters(again)
    base = nnx.state(from_pretrained(FOLDER, dtype=jnp.bfloat16))
    assert jax.tree.map(lambda x: x.dtype, nnx.state(again)) == jax.tree.map(lambda x: x.dtype, base)
    np.testing.assert_array_equal(again.embed_tokens[...], model.embed_tokens[...].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"for which the model has no adapter"):
        load_adapter(from_pretrained(FOLDER), tmp_path / "adapter", LoraConfig(rank=2, targets=["q_proj"]))
    with pytest.raises(ValueError, match=r"gate_proj.weight is matched by --lora.targets and lies in a module of"):
        add_adapters(from_pretrained(FOLDER), LoraConfig(rank=2, modules_to_save=["mlp"]))


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_is_that_of_a_mask_and_nothing_is_dropped_in_evaluation(dora):
    rng = np.random.default_rng(0)
    options = LoraConfig(rank=2, alpha=3, dora=dora, dropout=0.25)
    linear = Linear(64, 10, dtype=jnp.float32, rngs=nnx.Rngs(0))
    linear.adapter = Adapter(linear.kernel[...], options, jax.random.key(0))
    linear.adapter.b = nnx.LoRAParam(jnp.asarray(rng.normal(size=(2, 10)), jnp.float32))
    x = jnp.asarray(rng.normal(size=(3, 40, 64)), jnp.float32)
    evaluated = linear(x)
    adapter, kernel = linear.adapter, np.asarray(linear.kernel[...])
    low = 1.5 * np.asarray(adapter.a[...]) @ np.asarray(adapter.b[...])
    length = np.asarray(adapter.magnitude[...] / adapter.lengths(linear.kernel[...])) if dora else 1
    np.testing.assert_allclose(evaluated, x @ ((kernel + low) * length), rtol=1e-5, atol=1e-5)

    sharder = make_sharder(40, layout_from_name("zigzag", 1))
    frozen = {"adapter.seed": adapter.seed[...]}
    batch = {"input_ids": jnp.zeros((3, 40), jnp.int32)}
    masks = []
    for step in (1, 1, 2):
        seeds, numbered = draw_anew(frozen, batch, step)
        start_dropout(linear, numbered, sharder)
        adapter.seed[...] = seeds["adapter.seed"]
        masks.append(np.asarray(adapter.drop(jnp.ones_like(x), adapter.seed[...], adapter.rate)))
        dropped = np.asarray(x) * masks[-1]
        wanted = x @ kernel + dropped @ (kernel * (length - 1) + low * length)
        np.testing.assert_allclose(linear(x), wanted, rtol=1e-5, atol=1e-4)
    assert set(np.unique(masks[0]).tolist()) == {0, np.float32(1 / 0.75)}
    assert abs((masks[0] == 0).mean() - 0.25) < 0.02
    np.testing.assert_array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2]) and not np.array_equal(masks[0][0], masks[0][1])


def test_r64_adapters_that_do_not_fit(tmp_path):
    def refused(options=None, config=None, change=None):
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapter_folder("lora"), folder)
        if config:
            file = folder / "adapter_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        if change:
            tensors = load_file(folder / "adapter_model.safetensors")
            change(tensors)
            save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=r".") as error:
            load_adapter(from_pretrained(FOLDER), folder, options)
        assert "\n" not in str(error.value)
        return str(error.value)

    first = "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight"
    base = KINDS["lora"]
    other = LoraConfig(rank=8, alpha=8, targets=base.targets)
    assert "has rank 4, but --lora.rank is 8" in refused(other)
    assert "has dora False, but --lora.dora is True" in refused(LoraConfig(4, 8, dora=True, targets=base.targets))
    assert "with rank 6 needs (6, 32): give an adapter of this model, or the rank it has" in refused(config={"r": 6})
    assert "(4, 47)" in refused(change=lambda t: t.update({first: t[first][:, :47].copy()}))
    assert "nothing for model.language_model.layers.0.mlp.down_proj" in refused(
        change=lambda t: [t.pop(name) for name in list(t) if ".0.mlp.down_proj" in name]
    )
    assert f"holds nothing at {first}" in refused(change=lambda t: t.pop(first))
    assert "holds strange.lora_A.weight" in refused(change=lambda t: t.update({"strange.lora_A.weight": t[first]}))
    assert "lora_A.weight, for which the model has no adapter" in refused(LoraConfig(4, 8, targets=["q_proj"]))
    assert "bias 'all'" in refused(config={"bias": "all"})
    assert "rank_pattern" in refused(config={"rank_pattern": {"q_proj": 2}})
    assert "IA3" in refused(config={"peft_type": "IA3"})
    with pytest.raises(ValueError, match=r"has no adapter_config\.json: give the folder of a PEFT adapter"):
        load_adapter(from_pretrained(FOLDER), tmp_path)


@functools.cache
def grid_gradients(remat, cp):
    """Gradients of all parameters of the plain model, and of the adapters alone; and the compiler's temporary bytes."""
    batch, sharder = small.host_batch(cp)
    valid = int((batch["labels"] != IGNORE).sum())
    base, lora = small.make_model("float64"), small.make_model("float64")
    add_adapters(lora, LoraConfig(rank=2, targets=["_proj"], dora=True, dropout=0.25))
    parts = [split_model(model, small.FREEZE if model is base else ()) for model in (base, lora)]
    for name, array in parts[1][1].items():  # where b is zero, a has no gradient
        if name.endswith(".b"):
            parts[1][1][name] = 0.1 * jax.random.normal(jax.random.key(len(name)), array.shape)

    def loss(params, frozen, graphdef):
        frozen, numbered = draw_anew(frozen, batch, 3)

        def local(params, frozen, batch):
            model = merge_model(graphdef, params, frozen)
            start_dropout(model, batch, sharder)
            hidden = model(batch, sharder, remat=remat)
            labels = sharder.take_local(batch["labels"])
            return jax.lax.psum(cross_entropy(hidden, model.head(), labels, valid_tokens=valid)[0], "cp")

        over = jax.shard_map(local, mesh=make_mesh(cp=cp), in_specs=P(), out_specs=P(), axis_names={"cp"})
        return over(params, frozen, numbered)

    def gradients(*arrays):
        return [jax.grad(loss)(*pair, part[0]) for pair, part in zip(arrays, parts, strict=True)]

    compiled = jax.jit(gradients).lower(*(part[1:] for part in parts)).compile(compiler_options=small.FAST)
    full, adapters = compiled(*(part[1:] for part in parts))
    return jax.tree.map(np.array, full | adapters), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("corner", "other"), [(("none", 1), ("layer", 1)), (("dots", 2), ("layer", 2)),
                                               (("layer", 1), ("layer", 2))])  # fmt: skip
def test_r68_gradients_under_recomputation_and_sharding(corner, other):
    """Full and LoRA with dropout alike, in float64; XLA fuses sums differently around recomputation, so the last bits
    differ."""
    with jax.enable_x64(True):
        got, wanted = grid_gradients(*corner)[0], grid_gradients(*other)[0]
    assert sum(".adapter." in name for name in got) == 7 * 3 and len(got) > 30
    for name in wanted:
        scale = np.abs(wanted[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(got[name], wanted[name], rtol=0, atol=1e-12 * scale, err_msg=name)


def test_recomputation_takes_less_memory():
    with jax.enable_x64(True):
        for more, less in ((("none", 1), ("layer", 1)), (("dots", 2), ("layer", 2))):
            assert grid_gradients(*less)[1] < 0.9 * grid_gradients(*more)[1]
