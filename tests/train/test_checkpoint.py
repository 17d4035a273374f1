"""Checkpoints: other meshes, half-written files, other runs (reports R62 to R65)."""

import contextlib
import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.mesh import make_mesh
from cpjax.train.checkpoint import Checkpoints, check_folder, claim_folder, read_run
from cpjax.train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, RunConfig
from cpjax.train.data import RecordsConfig
from cpjax.train.errors import InputError
from cpjax.train.loop import train
from cpjax.train.optimizer import make_optimizer
from cpjax.train.step import init_state
from tests.models.qwen3_5_cases import FOLDER


def make_config(out, **run):
    return Config(run=RunConfig(out=str(out), **run))


def make_state(mesh, seed=0, width=8):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {"a.kernel": jax.random.normal(keys[0], (width, 6)), "a.bias": jax.random.normal(keys[1], (3,))}
    optimizer = make_optimizer(OptimizerConfig(), (), params)
    frozen = {"b": jax.random.normal(keys[2], (5,))}
    state = init_state(params, frozen, optimizer, mesh, average=True, scaled=True)
    moved = jax.tree.map(lambda x: x + jnp.asarray(seed, x.dtype), state)
    return dataclasses.replace(moved, step=jnp.int32(seed))


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 2), (2, 1, 2), (1, 1, 8)])
def test_r63_restores_bitwise_on_another_mesh(tmp_path, sizes):
    config = make_config(tmp_path)
    saved = make_state(make_mesh(fsdp=2, cp=4), seed=7)
    checkpoints = Checkpoints(config)
    checkpoints.save(saved, 7, {})
    checkpoints.wait()
    mesh = make_mesh(*sizes)
    restored = checkpoints.restore(make_state(mesh), mesh, print)
    checkpoints.close()
    assert_same(restored, saved)
    spec = restored.params["a.kernel"].sharding.spec
    assert spec == jax.sharding.PartitionSpec("fsdp" if sizes[1] > 1 else None, None)


def test_r65_a_half_written_checkpoint_gives_way_to_the_one_before(tmp_path, capfd):
    config, mesh = make_config(tmp_path, keep=3), make_mesh()
    checkpoints = Checkpoints(config)
    for step in (1, 2, 3):
        checkpoints.save(make_state(mesh, seed=step), step, {})
    checkpoints.wait()
    checkpoints.close()
    for file in (tmp_path / "checkpoints" / "3" / "state").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)

    said = []
    checkpoints = Checkpoints(config)
    restored = checkpoints.restore(make_state(mesh), mesh, said.append)
    assert_same(restored, make_state(mesh, seed=2))
    assert capfd.readouterr().err == ""  # orbax would print tracebacks
    assert len(said) == 1 and "checkpoint 3 is incomplete" in said[0]
    assert (tmp_path / "unreadable-3").is_dir()

    checkpoints.save(make_state(mesh, seed=3), 3, {})  # that number again
    checkpoints.wait()
    assert_same(checkpoints.restore(make_state(mesh), mesh, said.append), make_state(mesh, seed=3))
    checkpoints.close()
    assert len(said) == 1


def test_r65_a_run_without_a_readable_checkpoint_does_not_start_again_by_itself(tmp_path):
    config, mesh = make_config(tmp_path), make_mesh()
    checkpoints = Checkpoints(config)
    for step in (1, 2):
        checkpoints.save(make_state(mesh, seed=step), step, {})
        checkpoints.wait()
        shutil.rmtree(checkpoints.folder / str(step) / "run")
    said = []
    with pytest.raises(InputError, match=r"no checkpoint of the run in .* can be read"):
        checkpoints.restore(make_state(mesh), mesh, said.append)
    assert len(said) == 2
    assert checkpoints.restore(make_state(mesh), mesh, said.append) is None
    checkpoints.close()


def test_r65_a_save_cut_short_is_said(tmp_path):
    config, mesh = make_config(tmp_path), make_mesh()
    checkpoints = Checkpoints(config)
    checkpoints.save(make_state(mesh, seed=1), 1, {})
    checkpoints.wait()
    checkpoints.close()
    os.rename(tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp")
    checkpoints = Checkpoints(config)
    said = []
    assert checkpoints.restore(make_state(mesh), mesh, said.append) is None
    checkpoints.close()
    assert len(said) == 1 and "step 2" in said[0]


@pytest.mark.quick
def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(make_config(tmp_path, keep=2))
    for step in (1, 2, 3, 4):
        checkpoints.save(make_state(make_mesh(), seed=step), step, {})
    checkpoints.wait()
    checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


@pytest.mark.parametrize(
    ("name", "values", "kept", "best"),
    [
        ("held_out_accuracy", {2: 0.5, 3: 0.9, 5: 0.7, 6: float("nan")}, {3, 6, 7}, 3),
        ("held_out_loss", {2: 0.5, 3: 0.9, 5: 0.7}, {2, 6, 7}, 2),
        ("held_out_accuracy", {}, {6, 7}, None),
    ],
)
def test_keeps_the_newest_and_the_best(tmp_path, name, values, kept, best):
    config, state = make_config(tmp_path, keep=2, keep_best=name), make_state(make_mesh())
    for steps in (range(1, 5), range(5, 8)):  # the second process knows the best of the first
        checkpoints = Checkpoints(config)
        for step in steps:
            record = {"loss": 1.0} | ({name: values[step]} if step in values else {})
            old = values.get(checkpoints.best_step)
            better = step in values and (old is None or (values[step] < old if "loss" in name else values[step] > old))
            assert checkpoints.is_best(record) == better
            checkpoints.save(state, step, record)
            checkpoints.wait()
        checkpoints.close()
    assert {int(path.name) for path in (tmp_path / "checkpoints").iterdir()} == kept
    assert checkpoints.best_step == best


def test_an_unknown_metric_is_refused(tmp_path):
    config = dataclasses.replace(make_config(tmp_path / "a", keep_best="held_out_acuracy"), mesh=MeshConfig(cp=1))
    wanted = "the metrics to choose from are held_out_accuracy, held_out_accuracy/copy, held_out_accuracy/read, "
    with pytest.raises(ValueError, match=f"keep_best is held_out_acuracy: {wanted}"):
        train(config, "one device")
    assert not (tmp_path / "a").exists()


def test_saved_values_survive_donation(tmp_path):
    mesh = make_mesh(cp=2)
    state = make_state(mesh, seed=5)
    want = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(make_config(tmp_path))
    checkpoints.save(state, 5, {})
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state))
    checkpoints.wait()
    assert_same(checkpoints.restore(make_state(mesh), mesh, print), want)
    checkpoints.close()


def test_r62_a_checkpoint_of_another_data_position_is_not_used(tmp_path):
    config, mesh = make_config(tmp_path), make_mesh()
    checkpoints = Checkpoints(config)
    for step in (1, 2):
        checkpoints.save(make_state(mesh, seed=step), step, {})
    checkpoints.wait()
    file = checkpoints.folder / "2" / "run" / "metadata"
    run = json.loads(file.read_text())
    assert run["next_step"] == 2
    file.write_text(json.dumps(run | {"next_step": 3}))
    said = []
    assert_same(checkpoints.restore(make_state(mesh), mesh, said.append), make_state(mesh, seed=1))
    checkpoints.close()
    assert len(said) == 1 and "it says that its next step is 3" in said[0]


def test_r64_other_arrays_are_refused(tmp_path):
    mesh = make_mesh()
    checkpoints = Checkpoints(make_config(tmp_path))
    checkpoints.save(make_state(mesh), 1, {})
    checkpoints.wait()
    with pytest.raises(ValueError, match=r"holds float32 of shape \(8, 6\) at \S+ but the model .* \(9, 6\)"):
        checkpoints.restore(make_state(mesh, width=9), mesh, print)
    renamed = make_state(mesh)
    renamed = dataclasses.replace(renamed, frozen={"c": renamed.frozen["b"]})
    with pytest.raises(ValueError, match=r"holds float32 of shape .* at frozen/b, but the model .* nothing"):
        checkpoints.restore(renamed, mesh, print)
    checkpoints.close()


def test_frozen_parameters_stay_in_the_folder_they_came_from(tmp_path):
    """A checkpoint does not hold them, and goes with no other folder than that."""
    mesh, base = make_mesh(), shutil.copytree(FOLDER, tmp_path / "base")
    config = dataclasses.replace(make_config(tmp_path / "run"), model=ModelConfig(path=str(base)))
    saved, like = make_state(mesh, seed=3), make_state(mesh)
    with contextlib.closing(Checkpoints(config)) as checkpoints:
        checkpoints.save(saved, 3, {"held_out_loss": 2.0}, {"at": 5})
        checkpoints.wait()
        restored = checkpoints.read(3, like, mesh)
        assert checkpoints.data == {"at": 5} and checkpoints.metrics == {"held_out_loss": 2.0}
        with pytest.raises(InputError, match=r"has no checkpoint of step 4: it has 3$"):
            checkpoints.read(4, like, mesh)
    assert_same(restored, dataclasses.replace(saved, frozen=like.frozen))
    held = (tmp_path / "run" / "checkpoints" / "3" / "state" / "_METADATA").read_text()
    assert "'frozen', 'b'" not in held and "'params', 'a.kernel'" in held

    moved = dataclasses.replace(config, model=ModelConfig(path=str(shutil.copytree(base, tmp_path / "moved"))))
    with contextlib.closing(Checkpoints(moved)) as checkpoints:
        assert_same(checkpoints.restore(like, mesh, print), restored)
    file = tmp_path / "moved" / "model.safetensors"
    weights = bytearray(file.read_bytes())
    weights[-1] ^= 1
    file.write_bytes(weights)
    with contextlib.closing(Checkpoints(moved)) as checkpoints:
        with pytest.raises(InputError, match=r"model.path \S+moved is not the one that checkpoint \S+3 was trained on"):
            checkpoints.restore(like, mesh, print)
        everything = dataclasses.replace(like, frozen={})
        with pytest.raises(InputError, match=r"is not the one"):
            checkpoints.read(3, everything, mesh)
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_files_that_a_run_names_are_found_from_anywhere(tmp_path, monkeypatch):
    records = RecordsConfig(files=["a.jsonl"], held_out=["x=b.jsonl", "c.json"])
    config = dataclasses.replace(make_config("run"), model=ModelConfig(path="m"), records=records)
    monkeypatch.chdir(tmp_path)
    claim_folder(config)
    monkeypatch.chdir("/")
    found = read_run(tmp_path / "run")
    assert found.model.path == str(tmp_path / "m") and found.records.files == [str(tmp_path / "a.jsonl")]
    assert found.records.held_out == [f"x={tmp_path / 'b.jsonl'}", str(tmp_path / "c.json")]
    with pytest.raises(ValueError, match=r"there is no run in \S+ \(config.yaml is missing\)"):
        read_run(tmp_path)


def test_what_may_change_on_resume(tmp_path):
    """What decides neither the numbers nor which records come when, or has no effect on this run."""
    base = make_config(tmp_path / "run", resume=True)
    model, files = ModelConfig(path=str(tmp_path / "m")), [str(tmp_path / "a.jsonl")]
    own = dataclasses.replace(base, model=model, records=RecordsConfig(files=files))
    for started, changed in (
        (
            own,
            {"records": RecordsConfig(files=files, broken="skip", workers=1, shapes=1), "data": DataConfig(images=3)},
        ),
        (
            base,
            {"records": RecordsConfig(tokens=5, pack=False), "model": dataclasses.replace(base.model, remat="none")},
        ),
    ):
        claim_folder(dataclasses.replace(started, run=dataclasses.replace(started.run, resume=False))).close()
        check_folder(dataclasses.replace(started, **changed))
        shutil.rmtree(tmp_path / "run")
    claim_folder(dataclasses.replace(own, run=dataclasses.replace(own.run, resume=False))).close()
    with pytest.raises(
        ValueError, match=r"records.pack was True and is now False; they decide which records come when, s"
    ):
        check_folder(dataclasses.replace(own, records=RecordsConfig(files=files, pack=False)))
    lr = dataclasses.replace(own, optimizer=OptimizerConfig(lr=0.5), run=dataclasses.replace(own.run, steps=9, seed=3))
    words = "how parameters change, weights and order, the learning rate of each step, so give the old values"
    with pytest.raises(ValueError, match=f"they decide {words}"):
        check_folder(lr)
    with pytest.raises(ValueError, match=r"data\.images was 64 and is now 3; they decide the documents, so"):
        shutil.rmtree(tmp_path / "run")
        claim_folder(dataclasses.replace(base, run=dataclasses.replace(base.run, resume=False))).close()
        check_folder(dataclasses.replace(base, data=DataConfig(images=3)))


def test_folders(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="no run to resume"):
        check_folder(make_config(out, resume=True))
    check_folder(make_config(out))
    assert not out.exists()
    claim_folder(make_config(out))
    with pytest.raises(ValueError, match="not empty"):
        check_folder(make_config(out))
    same = make_config(out, resume=True, keep=5, eval_every=3)
    check_folder(dataclasses.replace(same, mesh=MeshConfig(cp=8, layout="contiguous", transport="allgather")))
    other = dataclasses.replace(make_config(out, resume=True, seed=9), model=ModelConfig(heads=8))
    with pytest.raises(ValueError, match=r"model\.heads was \d+ and is now 8; run\.seed was 0 and is now 9"):
        check_folder(other)
    before = (out / "config.yaml").read_text()
    with claim_folder(same):
        for config in (same, make_config(out)):
            with pytest.raises(ValueError, match=r"another run is in the folder \S+run: wait until it has ended"):
                claim_folder(config)
    with pytest.raises(ValueError, match="another run"):  # it was started since the folder was looked at
        claim_folder(make_config(out))
    claim_folder(same).close()
    assert (out / "config.yaml").read_text() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        check_folder(make_config(tmp_path / "file"))
