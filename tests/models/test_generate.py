"""Generation with a cache: against transformers, the full forward, and on a mesh."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models import family
from cpjax.models import generate as module
from cpjax.models.common.checkpoint import parameter_sharding
from cpjax.models.generate import generate, sample
from cpjax.models.qwen3_5 import STREAMS, Media, Row, decode, prefill, prepare
from cpjax.shard import Identity, make_batch

from .families import CONFIGS
from .qwen3_5_cases import FOLDER, GOLDENS, golden, golden_model, golden_rows, small_model

OPTIONS = {"xla_backend_optimization_level": 0}  # halves the compile time
UNUSED = 95
"""A token that the golden model does not write here; with one stop token, all calls are one program."""


@functools.cache
def golden_prompts():
    config = golden_model().config
    return [row for name in ("text", "images", "video") for row in golden_rows(golden(name), config)]


@pytest.mark.quick
def test_greedy_tokens_equal_those_of_transformers():
    """Text, images and video of different lengths in one batch."""
    wanted = golden("generated")["tokens"].tolist()
    assert len({len(row.input_ids) for row in golden_prompts()}) == 5 and len(set(itertools.chain(*wanted))) > 30
    assert generate(golden_model(), golden_prompts(), 12, stop_tokens=[UNUSED]) == wanted


def test_stops_are_those_of_transformers():
    torch = pytest.importorskip("torch", reason="torch, which generates the wanted tokens, is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from .make_goldens.qwen3_5 import generated

    stop = golden("generated")["tokens"][1][6].item()
    got = generate(golden_model(), golden_prompts(), 12, stop_tokens=[stop])
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(FOLDER).float().eval()
    assert got == generated(GOLDENS, model, stop=stop)
    assert len({len(row) for row in got}) > 1


def test_one_program_for_prompts_of_about_one_length():
    model, prompts = golden_model(), golden_prompts()
    before = module._generate._cache_size()
    wanted = generate(model, prompts, 12, stop_tokens=[UNUSED])
    shorter = [Row(prompts[0].input_ids[-9:]), *prompts[1:]]
    got = generate(model, shorter[::-1], 12, stop_tokens=[UNUSED])[::-1]
    assert got[1:] == wanted[1:] and got[0] != wanted[0]
    assert module._generate._cache_size() <= max(before, 1)


def in_float64(model):
    graph, params = nnx.split(model)
    return graph, jax.tree.map(lambda x: x.astype(jnp.float64), params)


def test_decoding_equals_the_full_forward_in_float64():
    """Prompts padded in front, two documents, images, and an image at the end; against whole rows padded behind."""
    config, rng, count = small_model().config, np.random.default_rng(5), 7

    def media(*grid, modality="image"):
        return Media(rng.normal(size=(np.prod(grid), config.vision.patch_dim)).astype(np.float32), grid, modality)

    image, video = config.image_token_id, config.video_token_id
    rows = [
        Row([3, 4, 5, *[image] * 3, 6, 7, *[image] * 2], media=[media(1, 2, 6), media(1, 4, 2)]),
        Row([8, *[video] * 4, 9, *[video] * 4, 10, 11, 12], None, [1] * 6 + [2] * 7,
            [media(1, 4, 4, modality="video"), media(1, 4, 4, modality="video")]),
        Row([20]),
    ]  # fmt: skip

    @functools.partial(jax.jit, compiler_options=OPTIONS)
    def by_cache(params, batch):
        model = nnx.merge(graph, params)

        def step(carry, _):
            hidden, cache = carry
            logits = model.logits(hidden)
            tokens = jnp.argmax(logits, -1)
            return decode(model, tokens, cache), (tokens, logits)

        out = jax.lax.scan(step, prefill(model, batch, count), length=count)[1]
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)

    @functools.partial(jax.jit, compiler_options=OPTIONS)
    def at_once(params, batch, sharder):
        model = nnx.merge(graph, params)
        return model.logits(model(batch, sharder))

    with jax.enable_x64(True):
        graph, params = in_float64(small_model())
        prompts = {name: array for name, (array, _) in module._host_batch(small_model(), rows, range(3)).items()}
        tokens, logits = map(np.asarray, by_cache(params, prompts))
        assert logits.dtype == np.float64 and not np.isin(tokens, [image, video]).any()
        grown = [
            Row(
                [*row.input_ids, *new],
                document_ids=None if row.document_ids is None else [*row.document_ids, *[2] * count],
                media=row.media,
            )
            for row, new in zip(rows, tokens, strict=True)
        ]
        batch, sharder = make_batch(prepare(config, grown, length=24), Identity(), streams=STREAMS)
        full = np.asarray(at_once(params, batch, sharder))
    for row, found, new, wanted in zip(rows, logits, tokens, full, strict=True):
        wanted = wanted[len(row.input_ids) - 1 :][:count]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(new, wanted.argmax(-1))


@pytest.mark.parametrize(("name", "side"), [("qwen3_5", 3), ("gemma4", 3), ("step3p7", 4)])
def test_images_of_any_number_of_patches(name, side):
    """Where 9 of them become a token, and views of Step 3.7 of any size: as rows without pads of patches go on."""
    source, config, rng = family(name), CONFIGS[name], np.random.default_rng(3)
    config = source.reduced(config)
    if name == "qwen3_5":
        config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, spatial_merge_size=side))
    vision = config.vision
    assert vision.spatial_merge_size == side
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    height, width = (11, 6) if name == "step3p7" else (3 * side, side)  # in patches
    pixels = rng.normal(size=(height * vision.patch_size, width * vision.patch_size, channels))
    media = source.patchify(vision, [pixels] if name == "step3p7" else pixels)
    tokens = -(-height // side) * -(-width // side)
    assert len(media.patches) == tokens * side**2 and tokens in (3, 6)
    rows = [source.Row([9, *[config.image_token_id] * tokens, 11, 12], media=[media]), source.Row([13, 14])]
    model = jax.jit(lambda: nnx.split(source.Model(config, rngs=nnx.Rngs(0))), compiler_options=OPTIONS)()
    model = nnx.merge(*model)
    news = generate(model, rows, 3)
    grown = [source.Row([*row.input_ids, *new], media=row.media) for row, new in zip(rows, news, strict=True)]
    batch, sharder = make_batch(source.prepare(config, grown), Identity(), streams=source.STREAMS)
    assert batch["pixel_values"].shape[1] == len(media.patches)

    @functools.partial(jax.jit, compiler_options=OPTIONS)
    def at_once(params, batch, sharder):
        model = nnx.merge(graph, params)
        return model.logits(model(batch, sharder, remat="none")).argmax(-1)

    graph, params = nnx.split(model)
    for row, new, found in zip(rows, news, np.asarray(at_once(params, batch, sharder)).tolist(), strict=True):
        assert found[len(row.input_ids) - 1 :][:3] == new


def test_bfloat16_keeps_states_in_float32():
    graph, params = nnx.split(small_model())
    prompt = {name: array for name, (array, _) in module._host_batch(small_model(), [Row([1, 2])], [0]).items()}

    def two_tokens(params):
        model = nnx.merge(graph, params)
        hidden, cache = prefill(model, prompt, 1, jnp.bfloat16)
        return hidden, cache, decode(model, jnp.argmax(model.logits(hidden), -1), cache)

    hidden, cache, (next_hidden, next_cache) = jax.eval_shape(two_tokens, params)
    assert hidden.dtype == next_hidden.dtype == jnp.bfloat16
    assert [[x.dtype.name for x in kept] for kept in cache.kept] == [["bfloat16", "float32"], ["bfloat16"] * 2]
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, next_cache)


def test_draws_depend_on_seed_and_row_alone():
    """Not on the batch, the other prompts, or the mesh, over whose devices rows are split."""
    model, prompt, other = small_model(), Row([3, 1, 4, 1, 5]), Row([9, 2, 6])
    options = dict(temperature=1.5, top_p=0.9)
    first = generate(model, [prompt] * 3, 10, batch_size=2, **options)
    assert len(set(map(tuple, first))) == 3
    again = generate(model, [other, prompt], 10, batch_size=2, **options)
    assert again[1] == first[1] and again[0] != first[0]
    assert generate(model, [prompt] * 2, 10, seed=1, **options)[0] != first[0]
    mesh = make_mesh(fsdp=2, cp=2)
    assert generate(model, [prompt] * 3, 10, mesh=mesh, **options) == first


def test_the_cache_is_split_by_rows_and_changed_in_place(capfd):
    """Of the compiled program: beside its part of keys and values a device holds less than as much again.

    XLA's partitioner does not warn that it finds no way from one layout of hidden states to the next.
    """
    count, rows, mesh = 4096, [Row([1, 2, 3])] * 4, make_mesh(fsdp=2, cp=2)
    graph, params = nnx.split(small_model())
    params = jax.tree.map(lambda x: jax.device_put(x, parameter_sharding(mesh, x.shape)), params)
    with jax.set_mesh(mesh):
        batch = module._place(module._host_batch(small_model(), rows, range(4)), mesh)
        stops = jnp.zeros(1, jnp.int32)
        program = module._generate.lower(params, batch, stops, None, 0, graphdef=graph, count=count).compile()
    assert "rematerialization" not in capfd.readouterr().err
    text = small_model().config.text
    layers = text.types.count("full_attention")
    share = layers * 2 * (module.MIN_LENGTH + count) * text.num_key_value_heads * text.head_dim * 4
    assert program.memory_analysis().temp_size_in_bytes < 2 * share


def test_draws_follow_the_probabilities_of_the_most_likely_tokens():
    probabilities = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
    keys = jax.random.split(jax.random.key(0), 20_000)

    def shares(temperature, top_p):
        draw = jax.jit(jax.vmap(sample, (0, None, None, None)))
        tokens = draw(keys, jnp.log(probabilities), jnp.float32(temperature), jnp.float32(top_p))
        return np.bincount(tokens, minlength=5) / len(keys)

    for temperature, top_p, kept in ((1.0, 1.0, range(5)), (0.5, 1.0, range(5)), (2.0, 0.6, [1, 3, 4]), (1, 0.3, [1])):
        sharpened = probabilities ** (1 / temperature)
        wanted = np.where(np.isin(range(5), kept), sharpened, 0)
        found = shares(temperature, top_p)
        assert set(np.flatnonzero(found)) == set(kept)
        np.testing.assert_allclose(found, wanted / wanted.sum(), atol=0.015)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_new_tokens=0), r"max_new_tokens=0 must be at least 1"),
        (dict(temperature=-1.0), r"temperature=-1.0 must not be negative"),
        (dict(top_p=0.0), r"top_p=0.0 must be in \(0, 1\]"),
        (dict(batch_size=0), r"batch_size=0 must be a multiple of 1"),
        (dict(batch_size=6, mesh=make_mesh(cp=4)), r"batch_size=6 must be a multiple of 4, the devices"),
        (dict(), r"in the batch of prompts \[1, 0\], counted from 0: row 1 has the value 96 in input_ids"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generate(small_model(), [Row([1, 96]), Row([1])], **{"max_new_tokens": 1, **options})


def test_no_prompts_no_texts():
    assert generate(small_model(), [], 5) == []
