"""What the tests of Gemma 4 share: the golden files as rows, and the gradients of the loss on a mesh."""

import functools

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from cpjax.models import from_pretrained
from cpjax.models.gemma4 import Media, Row
from tests.rendezvous import unordered

from .qwen3_5_cases import GOLDENS, loss_of


@functools.cache
def golden_model(name, dtype=None):
    return from_pretrained(GOLDENS / name, dtype=dtype)


@functools.cache
def golden(name):
    return load_file(GOLDENS / f"{name}.safetensors")


def golden_rows(case, config):
    """The rows of a golden batch; its images and videos are dealt out in the order of their placeholders."""
    queues = {
        config.image_token_id: media_of(case, config, "pixel_values", "image_position_ids", "image"),
        config.video_token_id: media_of(case, config, "pixel_values_videos", "video_position_ids", "video"),
    }
    lengths = case["input_features_mask"].sum(1) if "input_features" in case else []
    sounds = [case["input_features"][i][:length] for i, length in enumerate(lengths)]
    rows = []
    for ids, labels, mask in zip(case["input_ids"], case["labels"], case["attention_mask"], strict=True):
        ids, labels, media, token = ids[mask == 1], labels[mask == 1], [], 0
        while token < len(ids):
            if ids[token] in queues:
                media.append(queues[ids[token]].pop(0))
                count = media[-1].grid[0] * media[-1].grid[1] * media[-1].grid[2] // 4
                token += np.flatnonzero(ids[token:] == ids[token])[count - 1]
            token += 1
        starts = ids == config.audio_token_id
        own = int((starts & ~np.concatenate([[False], starts[:-1]])).sum()) if sounds else 0
        rows.append(Row(ids, labels, media=media, sounds=sounds[:own]))
        sounds = sounds[own:]
    return rows


def media_of(case, config, pixels, positions, modality):
    """Images, or videos with all their frames; transformers has the patches of a frame row by row, then pads."""
    if pixels not in case:
        return []
    ends = np.cumsum(case.get("num_frames_per_video", np.ones(len(case[pixels]), int)) if modality == "video" else
                     np.ones(len(case[pixels]), int))  # fmt: skip
    pool, media = config.vision.pooling_kernel_size, []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        patches = []
        for frame in range(first, end):
            places = case[positions][frame]
            real = places[:, 0] >= 0
            width, height = places[real].max(0) + 1
            block = [(x // pool + y // pool * (width // pool), y % pool, x % pool) for x, y in places[real].tolist()]
            patches += [case[pixels][frame][i] for i in sorted(range(len(block)), key=block.__getitem__)]
        media.append(Media(np.stack(patches), (int(end - first), int(height), int(width)), modality))
    return media


def value_and_grads(model, batch, sharder, mesh=None, transport="ring"):
    """Loss over valid tokens, its gradient, and the local logits; by way of `shard_map` when there is a mesh."""
    graph, params = nnx.split(model)
    valid = int((np.asarray(batch["labels"]) >= 0).sum())

    def local(params, batch):
        model = nnx.merge(graph, params)
        logits = model.logits(model(batch, sharder, transport=transport, remat="none"))  # which is quicker to compile
        total = loss_of(logits, sharder.take_local(batch["labels"])) / valid
        return total if mesh is None else jax.lax.psum(total, "cp"), logits

    if mesh is None:
        fn = local
    else:
        spec = jax.sharding.PartitionSpec
        fn = jax.shard_map(local, mesh=mesh, in_specs=spec(), out_specs=(spec(), spec(None, "cp")), axis_names={"cp"})
    options = {"xla_backend_optimization_level": 0}  # halves the compile time
    run = jax.jit(jax.value_and_grad(fn, has_aux=True), compiler_options=options).lower(params, batch).compile()
    assert not unordered(run.as_text())
    (loss, logits), grads = run(params, batch)
    return loss, grads, logits
