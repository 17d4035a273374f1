"""Operations that a batch needs, beside a count from the model's own matrices and from every pair of tokens."""

import numpy as np
import pytest
from flax import nnx

from cpjax.models import family
from cpjax.shard import Identity, Packed, make_batch

from . import gemma4_cases, step3p7_cases


def sizes(model):
    """Numbers in each parameter, by its dotted path."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): int(np.prod(leaf.get_value().shape)) for path, leaf in state}


def pairs(ids, near=None):
    """Number of pairs (i, j) of entries of the same id > 0 in a row; `near` says which, by i - j and the rows."""
    i, j = np.mgrid[: ids.shape[1], : ids.shape[1]]
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
    return int((same if near is None else same & near(i - j)).sum())


@pytest.mark.parametrize("name", ["gemma4", "gemma4_e", "gemma4_moe"])
def test_gemma4(name):
    model, case = gemma4_cases.golden_model(name), gemma4_cases.golden(f"{name}-media")
    config, module = model.config, family("gemma4")
    text, vision, audio = config.text, config.vision, config.audio
    rows = gemma4_cases.golden_rows(case, config)
    batch = module.prepare(config, rows)
    tokens, patches = int((~batch["padding_mask"]).sum()), int((batch["vision_segment_ids"] > 0).sum())
    used = sizes(model)
    wanted = 2 * tokens * used["embed_tokens"]
    for path, size in used.items():
        if path.startswith("visual.") and path.endswith("kernel"):
            wanted += 2 * size * patches / (vision.pooling_kernel_size**2 if "projection" in path else 1)
        elif ".experts." in path:
            wanted += 2 * size * tokens * text.top_k_experts / text.num_experts
        elif path.endswith("kernel") and not path.startswith("audio."):
            wanted += 2 * size * tokens
    groups = batch["vision_group_ids"] if "vision_group_ids" in batch else np.full_like(batch["input_ids"], -1)
    together = (groups[:, :, None] == groups[:, None, :]) & (groups[:, :, None] >= 0)
    seen = {
        "full_attention": pairs(batch["document_ids"], lambda back: back >= 0),
        "sliding_attention": pairs(
            batch["document_ids"], lambda back: (back < text.sliding_window) & ((back >= 0) | together)
        ),
    }
    wanted += sum(4 * text.num_attention_heads * text.width(kind) * seen[kind] for kind in text.types)
    wanted += 4 * vision.num_hidden_layers * vision.num_attention_heads * vision.head_dim * pairs(
        batch["vision_segment_ids"]
    )  # fmt: skip
    if audio:
        for sound in (sound for row in rows for sound in row.sounds):
            frames, bins = sound.shape
            half, quarter = -(-frames // 2), -(-frames // 4)
            wanted += 2 * used["audio.layer0.conv"] * half * bins // 2
            wanted += 2 * used["audio.layer1.conv"] * quarter * bins // 4
            own = [size for path, size in used.items() if path.startswith("audio.") and path.endswith(("kernel", "1d"))]
            wanted += 2 * quarter * (sum(own) - used["audio.blocks.self_attn.relative_k_proj.kernel"])
            context = audio.attention_context_left - 1
            near = pairs(np.ones((1, quarter), int), lambda back: (back >= 0) & (back < context))  # noqa: B023
            wanted += 6 * audio.num_hidden_layers * audio.hidden_size * near
        assert any(row.sounds for row in rows)
    assert module.forward_flops(config, batch) == pytest.approx(wanted, rel=1e-12)

    packed = [make_batch(batch, layout, streams=module.STREAMS)[0] for layout in (Identity(), Packed(2))]
    assert packed[1]["input_ids"].shape[0] == 1 < packed[0]["input_ids"].shape[0]
    for other in packed:
        assert module.forward_flops(config, other) == pytest.approx(wanted, rel=1e-12)


def test_step3p7():
    model = step3p7_cases.golden_model()
    config, module = model.config, family("step3p7")
    text, vision = config.text, config.vision
    batch = module.prepare(config, step3p7_cases.golden_rows(step3p7_cases.golden(), config))
    tokens, patches = int((~batch["padding_mask"]).sum()), int((batch["vision_segment_ids"] > 0).sum())
    used = {path: size for path, size in sizes(model).items() if path.endswith(("kernel", "_proj"))}
    blocks = {"projector": 16, "visual.downsampler2": 16, "visual.downsampler1": 4}
    wanted = 2 * tokens * used["lm_head.kernel"] * len(text.mtp_layers)  # once more for each head
    for path, size in used.items():
        if path.startswith(("visual.", "projector.")):
            wanted += 2 * size * patches / blocks.get(path.removesuffix(".kernel"), 1)
        else:
            share = text.num_experts_per_tok / text.n_routed_experts if ".experts." in path else 1
            wanted += 2 * size * tokens * share
    for layer in text.layers + text.mtp_layers:
        window = text.sliding_window if layer.sliding else tokens
        seen = pairs(batch["document_ids"], lambda back: (back >= 0) & (back < window))  # noqa: B023
        wanted += 4 * text.heads(layer) * text.head_dim * seen
    wanted += 4 * vision.num_hidden_layers * vision.hidden_size * pairs(batch["vision_segment_ids"])
    assert module.forward_flops(config, batch) == pytest.approx(wanted, rel=1e-12)
    assert len(text.mtp_layers) == 2
