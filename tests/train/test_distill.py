"""Distillation: one step is the same on every mesh, the teacher costs no gradient, and only its like is accepted."""

import collections
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tokenizers import Tokenizer, models

from cpjax.mesh import make_mesh
from cpjax.models import save_pretrained
from cpjax.models.common import sharding
from cpjax.models.qwen3_5 import STREAMS, Model, Row, patchify, prepare
from cpjax.shard import layout_from_name, make_batch
from cpjax.train import config as options
from cpjax.train.distill import load_teacher
from cpjax.train.step import Teacher, init_state, make_train_step, merge_model, place_batch, split_model
from tests.jaxprs import equations

from . import small

RATIO, TEMPERATURE = 0.25, 2.0
MODEL = small.MODEL


TEACHER = dataclasses.replace(  # wider, deeper, its head untied
    MODEL,
    text=dataclasses.replace(
        MODEL.text, hidden_size=24, intermediate_size=40, num_hidden_layers=3, layer_types=("full_attention",) * 3
    ),
    vision=dataclasses.replace(MODEL.vision, hidden_size=12, out_hidden_size=24),
    tie_word_embeddings=False,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parameters as small as these are split over cp too."""
    monkeypatch.setattr(sharding, "SMALLEST", 8)


def make_rows():
    """Those of `small`, with an image near a chunk's edge in the first."""
    first, *rest = small.make_rows()
    ids = np.array(first.input_ids)
    ids[9:13] = MODEL.image_token_id
    image = patchify(MODEL.vision, np.random.default_rng(1).normal(size=(8, 8, 1)))
    return [Row(ids, first.labels, media=[image]), *rest]


def random_model(config, seed, dtype):
    """Structure and arrays of a model with random weights; much faster than to initialise it."""
    graphdef, params, _ = split_model(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    return graphdef, {
        name: jnp.asarray(rng.normal(size=array.shape, scale=(array.shape[-2] if array.ndim > 1 else 4) ** -0.5), dtype)
        for name, array in params.items()
    }


class Step:
    """A step of plain gradient descent at rate 1, not compiled, and what it takes."""

    def __init__(self, cp, dtype="float64", teacher_dtype="float64", accumulate=1):
        self.mesh = make_mesh(cp=cp)
        graphdef, params = random_model(MODEL, 3, dtype)
        optimizer = optax.sgd(1.0)
        self.state = init_state(params, {}, optimizer, self.mesh)
        structure, arrays = random_model(TEACHER, 4, teacher_dtype)
        arrays = jax.device_put(arrays, sharding.tree_shardings(self.mesh, arrays))
        self.teacher = Teacher(arrays, structure, RATIO, TEMPERATURE)
        batch, self.sharder = make_batch(prepare(MODEL, make_rows()), layout_from_name("zigzag", cp), streams=STREAMS)
        self.batch = place_batch(batch, self.mesh)
        self.step = make_train_step(graphdef, optimizer, lambda step: 1.0, self.mesh, accumulate=accumulate)


def stepped(cp, **options):
    """The parameters before and after one step, its metrics, and the teacher's shardings."""
    with jax.enable_x64(True):
        run = Step(cp, **options)
        before = jax.tree.map(np.array, run.state.params)
        lowered = run.step.lower(run.state, run.batch, run.sharder, run.teacher)
        step = lowered.compile(compiler_options=small.FAST)
        state, metrics = step(run.state, run.batch, run.sharder, run.teacher)
        specs = {name: array.sharding.spec for name, array in run.teacher.arrays.items()}
        return before, jax.tree.map(np.array, state.params), jax.tree.map(float, metrics), specs


def test_cp_and_microbatches_change_nothing():
    """float64, cp 2 in two microbatches against cp 1: every gradient, that of the vision tower included."""
    before, wanted, metrics, _ = stepped(1)
    _, after, split, specs = stepped(2, accumulate=2)
    for name, old in before.items():
        moved = np.abs(wanted[name] - old).max()
        assert moved > 0, f"{name} has no gradient"
        np.testing.assert_allclose(after[name] - old, wanted[name] - old, rtol=0, atol=1e-11 * moved, err_msg=name)
    assert split == pytest.approx(metrics, rel=1e-6)  # float32
    assert metrics["kl"] > 1e-2 and metrics["ce"] > 1
    whole = (1 - RATIO) * metrics["ce"] + RATIO * TEMPERATURE**2 * metrics["kl"]
    assert metrics["loss"] == pytest.approx(whole, rel=1e-6)
    # The teacher is in parts where it is large, and its layers are gathered one by one.
    assert sum("cp" in spec for spec in specs.values()) > 10
    assert specs["layers.slots.0.mlp.down_proj.kernel"] != P()


def test_the_teacher_takes_no_gradient_and_no_memory_for_one():
    """Nothing of the shape of its parameters is summed, and no activation in its layers kept."""
    run = Step(2, dtype="float32", teacher_dtype="bfloat16")
    alone, both = (
        list(equations(jax.make_jaxpr(run.step)(run.state, run.batch, run.sharder, teacher).jaxpr))
        for teacher in (None, run.teacher)
    )

    def summed(found):
        sums = [eqn for eqn in found if eqn.primitive.name.startswith(("psum", "reduce_scatter"))]
        return collections.Counter(var.aval.shape for eqn in sums for var in eqn.invars)

    assert summed(both) - summed(alone) == {(): 2}  # ce and kl
    reading = TEACHER.text.num_hidden_layers
    # Nothing of a layer is kept for a backward pass: the scan over the teacher's layers gives the hidden state alone.
    scans = [eqn for eqn in both if eqn.primitive.name == "scan" and eqn.params["length"] == reading]
    assert len(scans) == 1 and len(scans[0].outvars) == 1
    assert not [eqn for eqn in alone if eqn.primitive.name == "scan" and eqn.params["length"] == reading]
    low = [
        sum(e.primitive.name == "dot_general" and all(v.aval.dtype == jnp.bfloat16 for v in e.invars) for e in found)
        for found in (alone, both)
    ]
    assert low[0] == 0 and low[1] > 10  # it computes in its own number format


def changed(folder, to, name, value):
    """A copy of a folder in which config.json says something else; its weights stay behind."""
    to.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    section, _, field = name.rpartition(".")
    (config[section] if section else config)[field] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


def write_tokenizer(folder, *words):
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(folder / "tokenizer.json")
    )


def test_only_a_teacher_of_the_same_vocabulary_and_patches_is_taken(tmp_path):
    folder, student = tmp_path / "teacher", tmp_path / "student"
    graphdef, arrays = random_model(TEACHER, 4, jnp.bfloat16)
    save_pretrained(merge_model(graphdef, arrays), folder)
    mesh = make_mesh(cp=2)

    def load(folder, model="", transport="ring"):
        config = options.Config(
            model=options.ModelConfig(path=str(model)),
            mesh=options.MeshConfig(cp=2, transport=transport),
            distill=options.DistillConfig(teacher=str(folder), ratio=0.5, temperature=3.0),
        )
        return load_teacher(config, MODEL, mesh)

    teacher = load(folder)
    assert (teacher.ratio, teacher.temperature) == (0.5, 3.0)
    for name, array in teacher.arrays.items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.sharding == sharding.parameter_sharding(mesh, array.shape, name)
        assert array.dtype == jnp.bfloat16  # its own

    # Each is refused before weights are read: there are none.
    for name, value, said in [
        ("model_type", "llama", "model_type 'llama' is not supported"),
        ("text_config.vocab_size", 32, "has text.vocab_size 32, but the student's is 24: one batch goes to both"),
        ("text_config.pad_token_id", 2, "has text.pad_token_id 2, but the student's is 0"),
        ("image_token_id", 5, "has image_token_id 5, but the student's is 1"),
        ("vision_config.num_position_embeddings", 9, "has vision.num_position_embeddings 9, but the student's is 4"),
        ("vision_config.patch_size", 4, "has vision.patch_size 4, but the student's is 2"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            load(changed(folder, tmp_path / "other", name, value))
    with pytest.raises(ValueError, match=r"no config\.json: give the folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"bfloat16 of --distill.teacher .* with --mesh.transport allgather crashes"):
        load(folder, transport="allgather")

    student.mkdir()
    write_tokenizer(student, "a", "b", "c")
    assert load(folder, student).arrays  # the teacher's folder has no tokenizer to compare
    write_tokenizer(folder, "a", "b", "c")
    assert load(folder, student).arrays
    write_tokenizer(folder, "a", "c", "b")
    with pytest.raises(ValueError, match=r"has the id 2 for 'b', that of --model.path .* has 1: give a teacher"):
        load(folder, student)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--distill.ratio", "1.5"], "--distill.ratio is 1.5: it must be in [0, 1]"),
        (["--distill.temperature", "0"], "--distill.temperature is 0.0: it must be above 0"),
    ],
)
def test_bad_options(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        options.parse_config(arguments)
