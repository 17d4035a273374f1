"""Hugging Face folders of Qwen3.5: round trips, damage, and transformers opening what was written."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from cpjax.mesh import make_mesh
from cpjax.models import from_pretrained, hf_names, save_pretrained, to_hf_names
from cpjax.models.common import checkpoint
from cpjax.models.common.sharding import parameter_sharding
from cpjax.models.qwen3_5 import STREAMS, Config, Qwen3_5, prepare
from cpjax.shard import Identity, make_batch

from .qwen3_5_cases import FOLDER, golden, golden_model, golden_rows, write_with_head

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden folder, to be damaged."""
    return shutil.copytree(FOLDER, tmp_path / "model")


def tensors(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def rewrite(folder, change):
    """Applies `change` to the dict of tensors."""
    held = tensors(folder)
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def retie(folder):
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, lambda held: held.pop("lm_head.weight"))


def test_r66_round_trip_keeps_every_bit(tmp_path):
    save_pretrained(golden_model(), tmp_path / "out")
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert_same(tensors(tmp_path / "out"), tensors(FOLDER))
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((FOLDER / "config.json").read_text())
    with safe_open(tmp_path / "out/model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.quick
def test_r66_round_trip_in_shards(tmp_path):
    save_pretrained(golden_model(), tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(f.name for f in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1  # who reads one reads all
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all(name in load_file(tmp_path / "out" / file) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(FOLDER).values())
    assert_same(to_numpy(from_pretrained(tmp_path / "out")), tensors(FOLDER))


def test_r66_round_trip_of_mixed_dtypes(folder, tmp_path):
    def mix(held):
        for name, value in held.items():
            held[name] = value if name.endswith("A_log") else value.astype(jnp.bfloat16)

    rewrite(folder, mix)
    save_pretrained(from_pretrained(folder), tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), tensors(folder))
    wide = from_pretrained(folder, dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(wide))} == {np.dtype(np.float32)}


def test_r66_round_trip_of_a_tied_head(folder, tmp_path):
    retie(folder)
    model = from_pretrained(folder)
    np.testing.assert_array_equal(model.head(), tensors(folder)["model.language_model.embed_tokens.weight"].T)
    save_pretrained(model, tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), tensors(folder))


def test_a_folder_of_one_s_own(tmp_path):
    """Fresh weights and a configuration from code; a second export replaces the first."""
    source = golden_model().config
    config = Config(text=source.text, vision=source.vision, image_token_id=90, video_token_id=91)
    model = Qwen3_5(config, rngs=nnx.Rngs(1), dtype=jnp.bfloat16)
    save_pretrained(golden_model(), tmp_path / "deep/out", max_shard_bytes=100_000)
    save_pretrained(model, tmp_path / "deep/out")
    assert sorted(f.name for f in (tmp_path / "deep/out").iterdir()) == ["config.json", "model.safetensors"]
    again = from_pretrained(tmp_path / "deep/out")
    assert again.config == config
    assert_same(to_numpy(again), to_numpy(model))
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["out"]


def to_numpy(model):
    return {name: np.asarray(value) for name, value in to_hf_names(model, model).items()}


def test_parameters_are_placed_on_the_mesh():
    mesh = make_mesh(fsdp=2, cp=2)
    model = from_pretrained(FOLDER, mesh=mesh)
    assert_same(to_numpy(model), tensors(FOLDER))
    kernel = model.layers.slots[0].mlp.gate_proj.kernel[...]
    assert kernel.shape == (2, 32, 48) and kernel.addressable_shards[0].data.shape == (2, 32, 24)
    assert len(kernel.sharding.device_set) == 4


def test_loading_onto_a_mesh_holds_no_more_than_a_device_s_part_of_one_parameter(monkeypatch):
    """On the host; and right after it, every parameter lies where the training step wants it."""
    parts, read = [], checkpoint._read
    monkeypatch.setattr(checkpoint, "_read", lambda *args: parts.append(read(*args)) or parts[-1])
    mesh = make_mesh(fsdp=2, cp=2)
    leaves = checkpoint.leaves_by_path(from_pretrained(FOLDER, mesh=mesh, dtype=jnp.float32))
    for path, leaf in leaves.items():
        assert leaf.sharding == parameter_sharding(mesh, leaf.shape, path), path
    largest = max(leaf.addressable_shards[0].data.nbytes for leaf in leaves.values())
    assert max(part.nbytes for part in parts) == largest <= max(leaf.nbytes for leaf in leaves.values()) / 4


def test_names_of_any_parameter_shaped_tree():
    model, expected = golden_model(), tensors(FOLDER)
    state = nnx.split(model)[1]
    flat = {".".join(map(str, path)): value.get_value() for path, value in nnx.to_flat_state(state)}
    for tree in (state, flat, nnx.to_pure_dict(state)):
        named = to_hf_names(model.config, tree)
        assert {name: value.shape for name, value in named.items()} == {k: v.shape for k, v in expected.items()}
    table = hf_names(model)
    assert table.keys() == flat.keys()
    assert sorted(name for names in table.values() for name in names) == sorted(expected)
    with pytest.raises(ValueError, match=r"'other', which is no parameter"):
        to_hf_names(model, {**flat, "other": 1})


LOST = "model.language_model.layers.3.self_attn.q_proj.weight"


def test_r64_a_missing_tensor(folder):
    rewrite(folder, lambda held: (held.pop(LOST), held.pop("lm_head.weight")))
    with pytest.raises(ValueError, match=r"lacks the tensor lm_head.weight, needed with shape \(96, 32\) \(1 more"):
        from_pretrained(folder)


def test_r64_a_tensor_of_another_shape(folder):
    rewrite(folder, lambda held: held.update({LOST: np.zeros((3, 32), np.float32)}))
    with pytest.raises(ValueError, match=rf"{LOST} in .* has shape \(3, 32\), but config.json needs \(128, 32\)"):
        from_pretrained(folder)


def test_r64_a_renamed_tensor(folder):
    rewrite(folder, lambda held: held.update({LOST + "2": held.pop(LOST)}))
    with pytest.raises(ValueError, match=f"lacks the tensor {LOST}"):
        from_pretrained(folder)


def test_a_tensor_of_integers(folder):
    rewrite(folder, lambda held: held.update({LOST: np.zeros((128, 32), np.int8)}))
    with pytest.raises(ValueError, match=f"{LOST} in .* is of type I8"):
        from_pretrained(folder)


def test_r64_extra_tensors_are_reported(folder):
    """A head of multi-token prediction is one where config.json does not speak of it."""
    rewrite(folder, lambda held: held.update({"other": np.zeros(2), "mtp.fc.weight": np.zeros(2, np.float32)}))
    with pytest.warns(UserWarning, match=r"mtp.fc.weight and 1 more"):
        from_pretrained(folder)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_head_ahead(tmp_path, family, recwarn):
    """It comes back bit by bit under its names; a folder that has lost it, as transformers saves, loads without."""
    write_with_head(family, tmp_path)
    model = from_pretrained(tmp_path)
    assert model.config.text.mtp_num_hidden_layers == 1
    save_pretrained(model, tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path))
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())
    rewrite(tmp_path, lambda held: [held.pop(name) for name in list(held) if name.startswith("mtp.")])
    model = from_pretrained(tmp_path)
    assert model.mtp is None and model.config.text.mtp_num_hidden_layers == 0 and not recwarn.list
    save_pretrained(model, tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path))
    assert from_pretrained(tmp_path / "out").config == model.config


def test_experts_of_the_head_in_another_layout(tmp_path):
    """Each part is read from the layout that the folder has of it."""
    write_with_head("qwen3_5_moe", tmp_path)
    expected = tensors(tmp_path)

    def stack(held):
        stem = "mtp.layers.0.mlp.experts"
        gate, up, down = (
            np.stack([held.pop(f"{stem}.{i}.{part}_proj.weight") for i in range(8)]) for part in ("gate", "up", "down")
        )
        held |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": down}

    rewrite(tmp_path, stack)
    assert_same(to_numpy(from_pretrained(tmp_path)), expected)


def test_other_heads_ahead_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers=2 is not supported: use 1, or 0"),
        ({"mtp_use_dedicated_embeddings": True}, r"mtp_use_dedicated_embeddings=True is not supported"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"text_config": config["text_config"] | change}))
        with pytest.raises(ValueError, match=message):
            from_pretrained(folder)


@pytest.mark.parametrize("keep", [0, 5, 1000, -4])
def test_a_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is not a complete safetensors file"):
        from_pretrained(folder)


def test_a_missing_shard(tmp_path):
    save_pretrained(golden_model(), tmp_path / "out", max_shard_bytes=200_000)
    lost = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"names {lost.name}, which is not in"):
        from_pretrained(tmp_path / "out")


def test_an_unsupported_family(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"model_type 'llama' is not supported: choose one of .*qwen3_5"):
        from_pretrained(folder)


def test_other_folders_that_are_no_checkpoint(folder):
    with pytest.raises(ValueError, match=r"nowhere has no config.json"):
        from_pretrained(folder / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor"):
        from_pretrained(folder)
    for index in ({}, {"weight_map": {"lm_head.weight": 3}}, {"weight_map": {"lm_head.weight": ["a"]}}):
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"has no weight_map of file names"):
            from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for changed, part in (
        (config | {"text_config": "small"}, "text_config"),
        (config | {"vision_config": [1]}, "vision_config"),
        (config | {"text_config": config["text_config"] | {"rope_parameters": 3}}, "rope_parameters"),
    ):
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=rf"model/config\.json: {part} is .*, not an object"):
            from_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        from_pretrained(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds list"):
        from_pretrained(folder)


def test_a_disk_that_takes_no_more_is_named(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("cpjax.models.common.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        save_pretrained(golden_model(), tmp_path / "out")
    assert error.value.filename == str(tmp_path / "out") and not list(tmp_path.iterdir())


def test_saving_refuses_a_folder_with_other_content(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt, which is no part of a model export"):
        save_pretrained(golden_model(), tmp_path)
    with pytest.raises(ValueError, match=r"is a file"):
        save_pretrained(golden_model(), tmp_path / "notes.txt")
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("cpjax.models.common.checkpoint.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_pretrained(golden_model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_r66_transformers_opens_the_export(tmp_path, tied):
    """With nothing missing and nothing unexpected, and the same logits."""
    torch = pytest.importorskip("torch", reason="torch is not installed: this test opens exports with transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: this test needs it")
    source = golden_model().config
    config = Config(
        source.text, source.vision, image_token_id=90, video_token_id=91, vision_start_token_id=92,
        vision_end_token_id=93, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3_5(config, rngs=nnx.Rngs(0))
    save_pretrained(model, tmp_path / "out", max_shard_bytes=200_000)
    theirs, info = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32 and theirs.config.tie_word_embeddings is tied

    case = golden("images")
    batch, sharder = make_batch(prepare(config, golden_rows(case, config)), Identity(), streams=STREAMS)
    ours = np.asarray(jax.jit(lambda batch: model.logits(model(batch, sharder)))(batch))
    inputs = {k: torch.tensor(v) for k, v in case.items() if not k.startswith(("grad", "loss", "logits", "mtp"))}
    with torch.no_grad():
        logits = theirs(**inputs, mm_token_type_ids=(inputs["input_ids"] == 90).int(), use_cache=False).logits.numpy()
    real = case["attention_mask"] == 1
    np.testing.assert_allclose(ours[real], logits[real], rtol=0, atol=1e-4)
