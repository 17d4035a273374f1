"""What a run tells about its model: parameters by part, how far each part moved, and the model card."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from jax.sharding import Mesh

from cpjax.train import digits
from cpjax.train.config import Config
from cpjax.train.step import Arrays, place_arrays, split_model

_PARTS = {
    "merger": r"merger|projector",
    "audio tower": r"audio",
    "vision tower": r"visual|vision",
    "embeddings": r"embed_tokens",
    "head": r"lm_head",
    "layers": r"",
}
"""Parts of a vision-language model: the first whose pattern is in the Hugging Face name."""


def by_part(arrays: Arrays, names: Mapping[str, Sequence[str]]) -> dict[str, Arrays]:
    """Splits arrays into the parts of a model, in the order of a forward pass; buffers without a name are left out."""
    order = ("vision tower", "merger", "audio tower", "embeddings", "layers", "head")
    parts: dict[str, Arrays] = {part: {} for part in order}
    for path, array in arrays.items():
        if path in names:
            part = next(part for part, pattern in _PARTS.items() if re.search(pattern, names[path][0]))
            parts[part][path] = array
    return {part: found for part, found in parts.items() if found}


def describe_parameters(arrays: Arrays, names: Mapping[str, Sequence[str]]) -> str:
    """Number of parameters, in all and by part."""
    counts = {part: sum(array.size for array in found.values()) for part, found in by_part(arrays, names).items()}
    return f"{sum(counts.values()):,}: " + ", ".join(f"{part} {count:,}" for part, count in counts.items())


def relative_change(model: Any, trained: Any, names: Mapping[str, Sequence[str]], mesh: Mesh) -> dict[str, float]:
    """|trained - model| / |model| of each part, Euclidean norms over all its parameters.

    Buffers do not count: they never move, and some are infinite.

    Args:
        model: as it was at the start, without adapters; not placed yet.
        trained: the same model now, its adapters merged.
    """
    (_, before, _), (_, after, _) = split_model(model), split_model(trained)
    before = place_arrays(before, mesh)

    @jax.jit
    def norms(before: Arrays, after: Arrays) -> tuple[jax.Array, jax.Array]:
        wide = {path: jnp.promote_types(array.dtype, jnp.float32) for path, array in before.items()}
        moved = sum(jnp.sum(jnp.square(after[p].astype(wide[p]) - before[p].astype(wide[p]))) for p in before)
        start = sum(jnp.sum(jnp.square(before[p].astype(wide[p]))) for p in before)
        return jnp.sqrt(moved), jnp.sqrt(start)

    changes = {}
    for part, start in by_part(before, names).items():
        moved, norm = norms(start, {path: after[path] for path in start})
        changes[part] = float(moved / norm)
    return changes


def write_card(folder: pathlib.Path, config: Config, result: Mapping[str, Any], model_class: str) -> None:
    """Writes the model card. Its header also holds the data options, with which `cpjax.train.evaluate` asks."""
    kinds = {name.split("/")[1]: value for name, value in result.items() if name.startswith("held_out_accuracy/")}
    header = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "license": digits.LICENSE,
        "tags": ["vision-language", "context-parallel", "cpjax"],
        "cpjax": {"data": config.to_dict()["data"], "cp": config.mesh.cp},
    }
    accuracy = "Not measured at this step."
    if "held_out_accuracy" in result:
        accuracy = f"""{result["held_out_accuracy"]:.4f} of the answers about held-out documents are right in every
digit; images in them are not among the training images. By kind of question:

| question | accuracy |
|---|---|
""" + "".join(f"| {kind} | {value:.4f} |\n" for kind, value in kinds.items())
    (folder / "README.md").write_text(f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {model_class}, {"fine-tuned" if config.model.path else "trained from scratch"} on long documents of handwritten digits

{digits.describe(config.data)} Trained by cpjax for {config.run.steps} steps of {config.run.batch_size} documents
(seed {config.run.seed}), every document split over {config.mesh.cp} device(s), {config.mesh.layout} layout. The weights
are those of step {result["step"]}.

## Accuracy

{accuracy}
## Data

{digits.SOURCE}

## How to load it

```python
from transformers import {model_class}
model = {model_class}.from_pretrained("path/to/this/folder")
```

or `cpjax.models.from_pretrained("path/to/this/folder")`. It has no tokenizer: a token is a word of
`cpjax.train.digits.VOCABULARY`. Try it: `python -m cpjax.train.evaluate path/to/this/folder`.
""")
