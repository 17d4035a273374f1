"""The same losses for ten steps, however rows, tokens and layers are split: ten configurations, drawn by chance."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.qwen3_5 import STREAMS, Model, Row, prepare
from cpjax.shard import Packed, layout_from_name, make_batch

from . import small

STEPS = 10

MODEL = dataclasses.replace(
    small.MODEL,
    text=dataclasses.replace(
        small.MODEL.text, layer_types=("linear_attention", "full_attention"), num_attention_heads=4,
        num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Configuration:
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    accumulate: int = 1
    documents: int = 1
    layout: str = "zigzag"
    transport: str = "ring"

    @property
    def valid(self):
        rows, devices = self.dp * self.fsdp * self.accumulate, self.dp * self.fsdp * self.cp * self.tp
        return rows <= small.ROWS and 1 < devices <= 8 and (self.layout != "packed" or self.cp > 1)

    def __str__(self):
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return " ".join(f"{name}={value}" for name, value in given.items() if value != 1)


def draw(count, seed):
    """Different valid ones of one document a row, of every layout; all else is as likely as the next."""
    rng, found, layouts = random.Random(seed), [], ("zigzag", "packed", "contiguous", "packed", "striped")
    while len(found) < count:
        configuration = Configuration(
            dp=rng.choice([1, 2]), fsdp=rng.choice([1, 2]), cp=rng.choice([1, 2, 4]), tp=rng.choice([1, 2]),
            accumulate=rng.choice([1, 2]), layout=layouts[len(found) % 5],
            transport=rng.choice(["ring", "allgather", "ulysses", "auto"]),
        )  # fmt: skip
        if configuration.valid and configuration not in found:
            found.append(configuration)
    return found


DRAWN = [dataclasses.replace(drawn, documents=documents) for drawn in draw(5, seed=1504) for documents in (1, 3)]


def make(c):
    """Rows of so many documents, up to three; the rows of `small` otherwise, of several lengths, one without a label.

    Returns:
        The batch and its sharder.
    """
    rows = [
        Row(row.input_ids, row.labels, 1 + np.arange(len(row.input_ids)) * c.documents // small.LENGTH)
        for row in small.make_rows()
    ]
    batch, layout, parts = prepare(MODEL, rows), layout_from_name(c.layout, c.cp), c.dp * c.fsdp * c.accumulate
    if not isinstance(layout, Packed):
        return make_batch(batch, layout, streams=STREAMS)
    length = (
        small.ROWS // parts * layout.pad_length(small.LENGTH + 2 * layout.divisor)
    )  # for three documents as for one
    return make_batch(batch, layout, streams=STREAMS, packed_rows=parts, padded_length=length)


@functools.cache
def program(c):
    """The compiled step, and the state before it."""
    run = small.Run(
        mesh=make_mesh(c.dp, c.fsdp, c.cp, c.tp), batch=make(c), model=Model(MODEL, rngs=nnx.Rngs(0)),
        accumulate=c.accumulate, name="sgd", lr=0.5, clip=0.5, forward={"transport": c.transport, "remat": "none"},
    )  # fmt: skip
    return run, run.state


@functools.cache
def losses(c):
    run, start = program(dataclasses.replace(c, documents=1))
    batch, run.sharder = make(c)
    run.state = jax.tree.map(jnp.copy, start)  # the step takes its state away
    return [run(batch)["loss"] for _ in range(STEPS)]


@pytest.mark.parametrize("configuration", DRAWN, ids=str)
def test_same_losses_as_unsplit(configuration):
    wanted = losses(Configuration(documents=configuration.documents))
    assert wanted[-1] < 0.5 * wanted[0]
    assert losses(configuration) == pytest.approx(wanted, rel=1e-5)


def test_every_choice_is_among_them():
    for field in dataclasses.fields(Configuration):
        assert len({getattr(configuration, field.name) for configuration in DRAWN}) > 1, field.name
    assert any(c.tp > 1 and c.cp > 1 and c.fsdp > 1 for c in DRAWN)
    packed = [c for c in DRAWN if c.layout == "packed"]
    assert all(any(getattr(c, name) > 1 for c in packed) for name in ("dp", "fsdp", "accumulate"))
