"""Steps that compute in bfloat16, with float32 parameters."""

import copy
import re

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.train.precision import as_stored, checked_compute_dtype, rounded
from tests.support.strategies import mirrored, on_every_strategy

BF16 = jnp.bfloat16


def create(strategy, params, tx=None, **fields):
    with strategy.scope():
        return distrib.TrainState.create(
            apply_fn=None, params=params, tx=tx or optax.adam(0.1), compute_dtype=BF16, **fields
        )


@on_every_strategy
def test_dtypes(make_strategy, engine):
    """In a step floating parameters are bfloat16; what is kept, and statistics, are not."""
    strategy = make_strategy()
    state = create(
        strategy,
        {"w": jnp.ones(2), "n": jnp.int32(3)},
        optax.masked(optax.adam(0.1), {"w": True, "n": False}),
        batch_stats={"mean": jnp.zeros(2)},
    )
    seen = []

    def step():
        def loss(w):
            seen.append(w.dtype)
            return (w * state.params["n"].astype(w.dtype)).sum()

        grad = jax.grad(loss)(state.params["w"])
        seen.append(grad.dtype)
        seen.extend(x.dtype for x in jax.tree.leaves((state.params["n"], state.batch_stats)))
        state.apply_gradients(
            grads={"w": grad, "n": jnp.zeros((), jnp.int32)},
            batch_stats={"mean": state.batch_stats["mean"] + grad.astype(jnp.float32)},
        )

    strategy.run(step)
    assert [str(d) for d in seen[:4]] == ["bfloat16", "bfloat16", "int32", "float32"]
    assert state.params["w"].dtype == state.batch_stats["mean"].dtype == jnp.float32
    moments = state.opt_state.inner_state[0]
    assert moments.mu["w"].dtype == moments.nu["w"].dtype == jnp.float32
    assert state.compute_dtype == BF16
    np.testing.assert_allclose(state.params["w"], [0.9, 0.9], rtol=1e-6)
    strategy.extended.assert_mirrored(state)


@on_every_strategy
@pytest.mark.parametrize("steps", [None, 2])
def test_gradients_are_combined_in_float32(make_strategy, engine, steps):
    """1 and 2**-8 add up to 1 in bfloat16, whose next number is 1 + 2**-7."""
    strategy = make_strategy()
    state = create(strategy, {"w": 0.0}, optax.sgd(1.0), gradient_accumulation_steps=steps)

    def step(x):
        grads = {"w": x.sum().astype(BF16)}
        state.apply_gradients(grads=grads, aggregation="SUM")

    size = strategy.num_replicas_in_sync
    data = np.zeros(4, np.float32)
    data[0], data[4 - 4 // size] = 1, 2.0**-8 if size > 1 else 1
    (batch,) = strategy.experimental_distribute_dataset(data, batch_size=4)
    for _ in range(steps or 1):
        strategy.run(step, args=(batch,))
    assert float(state.params["w"]) == (-(1 + 2.0**-8) if size > 1 else -1.0)


def test_small_updates_are_not_lost():
    """A bfloat16 parameter of 1 would not feel steps of 1/1024."""
    strategy = mirrored(2)
    state = create(strategy, {"w": 1.0}, optax.sgd(2.0**-10))

    def step():
        state.apply_gradients(grads={"w": jnp.ones((), BF16)})

    for _ in range(4):
        strategy.run(step)
    assert float(state.params["w"]) == 1 - 4 * 2.0**-10


def test_the_program_adds_float32():
    strategy = mirrored(2)
    state = create(strategy, {"w": jnp.ones((8, 4))})

    def step(x):
        def loss(params):
            return ((x.astype(state.compute_dtype) @ params["w"]) ** 2).mean()

        state.apply_gradients(grads=jax.grad(loss)(state.params))

    data = np.ones((4, 8), np.float32)
    (batch,) = strategy.experimental_distribute_dataset(data, batch_size=4)
    text = strategy.extended.compiled_text(step, (batch,))
    added = re.findall(r"= (\w+)\[[\d,]*\]\S* all-reduce(?:-start)?\(", text)
    assert added == ["f32"]
    assert re.search(r"bf16\[8,4\]", text)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(32)(x)))


def trained(strategy, compute_dtype, steps=20):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 16))
    labels = rng.integers(0, 4, 64)
    data = (centres[labels] + 0.5 * rng.normal(size=(64, 16))).astype(np.float32)
    model = Classifier()
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"],
            tx=optax.adam(0.01),
            compute_dtype=compute_dtype,
        )

    def step(x, y):
        def loss(params):
            logits = state.apply_fn({"params": params}, x.astype(compute_dtype or x.dtype))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y)
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        state.apply_gradients(grads=grads)
        return value

    (batch,) = strategy.experimental_distribute_dataset((data, labels), batch_size=64)
    for _ in range(steps):
        value = strategy.run(step, args=batch)
    return state, float(strategy.reduce("MEAN", value, axis=None))


def test_training_reaches_the_same_loss():
    _, exact = trained(mirrored(2), None)
    state, value = trained(mirrored(2), BF16)
    assert exact < 0.1
    assert value == pytest.approx(exact, abs=0.01)
    one, alone = trained(distrib.OneDeviceStrategy("CPU:0"), BF16)
    assert value == pytest.approx(alone, abs=0.01)
    # Sums of other partial sums are rounded otherwise: by the 8 bits of a bfloat16.
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)


def test_it_is_kept_in_a_copy_and_by_restoring():
    strategy = mirrored(2)
    state = create(strategy, {"w": jnp.full(2, 1 + 2.0**-12)})
    assert copy.deepcopy(state).compute_dtype == BF16
    other = create(strategy, {"w": jnp.zeros(2)})
    flax.serialization.from_bytes(other, flax.serialization.to_bytes(state))
    np.testing.assert_array_equal(other.params["w"], np.full(2, 1 + 2.0**-12, np.float32))


def test_without_a_compute_dtype():
    strategy = mirrored(2)
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params={"w": 1.0}, tx=optax.sgd(0.1))
    assert state.compute_dtype is None
    assert strategy.run(lambda: state.params["w"].dtype.name) == "float32"


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bool_, jnp.complex64])
def test_dtypes_that_are_none(dtype):
    with pytest.raises(TypeError, match=r"compute_dtype is .* must be a floating dtype"):
        checked_compute_dtype(dtype)


def test_rounding_and_back():
    tree = {"w": jnp.ones(2), "c": jnp.ones(2, jnp.complex64), "n": jnp.int32(1)}
    assert [x.dtype.name for x in jax.tree.leaves(rounded(tree, BF16))] == [
        "complex64",
        "int32",
        "bfloat16",
    ]
    v = distrib.Variable(jnp.ones(2))
    assert as_stored([jnp.ones(2, BF16)], [v])[0].dtype == jnp.float32
