"""Step 3.7's configuration, stacks of layers, released sizes and host preparation."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from cpjax.models import family
from cpjax.models.common.rope import Rope
from cpjax.models.step3p7 import Config, Media, Model, Row, patchify, prepare
from cpjax.models.step3p7.layers import FULL, SLIDING, Layer, Stack
from cpjax.shard import Identity, make_batch

from .step3p7_cases import CONFIG, FOLDER

SOURCE = json.loads((FOLDER / "config.json").read_text())


def released():
    """What public descriptions say of the released checkpoint: 45 layers, every fourth full, the first three dense."""
    types = [SLIDING if i % 4 else FULL for i in range(48)]
    text = dict(
        num_nextn_predict_layers=3, layer_types=types, moe_layers_enum=",".join(map(str, range(3, 45))),
        attention_other_setting={"attention_type": SLIDING, "num_attention_heads": 96}, sliding_window=512,
        rope_theta=[5e6 if kind == FULL else 1e4 for kind in types], vocab_size=128896,
        partial_rotary_factors=[0.5 if kind == FULL else 1.0 for kind in types],
        swiglu_limits=[0.0] * 43 + [7.0, 7.0, 0.0, 0.0, 0.0],
        swiglu_limits_shared=[0.0] * 43 + [16.0, 16.0, 0.0, 0.0, 0.0],
        moe_router_scaling_factor=3.0,
    )  # fmt: skip
    return {"model_type": "step3p7", "text_config": text, "vision_config": {}, "image_token_id": 128001}


# configuration


def test_config_is_read_as_released():
    text = Config.from_dict(SOURCE).text
    assert text.types == (SLIDING, FULL, SLIDING, FULL, SLIDING) and text.mtp_layer_types == (SLIDING, FULL)
    assert (text.num_attention_heads, text.num_sliding_attention_heads, text.num_key_value_heads) == (4, 6, 2)
    scaling = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 64}
    assert text.rope == Rope(5000.0, 0.5, "llama3", tuple(scaling.items())) and text.sliding_rope == Rope(100.0)
    assert (text.n_routed_experts, text.num_experts_per_tok, text.sliding_window) == (4, 2, 6)
    full, sliding = Layer(False, True, 0.2, 0.3), Layer(True, True, 0.2, 0.3)
    assert text.stacks == (Stack(0, (Layer(True, False),), 1), Stack(1, (full, sliding), 2))
    assert text.mtp_layers == (Layer(True, False), Layer(False, False, None, 0.3))
    assert Config.from_dict(SOURCE).vision.intermediate_size == 32


def test_config_is_written_verbatim_until_a_field_changes():
    config = Config.from_dict(SOURCE)
    assert config.to_dict() == SOURCE
    changed = dataclasses.replace(config, image_token_id=91)
    again = Config.from_dict(changed.to_dict())
    assert again == changed and hash(again) == hash(changed)
    assert Config.from_dict(CONFIG.to_dict()) == CONFIG


def test_layers_of_the_released_model_are_few_patterns():
    stacks = Config.from_dict(released()).text.stacks
    assert sum(len(stack.pattern) for stack in stacks) <= 11
    layers = [layer for stack in stacks for layer in stack.pattern * stack.repeats]
    assert [layer.sliding for layer in layers] == [bool(i % 4) for i in range(45)]
    assert [layer.sparse for layer in layers] == [i > 2 for i in range(45)]
    assert [layer.limit for layer in layers] == [None] * 43 + [7.0] * 2
    assert [stack.start for stack in stacks] == np.cumsum([0, *(len(s.pattern) * s.repeats for s in stacks)])[
        :-1
    ].tolist()


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("text_config", {"num_attention_heads": 3}, r"num_attention_heads=3 must be a multiple of"),
        (
            "text_config",
            {"attention_other_setting": {"num_attention_heads": 5}},
            r"num_sliding_attention_heads=5 must be",
        ),
        ("text_config", {"hidden_size": 0}, r"text_config.hidden_size=0 must be an integer >= 1"),
        ("text_config", {"layer_types": [FULL]}, r"layer_types has 1 entries: it needs one of .* each of the 5 layers"),
        ("text_config", {"layer_types": ["linear"] * 7}, r"among them \['linear'\]"),
        ("text_config", {"sliding_window": None}, r"sliding_window=None must be an integer >= 1"),
        ("text_config", {"swiglu_limits": [1.0]}, r"swiglu_limits has 1 entries"),
        (
            "text_config",
            {"rope_parameters": None, "rope_theta": [1.0]},
            r"rope_theta has 1 entries: it needs one for each",
        ),
        ("text_config", {"mlp_layer_types": None, "moe_layers_enum": "1,x"}, r"moe_layers_enum is '1,x': it must be"),
        ("text_config", {"moe_top_k": 9}, r"num_experts_per_tok=9 must be at most n_routed_experts=4"),
        ("text_config", {"attention_bias": True}, r"text_config.attention_bias=True is not supported"),
        ("text_config", {"rope_scaling": {"rope_type": "longrope"}}, r"rope_type='longrope', which is not supported"),
        ("text_config", {"rope_scaling": {"rope_type": "llama3"}}, r"rope_type='llama3' without factor"),
        ("text_config", {"partial_rotary_factors": [0.1] * 7}, r"gives 0 rotated features"),
        ("text_config", {"per_layer_config": {"0": {"head_dim": 4}}}, r"per_layer_config says .* of layer 0"),
        (
            "vision_config",
            {"heads": 3},
            r"vision_config.hidden_size=16 must be a multiple of 4 x num_attention_heads=3",
        ),
        ("vision_config", {"hidden_act": "gelu"}, r"vision_config.hidden_act='gelu' is not supported"),
        (None, {"image_token_id": 96}, r"image_token_id=96 lies outside the vocabulary of 96"),
        (None, {"text_config": 3}, r"text_config is 3, not an object"),
        (None, {"model_type": "step3"}, r"model_type='step3': it must be 'step3p7'"),
    ],
)
def test_config_refuses(where, change, message):
    config = copy.deepcopy(SOURCE)
    (config[where] if where else config).update(change)
    with pytest.raises(ValueError, match=message):
        Config.from_dict(config)


# the model


def test_the_released_model_has_the_parameters_of_transformers():
    torch = pytest.importorskip("torch", reason="torch is not installed: this test builds a model of transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: this test needs it")
    source = released()
    with torch.device("meta"):
        theirs = transformers.Step3p7ForConditionalGeneration(transformers.Step3p7Config.from_dict(source))
    ours = nnx.eval_shape(lambda: Model(Config.from_dict(released()), rngs=nnx.Rngs(0)))
    count = sum(p.numel() for p in theirs.parameters())
    assert count > 190e9
    state = nnx.to_flat_state(nnx.state(ours, nnx.Param))
    assert sum(leaf.size for path, leaf in state if path[0] != "mtp") == count
    assert len(ours.mtp) == 3 and family("step3p7").Model is Model


def test_the_program_does_not_grow_with_depth():
    def size(rounds):
        text = dataclasses.replace(
            CONFIG.text, num_hidden_layers=2 * rounds, layer_types=(SLIDING, FULL) * rounds,
            mlp_layer_types=("sparse",) * 2 * rounds, swiglu_limits=(), swiglu_limits_shared=(),
        )  # fmt: skip
        config = dataclasses.replace(CONFIG, text=text)
        graph, params = nnx.split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))

        batch, sharder = make_batch(prepare(config, [Row([2, 3, 4])]), Identity())

        def loss(params):
            return nnx.merge(graph, params)(batch, sharder).sum()

        return len(jax.jit(jax.grad(loss, allow_int=True)).lower(params).as_text().splitlines())

    assert size(20) == size(5)


# preparation


def test_rows_are_shifted_padded_and_numbered():
    image = patchify(CONFIG.vision, [np.ones((8, 16, 1)), np.ones((8, 8, 1))])
    rows = [
        Row([2, 3, 4, 5], [2, 3, 4, 5], [1, 1, 2, 2]),
        Row([1, 1, 9, 1, 6], [-100, -100, -100, -100, 6], media=[image]),
    ]
    batch = prepare(CONFIG, rows, length=6)
    np.testing.assert_array_equal(batch["labels"], [[3, -100, 5, *[-100] * 3], [-100, -100, -100, 6, -100, -100]])
    np.testing.assert_array_equal(batch["position_ids"], [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(batch["vision_index"], [[-1] * 6, [0, 1, -1, 2, -1, -1]])
    np.testing.assert_array_equal(batch["vision_segment_ids"], [[0] * 48, [1] * 32 + [2] * 16])
    assert batch["vision_windows1"].shape == (2, 12, 9) and batch["vision_windows2"].shape == (2, 3, 9)
    assert (batch["vision_windows2"][0] == -1).all()
    # A convolution over a grid that counts its own patches sees rows 2i - 1 .. 2i + 1, and likewise columns.
    first, second = batch["vision_windows1"][1, :8].reshape(2, 4, 9), batch["vision_windows2"][1, :2].reshape(1, 2, 9)
    assert first[1, 1].tolist() == [9, 10, 11, 17, 18, 19, 25, 26, 27]
    assert first[0, 0].tolist() == [-1, -1, -1, -1, 0, 1, -1, 8, 9]
    assert second[0, 1].tolist() == [-1, -1, -1, 1, 2, 3, 5, 6, 7]
    assert batch["vision_windows1"][1, 8].tolist() == [-1, -1, -1, -1, 32, 33, -1, 36, 37]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, r"at least one row"),
        ([Row([2, 3])], {"length": 1}, r"length=1 was given, but a row has 2 tokens"),
        ([Row([2])], {"num_patches": 8}, r"num_patches=8 must be a multiple of 16"),
        ([Row([2, 32])], {}, r"row 0 has the value 32 in input_ids: the vocabulary ends at 31"),
        ([Row([2, 3], None, [0, 1])], {}, r"document_ids of row 0 must be 1-based"),
        ([Row([2, 1])], {}, r"row 0 has 1 placeholder tokens 1, but its 0 images of 0 views need 0"),
        (
            [Row([2], media=[Media(np.ones((16, 4)), ((4, 4),))])],
            {},
            r"has 0 placeholder .* 1 images of 1 views need 1",
        ),
        (
            [Row([1, 2, 1], media=[Media(np.ones((32, 4)), ((4, 8),))])],
            {},
            r"needs 2 tokens 1 in a row at 0 for view 1",
        ),
        ([Row([1, 1], None, [1, 2], [Media(np.ones((32, 4)), ((4, 8),))])], {}, r"all in one document"),
        (
            [Row([1], media=[Media(np.ones((8, 4)), ((2, 0),))])],
            {"num_patches": 16},
            r"the grids \(\(2, 0\),\): .* at least one view \(h, w\), and none empty",
        ),
        ([Row([1], media=[Media(np.ones((16, 3)), ((4, 4),))])], {}, r"patches of shape \(16, 3\) for the grids"),
    ],
)
def test_prepare_refuses(rows, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(CONFIG, rows, **options)


@pytest.mark.parametrize("shape", [(8, 8), (8, 1, 1), (8, 8, 3), (0, 8, 1)])
def test_patchify_refuses(shape):
    with pytest.raises(ValueError, match=r"a view of shape .* was given"):
        patchify(CONFIG.vision, [np.zeros(shape)])
