"""`python -m cpjax.train.replay RUN/nonfinite-N.npz` says which tensor of a batch that stopped a run is not finite."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cpjax.loss import cross_entropy
from cpjax.mesh import make_mesh
from cpjax.shard import IGNORE, Identity, Sharder, make_sharder
from cpjax.train.checkpoint import Checkpoints, read_run
from cpjax.train.devices import set_up_devices
from cpjax.train.dropout import draw_anew, start_dropout
from cpjax.train.errors import run_command
from cpjax.train.loop import prepare
from cpjax.train.step import Arrays, TrainState, merge_model
from cpjax.train.task import read_model_config


def main() -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cpjax.train.replay", description=__doc__)
    parser.add_argument("batch", type=pathlib.Path, help="the file that the run has named, RUN/nonfinite-N.npz")
    options = parser.parse_args()
    return run_command(lambda: replay(options.batch))


def replay(file: pathlib.Path) -> int:
    """Computes the saved batch once more, on one device, and prints what is not finite.

    Raises:
        ValueError: not such a file, or its run or checkpoint is missing.
    """
    name = re.fullmatch(r"nonfinite-(\d+)\.npz", file.name)
    if name is None or not file.is_file():
        raise ValueError(f"{file} is no saved batch: give the file nonfinite-N.npz in the folder of a run")
    try:
        with np.load(file) as arrays:  # no pickles: they run what they name
            batch = dict(arrays)
    except (ValueError, zipfile.BadZipFile, EOFError, zlib.error):
        raise ValueError(f"{file} does not hold the arrays that a run has saved: give it as it was written") from None
    rows = {len(batch[stream]) for stream in ("input_ids", "pixel_values") if stream in batch}
    if len(rows) > 1:
        raise ValueError(f"{file} was laid out as packed, with images, which cannot be computed by itself: try zigzag")
    config = read_run(file.parent)
    set_up_devices(1)
    mesh = make_mesh()
    graphdef, state, _, names = prepare(config, read_model_config(config), mesh)
    with contextlib.closing(Checkpoints(config)) as checkpoints:
        state = checkpoints.read(int(name[1]), state, mesh)
    forward = {"dtype": jnp.dtype(config.model.compute), "kernel": config.mesh.kernel, "remat": config.model.remat}
    sharder = make_sharder(batch["input_ids"].shape[1], Identity())
    found = nonfinite(graphdef, state, batch, sharder, names, **forward)
    print("\n".join(found) if found else "everything is finite here: computed on another mesh, it may round otherwise")
    return 0


def nonfinite(
    graphdef: nnx.GraphDef,
    state: TrainState,
    batch: Mapping[str, Any],
    sharder: Sharder,
    names: Mapping[str, Sequence[str]],
    **forward: Any,
) -> list[str]:
    """What is not finite, in words, in the order of the computation: what comes first is named, and what follows it.

    Args:
        state: after the step that could not be taken.
        batch: of that step, whole.
        names: of the parameters, in the Hugging Face folder.
    """
    scale = 2 * state.loss_scale.scale if state.loss_scale else 1  # it has been halved since
    frozen, numbered = draw_anew(state.frozen, dict(batch), state.step - 1)
    valid = (batch["labels"] != IGNORE).sum()

    def loss(params: Arrays) -> tuple[jax.Array, Arrays]:
        model = merge_model(graphdef, params, frozen)
        start_dropout(model, numbered, sharder)
        hidden = model(numbered, sharder, **forward)
        head, softcap = model.head().astype(hidden.dtype), getattr(model, "logit_softcap", None)
        value, _ = cross_entropy(hidden, head, batch["labels"], valid_tokens=valid, softcap=softcap)
        return value * scale, {"the final hidden states": hidden, "the loss": value}

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    stages = {
        "parameter": state.params | state.frozen,
        "stream": batch,
        "result": outputs,
        "gradient": gradients,
    }
    said = []
    for stage, arrays in stages.items():
        bad = [
            (names.get(path) or (path,))[0]
            for path, array in arrays.items()
            if jnp.issubdtype(array.dtype, jnp.inexact) and not jnp.isfinite(array).all()
        ]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            said.append(f"{stage}: {bad[0]}{more} of {len(arrays)}")
    return said


if __name__ == "__main__":
    sys.exit(main())
