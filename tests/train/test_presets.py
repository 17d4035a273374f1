"""The models that the default job trains: small ones of every family, which learn, are exported, and answer."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models import family, from_pretrained, save_pretrained
from cpjax.shard import layout_from_name
from cpjax.train import digits, presets
from cpjax.train.config import Config, DataConfig, ModelConfig
from cpjax.train.digits_task import DigitsTask
from cpjax.train.evaluate import ask, count_right, digits_batch
from cpjax.train.step import make_eval_step, split_model

from .small import FAST

SIZES = {
    "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "vision_hidden_size": 16,
    "vision_layers": 1, "vision_heads": 2,
}  # fmt: skip
DATA = DataConfig(tokens=96, images=8)
ROW = layout_from_name("zigzag", 1)


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if name != "qwen3_5"])  # which test_run.py trains
def test_a_small_model_learns_a_document_and_its_export_answers(name, tmp_path):
    documents = digits.documents(DATA, 0, 0, 1, "held_out")
    config = presets.model_config(ModelConfig(family=name, **SIZES))
    model_class = family(name).Model
    fresh = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    graph, *_ = nnx.split(fresh, nnx.Param, ...)

    @functools.partial(jax.jit, compiler_options=FAST)
    def start():
        return nnx.split(model_class(config, rngs=nnx.Rngs(0)), nnx.Param, ...)[1:]

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(params, others, batch, sharder):
        def loss(params):
            model = nnx.merge(graph, params, others)
            logits = model.logits(model(batch, sharder, remat="none"))
            labels = batch["labels"]
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
            return -jnp.where(labels >= 0, found, 0).sum() / (labels >= 0).sum(), logits.argmax(-1)

        (value, said), grads = jax.value_and_grad(loss, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
        return value, said, jax.tree.map(lambda p, g: p - 0.3 * g / jnp.maximum(norm, 1), params, grads)

    params, others = start()
    batch, sharder = digits_batch(config, DATA, documents, ROW)
    losses = []
    for _ in range(60):
        before = params
        loss, said, params = step(params, others, batch, sharder)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]

    save_pretrained(nnx.merge(graph, before, others), tmp_path / "export")
    model = from_pretrained(tmp_path / "export")
    read = nnx.split(model, nnx.Param, ...)[1:]
    jax.tree.map(np.testing.assert_array_equal, read, (before, others))

    def predict(batch, sharder):  # from the host, as above, so that nothing is compiled again
        return step(*read, jax.tree.map(np.asarray, batch), sharder)[1]

    answers = ask(predict, model.config, DATA, documents, ROW, make_mesh())
    right, asked = sum(count_right(documents, answers).values())
    assert asked > 1 and right >= 1
    np.testing.assert_array_equal(answers[0][0], said[0, documents[0].questions[0].answer - 1])


@pytest.mark.parametrize("name", presets.PRESETS)
def test_an_image_is_one_token_that_all_of_its_pixels_reach(name):
    [document] = digits.documents(DATA, 0, 0, 1, "held_out")
    config = presets.model_config(ModelConfig(family=name))
    batch, _ = digits_batch(config, DATA, [document], ROW)
    assert (batch["vision_index"] >= 0).sum() == DATA.images == len(np.unique(batch["vision_segment_ids"]))
    pixels = batch["pixel_values"].reshape(DATA.images, -1)
    shown = document.images.reshape(DATA.images, -1)
    shown = shown if name == "gemma4" else 2 * shown - 1
    for own, scan in zip(pixels, shown, strict=True):
        copies = own.size // scan.size  # channels, and frames that Qwen3.5 has twice
        np.testing.assert_allclose(np.sort(own), np.sort(np.repeat(scan, copies)), rtol=1e-6)


def test_a_model_with_other_words_is_refused(tmp_path):
    config = presets.model_config(ModelConfig()).to_dict()
    config["text_config"]["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model.path \S+ has a vocabulary of its own, .*: give --records.files"):
        DigitsTask(Config(model=ModelConfig(path=str(tmp_path))), layout_from_name("zigzag", 1))


def test_sizes_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="linear_heads is given, but gemma4 has no linear attention: leave it out"):
        presets.model_config(ModelConfig(family="gemma4", linear_heads=2))
    assert ModelConfig(family="step3p7", layers=8).sizes_given() == ["--model.family", "--model.layers"]


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_default_sizes_are_evaluated_on_four_ranks(name):
    """Traced alone: there some parameters are split over the ranks, and others are not."""
    config, mesh = presets.model_config(ModelConfig(family=name)), make_mesh(cp=4)
    graph, params, others = split_model(nnx.eval_shape(lambda: family(name).Model(config, rngs=nnx.Rngs(0))))
    batch, sharder = digits_batch(
        config, DATA, digits.documents(DATA, 0, 0, 1, "held_out"), layout_from_name("zigzag", 4)
    )
    said = jax.eval_shape(make_eval_step(graph, mesh), params, others, batch, sharder)
    assert said.shape == (1, sharder.padded_length)
