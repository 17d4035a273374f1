"""Gemma 4's configuration, layer patterns, documents and host preparation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.models import family
from cpjax.models.common.rope import Rope
from cpjax.models.gemma4 import (
    STREAMS,
    AudioConfig,
    Config,
    Gemma4,
    Media,
    Row,
    TextConfig,
    VisionConfig,
    audio_tokens,
    patchify,
    prepare,
)
from cpjax.shard import Identity, make_batch

from .gemma4_cases import golden_model
from .qwen3_5_cases import GOLDENS

SLIDING, FULL = "sliding_attention", "full_attention"


def source(name="gemma4"):
    return json.loads((GOLDENS / name / "config.json").read_text())


def small(audio=False, **text):
    """A configuration that costs nothing to trace."""
    sizes = dict(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, global_head_dim=12, hidden_size_per_layer_input=0, sliding_window=3,
        use_bidirectional_attention="vision", layer_types=(SLIDING, FULL) * 2,
    )  # fmt: skip
    vision = VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, patch_size=2, pooling_kernel_size=2, position_embedding_size=6,
    )  # fmt: skip
    sound = AudioConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=(8, 4))
    return Config(
        TextConfig(**{**sizes, **text}), vision, sound if audio else None, image_token_id=30, video_token_id=31,
        audio_token_id=29,
    )  # fmt: skip


def image(*grid, modality="image"):
    return Media(np.ones((int(np.prod(grid)), small().vision.patch_dim), np.float32), grid, modality)


# configuration


def test_config_is_read_from_both_spellings_of_full_layers():
    config = Config.from_dict(source())
    assert config.text.types == (SLIDING, FULL) * 2 and config.text.stacks == ((0, (SLIDING, FULL), 2),)
    assert (config.text.width(SLIDING), config.text.width(FULL)) == (16, 24)
    assert (config.text.kv_heads(SLIDING), config.text.kv_heads(FULL)) == (2, 1)
    assert config.text.sliding_rope == Rope(100.0) and config.audio is None
    assert config.text.rope == Rope(1000.0, 0.5, "proportional", (("factor", 1.0),))
    old = source()
    old["text_config"].pop("per_layer_config")
    old["text_config"] |= {"global_head_dim": 24, "num_global_key_value_heads": 1}
    assert Config.from_dict(old) == config and hash(Config.from_dict(old)) == hash(config)


def test_config_is_written_verbatim_until_a_field_changes():
    for name in ("gemma4", "gemma4_e"):
        assert Config.from_dict(source(name)).to_dict() == source(name)
    changed = dataclasses.replace(Config.from_dict(source()), boa_token_id=7)
    assert Config.from_dict(changed.to_dict()) == changed
    assert changed.to_dict()["text_config"]["initializer_range"] == 0.02  # unused here, kept
    assert Config.from_dict(small(audio=True).to_dict()) == small(audio=True)


def test_layers_that_share_keys_are_a_stack_of_their_own():
    config = Config.from_dict(source("gemma4_e"))
    assert config.text.stacks == ((0, (SLIDING, FULL), 2), (4, (SLIDING, FULL), 2))
    assert TextConfig().types[4:6] == (SLIDING, FULL) and TextConfig(num_hidden_layers=8).types[-1] == FULL


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("text_config", {"num_attention_heads": 3}, r"num_attention_heads=3 must be a multiple of the 2 key heads"),
        ("text_config", {"hidden_size": 0}, r"text_config.hidden_size=0 must be an integer >= 1"),
        ("text_config", {"pad_token_id": None}, r"text_config.pad_token_id=None must be an integer"),
        ("text_config", {"layer_types": [SLIDING], "per_layer_config": {}}, r"has 1 entries: .* each of the 4 layers"),
        (
            "text_config",
            {"per_layer_config": {"1": {"head_dim": 24}}},
            r"must say the same of all layers of type 'full_attention'",
        ),
        ("text_config", {"num_kv_shared_layers": 4}, r"num_kv_shared_layers=4 leaves no layer of each type"),
        ("text_config", {"hidden_activation": "silu"}, r"text_config.hidden_activation='silu' is not supported"),
        ("text_config", {"attention_bias": True}, r"text_config.attention_bias=True is not supported"),
        ("text_config", {"use_bidirectional_attention": "all"}, r"use_bidirectional_attention='all' is not supported"),
        ("text_config", {"rope_parameters": {FULL: {"rope_type": "yarn"}}}, r"full_attention has no rope_theta"),
        ("text_config", {"enable_moe_block": True}, r"enable_moe_block needs num_experts"),
        ("vision_config", {"head_dim": 6}, r"vision_config.head_dim=6 must be a multiple of 4"),
        (None, {"vision_config": None}, r"has no vision_config"),
        (None, {"tie_word_embeddings": False}, r"tie_word_embeddings=False is not supported"),
        (None, {"audio_config": {"attention_context_left": 20}}, r"attention_context_left=20 must be at most 1 more"),
        (None, {"image_token_id": 96}, r"image_token_id=96 lies outside the vocabulary of 96"),
        (None, {"model_type": "gemma3"}, r"model_type='gemma3': it must be 'gemma4'"),
    ],
)
def test_config_refuses(where, change, message):
    config = source()
    (config[where] if where else config).update(change)
    with pytest.raises(ValueError, match=message):
        Config.from_dict(config)


# the model


def test_family():
    assert family("gemma4").Model is Gemma4


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (jnp.bfloat16, {"layer_types": (SLIDING, SLIDING, SLIDING, FULL)}),
        (jnp.float32, {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4, "num_hidden_layers": 8,
                       "layer_types": (SLIDING, FULL) * 4}),
    ],
)  # fmt: skip
def test_any_pattern_of_layers_and_dtype(dtype, text):
    """A pattern that does not repeat is one group; every gradient has the dtype of its parameter."""
    config = small(audio=True, **text)
    model = nnx.eval_shape(lambda: Gemma4(config, rngs=nnx.Rngs(0), dtype=dtype))
    assert model.layers.slots[0].mlp.gate_proj.kernel.shape[0] == (3 if "num_hidden_layers" in text else 1)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype(dtype)}
    row = Row([1, 30, 2, 29, 29], media=[image(1, 2, 2)], sounds=[np.ones((5, 8))])
    batch, sharder = make_batch(prepare(config, [row]), Identity(), streams=STREAMS)
    graph, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graph, params)
        hidden = model(batch, sharder)
        assert hidden.shape == (1, 5, 16) and hidden.dtype == dtype
        return model.logits(hidden).sum()

    grads = jax.eval_shape(jax.grad(loss), params)
    assert jax.tree.map(lambda g, p: (g.shape, g.dtype) == (p.shape, p.dtype), grads, params)


def test_the_program_does_not_grow_with_depth_and_keeps_keys_once():
    """With all that variants have: per-layer inputs, shared keys and values, experts. Nothing has an axis of groups and
    one of tokens but the hidden states that layers keep for the backward pass and the per-layer inputs: keys and values
    that later layers share are kept once."""

    def lowered(layers):
        text = {"num_hidden_layers": layers, "num_kv_shared_layers": 2, "layer_types": (SLIDING, FULL) * (layers // 2)}
        text |= {"hidden_size_per_layer_input": 4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        config = small(moe_intermediate_size=8, **text)
        model = nnx.eval_shape(lambda: Gemma4(config, rngs=nnx.Rngs(0)))
        batch, sharder = make_batch(prepare(config, [Row([1] * 7)]), Identity())
        graph, params = nnx.split(model)

        def loss(params):
            return nnx.merge(graph, params)(batch, sharder).sum()

        return jax.jit(jax.grad(loss)).lower(params).as_text()

    few, many = lowered(8), lowered(24)
    assert len(few.splitlines()) == len(many.splitlines())
    assert "11x1x7x16xf32" in many
    assert "11x1x7x1x8xf32" not in many and "11x1x7x1x12xf32" not in many


def test_packed_documents_are_what_they_are_alone():
    """In one program: a row of two documents, and each in a row of its own."""
    model, rng = golden_model("gemma4"), np.random.default_rng(0)
    first, second = rng.integers(1, 89, 6), np.concatenate([rng.integers(1, 89, 3), [90] * 4, rng.integers(1, 89, 2)])
    media = [Media(rng.random((16, 12)), (1, 4, 4))]
    rows = [
        Row(np.concatenate([first, second]), document_ids=[1] * 6 + [2] * 9, media=media),
        Row(first),
        Row(second, media=media),
    ]
    batch, sharder = make_batch(prepare(model.config, rows), Identity(), streams=STREAMS)
    graph, params = nnx.split(model)
    run = jax.jit(lambda p: nnx.merge(graph, p)(batch, sharder), compiler_options={"xla_backend_optimization_level": 0})
    packed, one, two = np.asarray(run(params))
    np.testing.assert_allclose(packed[:6], one[:6], atol=1e-5)
    np.testing.assert_allclose(packed[6:], two[:9], atol=1e-5)


# preparation


def test_rows_are_shifted_padded_and_numbered():
    images = [image(1, 2, 2), image(1, 2, 4)]
    rows = [
        Row([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 1, 1, 2, 2]),
        Row([30, 6, 30, 30, 31], [-100, 6, -100, -100, -100], media=[*images, image(1, 2, 2, modality="video")]),
    ]
    batch = prepare(small(), rows, length=6)
    np.testing.assert_array_equal(batch["input_ids"], [[1, 2, 3, 4, 5, 0], [30, 6, 30, 30, 31, 0]])
    np.testing.assert_array_equal(batch["labels"], [[2, 3, -100, 5, -100, -100], [6, *[-100] * 5]])
    np.testing.assert_array_equal(batch["document_ids"], [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch["padding_mask"], batch["document_ids"] == 0)
    np.testing.assert_array_equal(batch["position_ids"], [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(batch["vision_index"], [[-1] * 6, [0, -1, 1, 2, 3, -1]])
    np.testing.assert_array_equal(batch["vision_group_ids"], [[-1] * 6, [0, -1, 1, 1, 1, -1]])  # those that touch
    np.testing.assert_array_equal(batch["vision_segment_ids"], [[0] * 16, [1] * 4 + [2] * 8 + [3] * 4])
    assert not {"pixel_values", "vision_group_ids", "audio_index"} & prepare(small(), rows[:1]).keys()
    assert "vision_group_ids" not in prepare(small(use_bidirectional_attention=None), rows)
    assert prepare(small(), rows[:1], num_patches=8)["pixel_values"].shape == (1, 8, 12)


def test_sounds_are_padded_to_the_longest():
    sounds = [np.full((frames, 8), frames, np.float32) for frames in (5, 1, 9)]
    rows = [Row([29, 29, 4, 29], sounds=sounds[:2]), Row([29, 29, 29], sounds=sounds[2:]), Row([5])]
    batch = prepare(small(audio=True), rows)
    assert [audio_tokens(frames) for frames in (1, 4, 5, 9)] == [1, 1, 2, 3]
    np.testing.assert_array_equal(batch["audio_index"], [[0, 1, -1, 3], [0, 1, 2, -1], [-1] * 4])
    np.testing.assert_array_equal(batch["audio_frames"], [[5, 1], [9, 0], [0, 0]])
    assert batch["audio_features"].shape == (3, 2, 9, 8)
    np.testing.assert_array_equal(batch["audio_features"].sum((2, 3)), [[200, 8], [648, 0], [0, 0]])


def test_patches_come_in_the_order_of_pooling():
    pixels = np.arange(4 * 8 * 3).reshape(4, 8, 3)
    media = patchify(small().vision, pixels)
    assert media.grid == (1, 2, 4) and media.modality == "image"
    batch = prepare(small(), [Row([30, 30], media=[media])])
    np.testing.assert_array_equal(
        batch["vision_positions"][0], [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1]]
    )
    for patch, (column, row) in zip(batch["pixel_values"][0], batch["vision_positions"][0], strict=True):
        np.testing.assert_array_equal(patch, pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(-1))
    video = patchify(small().vision, np.zeros((3, 4, 4, 3)))
    assert video.grid == (3, 2, 2) and video.modality == "video"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, r"at least one row"),
        ([Row([1, 2])], {"length": 1}, r"length=1 was given, but a row has 2 tokens"),
        ([Row([1])], {"num_patches": 3}, r"num_patches=3 must be a multiple of 4"),
        ([Row([1, 32])], {}, r"row 0 has the value 32 in input_ids: the vocabulary ends at 31"),
        ([Row([1, 2], [1])], {}, r"input_ids of shape \(2,\), labels \(1,\)"),
        ([Row([1, 2, 3], None, [1, 2, 1])], {}, r"each document one run"),
        ([Row([1, 30])], {}, r"row 0 has media of 0 frames, and a placeholder token at 1 beyond them"),
        ([Row([1, 2], media=[image(1, 2, 2)])], {}, r"row 0 has media of 1 frames, but placeholder tokens for 0"),
        ([Row([30, 1], media=[image(1, 2, 4)])], {}, r"number 1 needs 2 tokens 30 at 0: its placeholders differ"),
        ([Row([31], media=[image(1, 2, 2)])], {}, r"needs 1 tokens 30 at 0"),
        ([Row([30, 30], None, [1, 2], media=[image(1, 2, 4)])], {}, r"reach into another document"),
        ([Row([30, 1, 30], media=[image(1, 2, 4)])], {}, r"needs 2 tokens 30 at 0"),
        ([Row([30], media=[image(1, 3, 2)])], {"num_patches": 8}, r"image grid \(1, 3, 2\): .* h and w multiples of 2"),
        ([Row([30] * 4, media=[image(1, 2, 8)])], {}, r"grid \(1, 2, 8\): the model has 6 positions along a side"),
        ([Row([30], media=[Media(np.ones((4, 7)), (1, 2, 2))])], {}, r"patches of shape \(4, 7\) for the grid"),
        ([Row([29], sounds=[np.ones((4, 7))])], {}, r"sound of shape \(4, 7\): it must be \[frames, 8\]"),
        ([Row([29], sounds=[np.ones((9, 8))])], {}, r"row 0 has 1 sounds, of which number 1 needs 3 tokens 29 at 0"),
    ],
)
def test_prepare_refuses(rows, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(small(audio=True), rows, **options)


def test_sounds_need_an_audio_tower():
    with pytest.raises(ValueError, match=r"row 0 has sounds, but the model has no audio tower"):
        prepare(small(), [Row([29], sounds=[np.ones((4, 8))])])


@pytest.mark.parametrize("shape", [(4, 4), (4, 6, 3), (4, 4, 1), (0, 4, 3)])
def test_patchify_refuses(shape):
    with pytest.raises(ValueError, match=r"pixels of shape .* were given"):
        patchify(small().vision, np.zeros(shape))
