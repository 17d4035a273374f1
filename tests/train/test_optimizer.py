"""Optimizers on plain arrays: schedules, groups, decay, and matrices whatever way they are stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cpjax.models.common.checkpoint import Weight
from cpjax.train.config import OptimizerConfig, ParameterGroup
from cpjax.train.optimizer import make_optimizer, make_schedule, moving_average
from cpjax.train.precision import PERIOD, START, LossScale

TABLE = [
    Weight("layers.q.kernel", ("m.layers.0.q.weight", "m.layers.1.q.weight"), stacked=True, transpose=True),
    Weight("layers.norm", ("m.layers.0.norm.weight", "m.layers.1.norm.weight"), stacked=True),
    Weight("conv", ("m.conv.weight",), disk_shape=(6, 1, 4)),
    Weight("embed", ("m.embed.weight",)),
    Weight("lm_head.kernel", ("lm_head.weight",), transpose=True),
]
SHAPES = {
    "layers.q.kernel": (2, 5, 3),
    "layers.norm": (2, 5),
    "conv": (6, 4),
    "embed": (7, 5),
    "lm_head.kernel": (5, 7),
}
MATRICES = {"layers.q.kernel", "conv", "embed", "lm_head.kernel"}


def arrays(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def options(**values):
    return OptimizerConfig(**{"weight_decay": 0.0, "clip": 0.0, **values})


def direction(optimizer, gradients, params):
    """The last update of several steps, parameters standing still."""
    state = optimizer.init(params)
    for gradient in gradients:
        update, state = optimizer.update(gradient, state, params)
    return update, state


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_schedules(name):
    lr, steps, warmup, final = 0.5, 20, 4, 0.1
    rate = make_schedule(options(lr=lr, schedule=name, warmup=warmup, decay=0.25, final=final), steps)
    got = np.array([rate(step) for step in range(steps)])
    t = np.arange(1, steps + 1)
    along = np.clip((t - warmup) / (steps + 1 - warmup), 0, 1)  # the end of the curve is one step after the last
    curve = {
        "cosine": final + (1 - final) * (1 + np.cos(np.pi * along)) / 2,
        "linear": 1 - (1 - final) * along,
        "constant": np.ones(steps),
        "wsd": 1 - (1 - final) * np.clip((t - 16) / 5, 0, 1),
    }[name]
    np.testing.assert_allclose(got, lr * np.minimum(t / warmup, 1) * curve, rtol=1e-5)
    assert got[0] > 0 and got[-1] > lr * final


@pytest.mark.quick
def test_adamw_is_optax_adamw():
    params, gradients = arrays(0), [arrays(seed) for seed in (1, 2, 3)]
    optimizer = make_optimizer(options(betas=(0.8, 0.9), weight_decay=0.1, clip=0.5), TABLE, params)
    mask = {name: name in MATRICES for name in params}
    wanted = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, 0.8, 0.9, weight_decay=0.1, mask=mask))
    got, expected = (direction(o, gradients, params)[0] for o in (optimizer, wanted))
    for name in params:
        np.testing.assert_allclose(1e-2 * got[name], expected[name], rtol=1e-6, atol=1e-9)


def test_groups_have_their_own_rate_and_decay_and_the_first_counts():
    params, gradients = arrays(0), [arrays(1)]
    groups = [
        ParameterGroup(r"layers\.\d\.q", lr_scale=0.25),
        ParameterGroup("layers", lr_scale=3.0, weight_decay=0.5),
    ]
    plain, _ = direction(make_optimizer(options(), TABLE, params), gradients, params)
    grouped, _ = direction(make_optimizer(options(weight_decay=0.1, groups=groups), TABLE, params), gradients, params)
    rates = {name: 1.0 for name in params} | {"layers.q.kernel": 0.25, "layers.norm": 3.0}
    decays = {name: 0.1 for name in params} | {"layers.norm": 0.5}  # a vector decays if its group says so
    for name in params:
        wanted = rates[name] * (plain[name] - decays[name] * params[name])
        np.testing.assert_allclose(grouped[name], wanted, rtol=1e-6, atol=1e-7, err_msg=name)
    for pattern, words in (("towr", "'towr' matches no parameter"), (r"layers\.1\.q", "stacked")):
        with pytest.raises(ValueError, match=words):
            make_optimizer(options(groups=[ParameterGroup(pattern)]), TABLE, params)


def one_by_one(params):
    """The stacked arrays as one array per layer, and a table of them."""
    shapes = {name: (SHAPES[name][1:] if name.startswith("layers") else SHAPES[name]) for name in SHAPES}
    split, table = {}, []
    for weight in TABLE:
        for i, name in enumerate(weight.names):
            path = f"{weight.path}.{i}"
            split[path] = params[weight.path][i] if weight.stacked else params[weight.path]
            assert split[path].shape == shapes[weight.path]
            table.append(Weight(path, (name,), transpose=weight.transpose, disk_shape=weight.disk_shape))
    return split, table


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd"])
def test_stacked_layers_are_updated_as_if_each_stood_alone(name):
    params, gradients = arrays(0), [arrays(seed) for seed in (1, 2)]
    gradients = [g | {"layers.q.kernel": g["layers.q.kernel"] * jnp.array([1, 30]).reshape(2, 1, 1)} for g in gradients]
    got, state = direction(make_optimizer(options(name=name), TABLE, params), gradients, params)
    split, table = one_by_one(params)
    alone = make_optimizer(options(name=name), table, split)
    wanted, _ = direction(alone, [one_by_one(gradient)[0] for gradient in gradients], split)
    for path, update in one_by_one(got)[0].items():
        np.testing.assert_allclose(update, wanted[path], rtol=1e-5, atol=1e-6, err_msg=path)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_muon_orthogonalises_projections_and_nothing_else():
    params, gradients = arrays(0), [arrays(1)]
    got, state = direction(make_optimizer(options(name="muon"), TABLE, params), gradients, params)
    for update in np.asarray(got["layers.q.kernel"], np.float64):
        values = np.linalg.svd(update / (0.2 * 5**0.5), compute_uv=False)
        assert (values > 0.6).all() and (values < 1.3).all()
    q = gradients[0]["layers.q.kernel"]
    assert np.einsum("lio,lio->l", got["layers.q.kernel"], q).max() < 0  # each layer goes down its own gradient
    adam, _ = direction(optax.nadamw(1.0, 0.9, 0.95, weight_decay=0), gradients, params)
    for name in params.keys() - {"layers.q.kernel"}:
        np.testing.assert_allclose(got[name], adam[name], rtol=1e-4, err_msg=name)
    held = {"layers.q.kernel": optax.tree.get(state[2].inner_states["muon"], "mu")}
    assert held["layers.q.kernel"]["layers.q.kernel"].shape == (2, 5, 3)


def test_adafactor_keeps_rows_and_columns_of_each_layer():
    shapes = {"layers.q.kernel": (2, 256, 130), "embed": (5, 5)}
    params = arrays(0, shapes)
    optimizer = make_optimizer(options(name="adafactor"), TABLE, params)
    kept = jax.eval_shape(optimizer.init, params)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(kept))
    assert sizes < 2 * (256 + 130) + 5 * 5 + 20  # not 2 x 256 x 130
    got, _ = direction(optimizer, [arrays(1, shapes)], params)
    assert float(jnp.sqrt(jnp.square(got["layers.q.kernel"][0]).mean())) == pytest.approx(1, abs=1e-3)


def test_sgd_with_momentum():
    params, gradients = arrays(0), [arrays(1), arrays(2)]
    got, _ = direction(make_optimizer(options(name="sgd", momentum=0.5), TABLE, params), gradients, params)
    for name in params:
        np.testing.assert_allclose(got[name], -(0.5 * gradients[0][name] + gradients[1][name]), rtol=1e-6, atol=1e-7)
    _, state = direction(make_optimizer(options(name="sgd", momentum=0.0), TABLE, params), gradients, params)
    assert not jax.tree.leaves(state)


def test_moments_are_kept_in_the_dtype_of_the_parameters():
    params = {name: array.astype(jnp.bfloat16) for name, array in arrays(0).items()}
    optimizer = make_optimizer(options(clip=1.0), TABLE, params)
    _, state = direction(optimizer, [arrays(1)], params)  # gradients are summed in float32
    shapes = jax.eval_shape(optimizer.init, params)
    jax.tree.map(lambda new, old: new.dtype == old.dtype or pytest.fail(f"{new.dtype}"), state, shapes)


def test_the_moving_average():
    average = {"a": jnp.float32([0.0, 1.0])}
    for _ in range(3):
        average = moving_average(average, {"a": jnp.bfloat16([1.0, 1.0])}, 0.5)
    assert average["a"].dtype == jnp.float32
    np.testing.assert_allclose(average["a"], [0.875, 1.0])


def test_the_loss_scale_halves_at_once_and_doubles_in_the_long_run():
    scale = LossScale.start()
    for _ in range(3):
        scale = scale.after(jnp.array(False))
    assert scale.scale == START / 8
    after = jax.jit(lambda s: jax.lax.scan(lambda s, _: (s.after(jnp.array(True)), None), s, None, PERIOD - 1)[0])
    scale = after(scale)
    assert scale.scale == START / 8 and scale.good_steps == PERIOD - 1
    scale = scale.after(jnp.array(True))
    assert scale.scale == START / 4 and scale.good_steps == 0
    for _ in range(40):
        scale = scale.after(jnp.array(False))
    assert scale.scale == 1
    top = LossScale(jnp.float32(2.0**127), jnp.int32(PERIOD - 1)).after(jnp.array(True))
    assert np.isfinite(top.scale)
