"""Index maps: partition, inverse, pairing, divisibility (census U2, U3)."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpjax.shard import Contiguous, Identity, Layout, Striped, Zigzag, layout_from_name

NAMES = ("contiguous", "zigzag", "striped")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout of 1 to 16 ranks and a padded length it can split."""
    layout = layout_from_name(
        draw(st.sampled_from(NAMES)), draw(st.integers(1, 16)), multiple=draw(st.sampled_from((1, 2, 3, 4)))
    )
    return layout, layout.pad_length(draw(st.integers(1, 300)))


@pytest.mark.quick
@given(layouts())
def test_ranks_partition_the_sequence(case):
    layout, length = case
    owned = layout.indices(length, np.arange(layout.cp))
    assert owned.shape == (layout.cp, length // layout.cp) and owned.dtype == np.int32
    np.testing.assert_array_equal(np.sort(owned.ravel()), np.arange(length))
    assert (np.diff(owned, axis=1) > 0).all(), "ascending, as take_local tells XLA"
    assert owned.shape[1] % layout.multiple == 0


@given(layouts())
def test_inverse_undoes_the_concatenation_of_ranks(case):
    layout, length = case
    stream = np.arange(length) * 7
    shards = np.concatenate([stream[layout.indices(length, r)] for r in range(layout.cp)])
    np.testing.assert_array_equal(shards[layout.inverse(length)], stream)


@given(layouts())
def test_rank_may_be_an_int_an_array_or_traced(case):
    layout, length = case
    for rank in {0, layout.cp - 1}:
        traced = jax.eval_shape(lambda r: layout.indices(length, r), np.int32(rank))
        assert traced.dtype == np.int32 and traced.shape == (length // layout.cp,)
    with jax.disable_jit():
        everyone = jax.vmap(lambda r: layout.indices(length, r))(np.arange(layout.cp, dtype=np.int32))
    np.testing.assert_array_equal(everyone, layout.indices(length, np.arange(layout.cp)))


@given(layouts())
def test_run_starts_describe_the_runs(case):
    layout, length = case
    if layout.runs == 0:
        with pytest.raises(ValueError, match="runs of consecutive tokens"):
            layout.run_starts(length, 0)
        return
    starts = layout.run_starts(length, np.arange(layout.cp))
    run = length // layout.cp // layout.runs
    rebuilt = (starts[..., None] + np.arange(run)).reshape(layout.cp, -1)
    np.testing.assert_array_equal(rebuilt, layout.indices(length, np.arange(layout.cp)))


def test_zigzag_pairs_the_head_chunk_with_the_tail_chunk():
    # The pairing of torch's round-robin load balancer: chunks r and 2 cp - 1 - r.
    chunks = np.arange(16).reshape(8, 2)
    for rank in range(4):
        wanted = np.concatenate([chunks[rank], chunks[7 - rank]])
        np.testing.assert_array_equal(Zigzag(4).indices(16, rank), wanted)


@pytest.mark.quick
def test_literal_maps():
    assert Contiguous(2).indices(8, 1).tolist() == [4, 5, 6, 7]
    assert Zigzag(2).indices(8, 1).tolist() == [2, 3, 4, 5]
    assert Striped(2).indices(8, 1).tolist() == [1, 3, 5, 7]
    assert Identity().indices(3, 0).tolist() == [0, 1, 2]


@given(st.integers(1, 16), st.sampled_from(NAMES), st.integers(1, 400))
def test_indivisible_length_raises_and_names_the_next_one(cp, name, length):
    layout = layout_from_name(name, cp)
    if length % layout.divisor == 0:
        assert layout.pad_length(length) == length
        return
    with pytest.raises(ValueError, match=f"multiple of {layout.divisor}; pad it to {layout.pad_length(length)}"):
        layout.indices(length, 0)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_r33_padding_is_exactly_cp_times_lcm_of_two_and_tp(cp, tp):
    layout = Zigzag(cp, multiple=tp)
    unit = cp * np.lcm(2, tp)
    assert [layout.pad_length(s) for s in range(1, 100)] == [int(-(-s // unit) * unit) for s in range(1, 100)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Zigzag(0),
        lambda: Contiguous(2, multiple=0),
        lambda: Identity(cp=2),
        lambda: layout_from_name("spiral", 2),
        lambda: layout_from_name("identity", 2),
        lambda: Zigzag(2).indices(8, 2),
        lambda: Zigzag(2).indices(8, -1),
        lambda: Zigzag(2).indices(0, 0),
        lambda: Zigzag(2).pad_length(0),
    ],
)
def test_bad_layouts_ranks_and_lengths_raise_one_sentence(make):
    with pytest.raises(ValueError) as error:
        make()
    assert "\n" not in str(error.value)


def test_layouts_are_values():
    assert Zigzag(2) == Zigzag(2) and hash(Zigzag(2)) == hash(Zigzag(2))
    assert Zigzag(2) != Contiguous(2) and Zigzag(2) != Zigzag(4)
    assert layout_from_name("zigzag", 1) == Identity()


def test_importing_shard_loads_only_jax_and_numpy():
    code = (
        "import sys, jax, numpy; before = set(sys.modules); import cpjax.shard;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert new.strip() in ("['cpjax']", "['cpjax', 'jax']")
