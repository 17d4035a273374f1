"""The verbs: values, gradients, lengths (census U1, U2, U3, F11)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from cpjax.shard import Contiguous, Identity, Zigzag, layout_from_name, make_sharder
from tests.shard.common import assert_every_other_length_raises, mesh_of, on_ranks


@settings(max_examples=12)
@given(
    st.sampled_from(("contiguous", "zigzag", "striped")),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 40),
    st.integers(0, 2),
)
def test_shard_takes_the_owned_tokens_and_gather_brings_them_back(name, cp, length, axis):
    sharder = make_sharder(length, layout_from_name(name, cp))
    shape = [3, 2, 2]
    shape[axis] = length
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def body(x):
        local = sharder.shard(x, fill=-1.0, axis=axis)
        padded = sharder.gather(local, axis=axis, trim=False)
        return local[None], sharder.gather(local, axis=axis)[None], padded[None], sharder.positions()[None]

    if cp == 1:
        local, back, padded, positions = body(jnp.asarray(x))
    else:
        local, back, padded, positions = on_ranks(cp, body, x)
    widths = [(0, sharder.padded_length - length if i == axis else 0) for i in range(3)]
    full = np.pad(x, widths, constant_values=-1)
    for rank in range(cp):
        owned = sharder.layout.indices(sharder.padded_length, rank)
        np.testing.assert_array_equal(positions[rank], owned)
        np.testing.assert_array_equal(local[rank], np.take(full, owned, axis))
        np.testing.assert_array_equal(padded[rank], full)
        np.testing.assert_array_equal(back[rank], x)


def test_f11_gather_sums_the_gradients_of_all_its_consumers():
    """6 tokens padded to 8; a replicated loss sum_i (i+1) x_i on every rank gives cp (i+1), and 0 on pads."""
    cp, sharder = 2, make_sharder(6, Zigzag(2))
    weights = jnp.arange(1.0, 7.0)

    def grad_of_local(x):
        local = sharder.shard(x, fill=9.0, axis=0)
        return jax.grad(lambda local: jnp.sum(weights * sharder.gather(local, axis=0)))(local)[None]

    grads = np.asarray(on_ranks(cp, grad_of_local, jnp.ones(6)))
    for rank in range(cp):
        owned = sharder.layout.indices(8, rank)
        np.testing.assert_array_equal(grads[rank], np.where(owned < 6, cp * (owned + 1.0), 0.0))


def test_u1_shard_preserves_the_gradient_of_embeddings():
    """Rank 1 of 2 owns positions 2..5 of 8: its loss sends a gradient to these and to no other."""
    sharder = make_sharder(8, Zigzag(2))

    def body(x):
        grad = jax.grad(lambda x: jnp.sum(sharder.take_local(x)))(jax.lax.pcast(x, "cp", to="varying"))
        return sharder.take_local(x), grad

    local, grad = on_ranks(2, body, jnp.arange(8.0)[None], out_specs=(P("cp"), P("cp")))
    np.testing.assert_array_equal(local[1], [2, 3, 4, 5])
    np.testing.assert_array_equal(grad[1], [0, 0, 1, 1, 1, 1, 0, 0])


@pytest.mark.quick
@pytest.mark.parametrize("layout", [Contiguous(4), Zigzag(4)])
def test_gradient_of_a_replicated_input_is_the_dense_one(layout):
    sharder = make_sharder(13, layout)
    weights = jnp.linspace(0.5, 2.0, 13)

    def loss(x):
        def body(x):
            return jax.lax.psum(
                jnp.sum(sharder.shard(x * x, fill=0, axis=0) * sharder.shard(weights, fill=0, axis=0)), "cp"
            )

        return jax.shard_map(body, mesh=mesh_of(4), in_specs=P(), out_specs=P(), axis_names={"cp"})(x)

    x = jnp.linspace(-1.0, 1.0, 13)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), 2 * x * weights, rtol=1e-6)


def test_u2_rank_is_the_cp_coordinate_not_the_device_number():
    """Under dp x cp (HSDP) devices 0, 3, 4, 7 have cp ranks 0, 3, 0, 3."""
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharder = make_sharder(8, Contiguous(4))
    x = jnp.stack([jnp.arange(8.0), 100 + jnp.arange(8.0)])
    body = jax.shard_map(sharder.take_local, mesh=mesh, in_specs=P(), out_specs=P(None, "cp"), axis_names={"cp"})
    out = jax.jit(body)(jax.device_put(x, jax.NamedSharding(mesh, P("dp"))))
    np.testing.assert_array_equal(out, x)


@given(st.integers(1, 60), st.integers(0, 130))
def test_i6_every_other_length_raises(length, given_length):
    sharder = make_sharder(length, Zigzag(8))
    assert_every_other_length_raises(sharder, np.zeros((2, given_length)))


@pytest.mark.parametrize(("layout", "length"), [(Contiguous(2), 1), (Zigzag(2), 2), (Zigzag(2, multiple=4), 4)])
def test_a_second_shard_is_noticed_where_a_rank_holds_as_many_tokens_as_the_caller(layout, length):
    """T = cp S: lengths do not tell, but what varies over the ranks does."""
    sharder = make_sharder(length, layout)
    assert sharder.local_length == sharder.length == length
    x = jnp.arange(1.0, 1 + length)[None]
    with pytest.raises(
        ValueError, match=f"shard was given {length} tokens that are not the same on all ranks"
    ) as error:
        on_ranks(2, lambda x: sharder.shard(sharder.shard(x, fill=0), fill=0), x)
    assert "\n" not in str(error.value)
    again = on_ranks(2, lambda x: sharder.gather(sharder.shard(x * x, fill=0))[None], x)
    np.testing.assert_array_equal(again, np.stack([x * x] * 2))


def test_lengths_are_integers():
    with pytest.raises(ValueError, match=r"length 7\.5"):
        make_sharder(7.5, Zigzag(2))


def test_padding_needs_a_fill_and_a_token_axis():
    sharder = make_sharder(5, Zigzag(2))
    with pytest.raises(ValueError, match="fill"):
        sharder.shard(np.zeros((1, 5)))
    with pytest.raises(ValueError, match="no axis 2"):
        sharder.shard(np.zeros((1, 5)), fill=0, axis=2)


def test_identity_needs_no_mesh_and_pads_nothing():
    sharder = make_sharder(5, Identity())
    x = jnp.arange(10.0).reshape(2, 5)
    assert sharder.padded_length == 5 and sharder.shard(x) is x and sharder.rank() == 0
    np.testing.assert_array_equal(sharder.gather(x), x)


def test_sharder_is_static_under_jit():
    sharder = make_sharder(5, Identity())
    assert jax.tree.leaves(sharder) == []
    assert jax.jit(lambda s, x: s.shard(x))(sharder, jnp.ones((1, 5))).shape == (1, 5)
