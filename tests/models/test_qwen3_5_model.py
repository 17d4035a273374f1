"""Qwen3.5's configuration, fresh weights, layer patterns and host preparation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.models import family
from cpjax.models.qwen3_5 import STREAMS, Config, Media, Qwen3_5, Row, TextConfig, VisionConfig, patchify, prepare
from cpjax.shard import Identity, make_batch

from .qwen3_5_cases import FOLDER, small_model

OPTIONS = {"xla_backend_optimization_level": 0}  # halves the compile time
LINEAR, FULL = "linear_attention", "full_attention"


def source():
    return json.loads((FOLDER / "config.json").read_text())


def small(**text):
    """A configuration that costs nothing to trace."""
    sizes = dict(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4,
        linear_value_head_dim=4, partial_rotary_factor=0.75, mrope_section=(1, 1, 1),
    )  # fmt: skip
    vision = VisionConfig(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=16,
        num_position_embeddings=16,
    )  # fmt: skip
    return Config(TextConfig(**{**sizes, **text}), vision, image_token_id=30, video_token_id=31)


def image(*grid, modality="image"):
    return Media(np.ones((int(np.prod(grid)), small().vision.patch_dim), np.float32), grid, modality)


# configuration


def test_config_is_read_from_both_spellings_of_rope():
    config = Config.from_dict(source())
    assert (config.text.rope_theta, config.text.partial_rotary_factor) == (1000.0, 0.75)
    assert config.text.mrope_section == (3, 2, 1) and config.text.rms_norm_eps == 1e-3
    assert config.text.types == (LINEAR, LINEAR, LINEAR, FULL) * 2 and config.text.period == 4
    old = source()
    rope = old["text_config"].pop("rope_parameters")
    old["text_config"] |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    old["text_config"] |= {"rope_scaling": rope, "layer_types": None, "full_attention_interval": 4}
    assert Config.from_dict(old) == config and hash(Config.from_dict(old)) == hash(config)


def test_config_is_written_verbatim_until_a_field_changes():
    config = Config.from_dict(source())
    assert config.to_dict() == source()
    changed = dataclasses.replace(config, tie_word_embeddings=True)
    assert Config.from_dict(changed.to_dict()) == changed
    assert changed.to_dict()["text_config"]["initializer_range"] == 0.02  # unused here, kept
    assert Config.from_dict(small().to_dict()) == small()


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        (
            "text_config",
            {"num_attention_heads": 3},
            r"num_attention_heads=3 must be a multiple of num_key_value_heads=2",
        ),
        ("text_config", {"linear_num_key_heads": 3}, r"linear_num_value_heads=4 must be a multiple of"),
        ("text_config", {"hidden_size": 0}, r"text_config.hidden_size=0 must be an integer >= 1"),
        (
            "text_config",
            {"layer_types": [LINEAR]},
            r"layer_types has 1 entries: it needs one of .* each of the 8 layers",
        ),
        ("text_config", {"layer_types": ["sliding"] * 8}, r"among them \['sliding'\]"),
        ("text_config", {"head_dim": 32}, r"gives 24 rotated features, but mrope_section=\[3, 2, 1\] has 6"),
        ("text_config", {"hidden_act": "gelu"}, r"text_config.hidden_act='gelu' is not supported"),
        ("text_config", {"attention_bias": True}, r"text_config.attention_bias=True is not supported"),
        ("text_config", {"rope_scaling": {"rope_type": "dynamic"}}, r"rope_type='dynamic', which is not supported"),
        ("vision_config", {"num_heads": 3}, r"vision_config.hidden_size=32 must be a multiple of 4 x num_heads=3"),
        ("vision_config", {"num_position_embeddings": 24}, r"num_position_embeddings=24 must be a square"),
        ("vision_config", {"hidden_act": "relu"}, r"vision_config.hidden_act='relu' is not supported"),
        ("vision_config", {"patch_size": [4, 8]}, r"patch_size=\[4, 8\] is not supported"),
        ("vision_config", {"out_hidden_size": 16}, r"out_hidden_size=16 must equal text_config.hidden_size=32"),
        (None, {"image_token_id": 96}, r"image_token_id=96 lies outside the vocabulary of 96"),
        (None, {"model_type": "qwen3"}, r"model_type='qwen3': it must be 'qwen3_5'"),
    ],
)
def test_config_refuses(where, change, message):
    config = source()
    (config[where] if where else config).update(change)
    with pytest.raises(ValueError, match=message):
        Config.from_dict(config)


def test_families():
    assert family("qwen3_5").Model is Qwen3_5
    with pytest.raises(ValueError, match=r"'gpt2' is not supported"):
        family("gpt2")


# the model


@pytest.mark.parametrize("types", [(LINEAR, LINEAR, LINEAR, FULL), (FULL, LINEAR, LINEAR, FULL), (LINEAR, FULL) * 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_pattern_of_layers_and_dtype(types, dtype):
    """A pattern that does not repeat is one group; every gradient has the dtype of its parameter."""
    config = small(layer_types=types)
    model = nnx.eval_shape(lambda: Qwen3_5(config, rngs=nnx.Rngs(0), dtype=dtype))
    groups = model.layers.slots[0].mlp.gate_proj.kernel.shape[0]
    assert groups * len(model.layers.slots) == 4 and groups == (2 if types[:2] == types[2:] else 1)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype(dtype)}
    batch, sharder = make_batch(prepare(config, [Row([1, 30, 2], media=[image(1, 2, 2)])]), Identity(), streams=STREAMS)
    graph, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graph, params)
        hidden = model(batch, sharder)
        assert hidden.shape == (1, 3, 16) and hidden.dtype == dtype
        return model.logits(hidden).sum()

    grads = jax.eval_shape(jax.grad(loss), params)
    assert jax.tree.map(lambda g, p: (g.shape, g.dtype) == (p.shape, p.dtype), grads, params)


def test_the_program_does_not_grow_with_depth():
    def size(layers):
        config = small(num_hidden_layers=layers)
        model = nnx.eval_shape(lambda: Qwen3_5(config, rngs=nnx.Rngs(0)))
        batch, sharder = make_batch(prepare(config, [Row([1, 2, 3])]), Identity())
        graph, params = nnx.split(model)

        def loss(params):
            return nnx.merge(graph, params)(batch, sharder).sum()

        return len(jax.jit(jax.grad(loss)).lower(params).as_text().splitlines())

    assert size(8) == size(24)


def test_an_image_gets_no_gradient_from_its_placeholder_and_pads_none_at_all():
    model, config = small_model(), small_model().config
    pixels = np.ones((4, config.vision.patch_dim), np.float32)
    row = Row([5, 90, 6], media=[Media(pixels, (1, 2, 2))])
    batch, sharder = make_batch(prepare(config, [row, Row([7])], num_patches=8), Identity(), streams=STREAMS)
    graph, params = nnx.split(model)

    def loss(params, pixels):
        hidden = nnx.merge(graph, params)({**batch, "pixel_values": pixels}, sharder)
        return (hidden * ~batch["padding_mask"][..., None]).var()

    grads, pixels = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=OPTIONS)(params, batch["pixel_values"])
    used = np.flatnonzero(np.abs(grads["embed_tokens"][...]).sum(1))
    assert used.tolist() == [5, 6, 7]
    assert np.abs(pixels[0, :4]).min() > 0 and not pixels[0, 4:].any() and not pixels[1].any()


# preparation


def test_rows_are_shifted_padded_and_numbered():
    rows = [
        Row([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 1, 1, 2, 2]),
        Row([30, 6], [-100, 6], media=[image(1, 2, 2)]),
    ]
    batch = prepare(small(), rows, length=6)
    np.testing.assert_array_equal(batch["input_ids"], [[1, 2, 3, 4, 5, 0], [30, 6, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch["labels"], [[2, 3, -100, 5, -100, -100], [6, *[-100] * 5]])
    np.testing.assert_array_equal(batch["document_ids"], [[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch["padding_mask"], batch["document_ids"] == 0)
    np.testing.assert_array_equal(batch["position_ids"][1], [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(batch["vision_index"], [[-1] * 6, [0, *[-1] * 5]])
    np.testing.assert_array_equal(batch["vision_segment_ids"], [[0] * 4, [1] * 4])
    assert "pixel_values" not in prepare(small(), rows[:1])
    assert prepare(small(), rows[:1], num_patches=8)["pixel_values"].shape == (1, 8, 24)


def test_patches_positions_and_table():
    pixels = np.arange(4 * 8 * 3).reshape(4, 8, 3)
    media = patchify(small().vision, pixels)
    assert media.grid == (1, 2, 4) and media.modality == "image"
    batch = prepare(small(), [Row([30, 30], media=[media])])
    np.testing.assert_array_equal(
        batch["vision_positions"][0], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    )
    for patch, (row, column) in zip(batch["pixel_values"][0], batch["vision_positions"][0], strict=True):
        expected = pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].transpose(2, 0, 1)
        np.testing.assert_array_equal(patch.reshape(3, 2, 2, 2), np.stack([expected] * 2, axis=1))
    # A table that holds its own coordinates is stretched linearly, corner to corner.
    table = np.stack(np.meshgrid(np.arange(4), np.arange(4), indexing="ij"), -1).reshape(16, 2)
    found = (table[batch["vision_table_indices"][0]] * batch["vision_table_weights"][0][..., None]).sum(1)
    np.testing.assert_allclose(found, batch["vision_positions"][0] * [3, 1], atol=1e-6)

    video = patchify(small().vision, np.random.default_rng(0).normal(size=(4, 4, 4, 3)))
    assert video.grid == (2, 2, 2) and video.modality == "video"
    batch = prepare(small(), [Row([31, 1, 31], media=[video])])
    np.testing.assert_array_equal(batch["vision_segment_ids"][0], [1] * 4 + [2] * 4)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, r"at least one row"),
        ([Row([])], {}, r"none empty"),
        ([Row([1, 2])], {"length": 1}, r"length=1 was given, but a row has 2 tokens"),
        ([Row([30], media=[image(1, 2, 2)])], {"num_patches": 3}, r"num_patches=3 was given, but a row has 4 patches"),
        ([Row([1])], {"num_patches": 3}, r"num_patches=3 must be a multiple of 4"),
        ([Row([1, 32])], {}, r"row 0 has the value 32 in input_ids: the vocabulary ends at 31"),
        ([Row([1], [40])], {}, r"value 40 in labels"),
        ([Row([1, 2], [1])], {}, r"input_ids of shape \(2,\), labels \(1,\)"),
        ([Row([1, 2], None, [0, 1])], {}, r"document_ids of row 0 must be 1-based"),
        ([Row([1, 2, 3], None, [1, 2, 1])], {}, r"each document one run"),
        ([Row([1, 30])], {}, r"row 0 has a placeholder token at 1 beyond its 0 frames"),
        (
            [Row([1]), Row([1, 2], media=[image(1, 2, 2)])],
            {},
            r"row 1 has media of 1 frames but placeholder tokens for 0",
        ),
        ([Row([30, 1], media=[image(1, 2, 4)])], {}, r"row 0 needs 2 tokens 30 at 0 for frame 1 \(1 x 2"),
        ([Row([31], media=[image(1, 2, 2)])], {}, r"needs 1 tokens 30 at 0"),
        ([Row([30, 30], None, [1, 2], media=[image(1, 2, 4)])], {}, r"reach into another document"),
        ([Row([30], media=[image(1, 3, 2)])], {"num_patches": 8}, r"image grid \(1, 3, 2\): .* h and w multiples of 2"),
        ([Row([30, 30], media=[image(2, 2, 2)])], {}, r"t = 1 for an image"),
        ([Row([30], media=[Media(np.ones((4, 7)), (1, 2, 2))])], {}, r"patches of shape \(4, 7\) for the grid"),
    ],
)
def test_prepare_refuses(rows, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(small(), rows, **options)


@pytest.mark.parametrize("shape", [(4, 4), (4, 6, 3), (4, 4, 1), (3, 4, 4, 3), (0, 4, 3)])
def test_patchify_refuses(shape):
    with pytest.raises(ValueError, match=r"pixels of shape .* were given"):
        patchify(small().vision, np.zeros(shape))
