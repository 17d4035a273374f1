"""Packing: every record in one pack, none over budget, the same everywhere; and few shapes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpjax.train.data.packing import bucket_shapes, choose_bucket, first_fit_decreasing, pack_records

SIZES = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 100)), min_size=1, max_size=60)
BUDGET = (64, 100)


def by_hand(sizes, budget):
    """First-fit decreasing, one comparison at a time."""
    shares = [max(t / budget[0], p / budget[1]) for t, p in sizes]
    packs = []
    for item in sorted(range(len(sizes)), key=lambda i: -shares[i]):
        for pack in packs:
            if all(sum(sizes[i][axis] for i in [*pack, item]) <= budget[axis] for axis in (0, 1)):
                pack.append(item)
                break
        else:
            packs.append([item])
    return packs


@pytest.mark.quick
@given(SIZES)
def test_packs_hold_every_record_once_and_keep_the_budget(sizes):
    packs = first_fit_decreasing(np.array(sizes), BUDGET)
    assert sorted(item for pack in packs for item in pack) == list(range(len(sizes)))
    for pack in packs:
        assert (np.array(sizes)[pack].sum(axis=0) <= BUDGET).all()
    assert packs == by_hand(sizes, BUDGET)


@given(SIZES, st.integers(0, 3))
def test_a_seed_draws_the_order_but_loses_no_record(sizes, seed):
    packs = pack_records(np.array(sizes), BUDGET, seed)
    assert sorted(item for pack in packs for item in pack) == list(range(len(sizes)))
    assert packs == pack_records(np.array(sizes), BUDGET, seed)


def test_windows(monkeypatch):
    monkeypatch.setattr("cpjax.train.data.packing.WINDOW", 7)
    sizes = np.random.default_rng(0).integers(1, 30, (40, 2))
    packs = pack_records(sizes, BUDGET, 0)
    assert sorted(item for pack in packs for item in pack) == list(range(40))
    assert pack_records(sizes, BUDGET, 1) != packs


def test_rows_are_nearly_full():
    sizes = np.stack([np.random.default_rng(0).integers(10, 1500, 3000), np.zeros(3000, int)], axis=1)
    packs = first_fit_decreasing(sizes, (4096, 0))
    assert sizes.sum() / (4096 * len(packs)) > 0.99


def test_packs_do_not_depend_on_the_hash_seed():
    code = (
        "import numpy as np; from cpjax.train.data.packing import pack_records;"
        "print(pack_records(np.random.default_rng(5).integers(1, 30, (99, 2)), (64, 100), 3))"
    )
    seed = str(1 + (os.environ.get("PYTHONHASHSEED") == "1"))  # another than here
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
    ).stdout.decode()
    assert said == f"{pack_records(np.random.default_rng(5).integers(1, 30, (99, 2)), (64, 100), 3)}\n"


def test_an_item_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"item 1 takes \[3, 101\]: the budget of a pack is \[64, 100\]"):
        first_fit_decreasing(np.array([[1, 1], [3, 101]]), BUDGET)


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 6), st.sampled_from([(1, 1), (8, 4), (6, 4)]))
def test_shapes_are_few_and_hold_every_row(length, patches, count, units):
    shapes = bucket_shapes(length, patches, count, units)
    assert 1 <= len(shapes) <= count
    assert all(n % unit == 0 for shape in shapes for n, unit in zip(shape, units, strict=True))
    for fraction in (1, 0.6, 0.3, 0):
        sizes = np.array([[max(int(fraction * length), 1), int(fraction * patches)], [1, 0]])
        tokens, room = choose_bucket(shapes, sizes)
        assert tokens >= sizes[0, 0] and room >= sizes[0, 1]


def test_shapes():
    shapes = bucket_shapes(100, 48, 3, (8, 4))
    assert shapes == [(32, 12), (56, 24), (104, 48)]
    assert choose_bucket(shapes, np.array([[20, 12], [33, 0]])) == (56, 24)
    assert choose_bucket(shapes, np.array([[20, 40]])) == (104, 48)
