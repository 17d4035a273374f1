"""The same losses for ten steps, however rows, tokens, layers and parameters are split: ten configurations, by chance."""

import dataclasses
import functools
import random

import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.qwen3_5 import STREAMS, Model, Row, prepare
from cpjax.shard import layout_from_name, make_batch

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
        return rows <= small.ROWS and 1 < devices <= 8 and (self.layout != "packed" or rows == 1)

    def __str__(self):
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return " ".join(f"{name}={value}" for name, value in given.items() if value != 1)


def draw(count, seed=0):
    """Different valid ones, of every layout; all else is as likely as the next."""
    rng, found, layouts = random.Random(seed), [], ("zigzag", "contiguous", "striped", "packed")
    while len(found) < count:
        configuration = Configuration(
            dp=rng.choice([1, 2]), fsdp=rng.choice([1, 2]), cp=rng.choice([1, 2, 4]), tp=rng.choice([1, 2]),
            accumulate=rng.choice([1, 2]), documents=rng.choice([1, 3]), layout=layouts[len(found) % 4],
            transport=rng.choice(["ring", "allgather", "ulysses", "auto"]),
        )  # fmt: skip
        if configuration.valid and configuration not in found:
            found.append(configuration)
    return found


DRAWN = draw(10)


def make_rows(documents):
    """Rows of so many documents, up to three; the rows of `small` otherwise, of several lengths and one without a label."""
    rows = small.make_rows()
    return [Row(row.input_ids, row.labels, 1 + np.arange(len(row.input_ids)) * documents // 21) for row in rows]


def losses(c):
    mesh = make_mesh(c.dp, c.fsdp, c.cp, c.tp)
    batch = make_batch(prepare(MODEL, make_rows(c.documents)), layout_from_name(c.layout, c.cp), streams=STREAMS)
    model = Model(MODEL, rngs=nnx.Rngs(0))
    run = small.Run(
        mesh=mesh, batch=batch, model=model, accumulate=c.accumulate, transport=c.transport, lr=0.01, clip=0.5
    )
    return [run()["loss"] for _ in range(STEPS)]


@functools.cache
def unsplit(documents):
    return losses(Configuration(documents=documents))


@pytest.mark.parametrize("configuration", DRAWN, ids=str)
def test_same_losses_as_unsplit(configuration):
    wanted = unsplit(configuration.documents)
    assert wanted[-1] < 0.9 * wanted[0]
    assert losses(configuration) == pytest.approx(wanted, rel=1e-5)


def test_every_choice_is_among_them():
    for field in dataclasses.fields(Configuration):
        assert len({getattr(configuration, field.name) for configuration in DRAWN}) > 1, field.name
    assert any(c.tp > 1 and c.cp > 1 and c.fsdp > 1 for c in DRAWN)
