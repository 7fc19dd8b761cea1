"""Gradients accumulated over several steps, on every strategy and by both engines."""

import copy
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.train.accumulation import checked_steps
from tests.support.strategies import STRATEGIES, mirrored, on_every_strategy, on_two_replicas

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 3)).astype(np.float32)
Y = RNG.normal(size=10).astype(np.float32)


def params():
    return {"w": jnp.ones(3), "b": jnp.zeros(())}


def loss(params, x, y):
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def create(strategy, tx, **fields):
    with strategy.scope():
        return distrib.TrainState.create(apply_fn=None, params=params(), tx=tx, **fields)


def train(strategy, state, batch_size, epochs=2, loss=loss):
    def step(batch):
        state.apply_gradients(grads=jax.grad(loss)(state.params, *batch))

    for _ in range(epochs):
        for batch in strategy.experimental_distribute_dataset((X, Y), batch_size=batch_size):
            strategy.run(step, args=(batch,))


def on_one_device(tx, batch_size, epochs=2):
    new, opt_state = params(), tx.init(params())
    for _ in range(epochs):
        for start in range(0, len(X), batch_size):
            batch = X[start : start + batch_size], Y[start : start + batch_size]
            updates, opt_state = tx.update(jax.grad(loss)(new, *batch), opt_state, new)
            new = optax.apply_updates(new, updates)
    return new, opt_state


def assert_close(tree, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tree, other)


@pytest.mark.parametrize("name", ["OneDevice", "Mirrored-2", "Mirrored-4", "CentralStorage-2"])
@pytest.mark.parametrize(
    ("batch_size", "steps"),
    [
        (8, 3),  # The last batch, of two, is the second step of an update and the first of another.
        (9, 2),  # The last batch is one example, and ends an update.
    ],
)
def test_equals_optax_multi_steps_on_one_device(name, engine, batch_size, steps):
    strategy = STRATEGIES[name]()
    state = create(strategy, optax.adam(0.1), gradient_accumulation_steps=steps)
    train(strategy, state, batch_size)
    expected, theirs = on_one_device(optax.MultiSteps(optax.adam(0.1), steps), batch_size)
    assert_close(state.params, expected)
    assert int(state.opt_state[0].count) == int(theirs.gradient_step)
    assert int(state.micro_step) == int(theirs.mini_step)
    assert int(state.step) == 4
    strategy.extended.assert_mirrored(state.params)


@on_every_strategy
def test_two_half_batches_are_one_batch(make_strategy, engine):
    """And the sum over the replicas of what is accumulated in between is the sum of the means."""
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0), gradient_accumulation_steps=2)
    seen = []

    def step(batch):
        state.apply_gradients(grads=jax.grad(loss)(state.params, *batch))

    for batch in strategy.experimental_distribute_dataset((X[:8], Y[:8]), batch_size=4):
        strategy.run(step, args=(batch,))
        seen.append((state.params, state.gradient_accumulator))
    assert_close(seen[0][0], params())
    assert_close(seen[0][1], jax.grad(loss)(params(), X[:4], Y[:4]))
    gradient = jax.grad(loss)(params(), X[:8], Y[:8])
    assert_close(seen[1][0], jax.tree.map(jnp.subtract, params(), gradient))
    assert_close(seen[1][1], jax.tree.map(jnp.zeros_like, params()))


@on_two_replicas
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # Replicas have the gradients 1 and 2, then 3 and 6: the means over two steps.
    [("MEAN", 3.0), ("SUM", 6.0), (None, 6.0)],
)
def test_aggregations(make_strategy, engine, aggregation, expected):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0), gradient_accumulation_steps=2)

    def step(scale):
        context = distrib.get_replica_context()
        gradient = scale * (context.replica_id_in_sync_group + 1.0)
        if aggregation is None:
            gradient = context.all_reduce("SUM", gradient)
        grads = {"w": jnp.full(3, gradient), "b": jnp.asarray(gradient)}
        state.apply_gradients(grads=grads, aggregation=aggregation)

    for scale in (1.0, 3.0):
        strategy.run(step, args=(jnp.float32(scale),))
    assert float(state.params["b"]) == pytest.approx(-expected)
    assert_close(state.params["w"], jnp.full(3, 1 - expected))


@on_every_strategy
def test_outside_of_a_step(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0), gradient_accumulation_steps=2)
    for scale in (1.0, 3.0, 7.0):
        state.apply_gradients(grads={"w": jnp.full(3, scale), "b": jnp.asarray(scale)})
    assert_close(state.params, {"w": jnp.full(3, -1.0), "b": jnp.asarray(-2.0)})
    assert (int(state.step), int(state.micro_step)) == (3, 1)
    assert float(state.gradient_accumulator["b"]) == 7.0


@on_two_replicas
def test_in_a_merge_function(make_strategy, engine):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0), gradient_accumulation_steps=2)

    def merge(strategy, grads):
        state.apply_gradients(grads=strategy.reduce("SUM", grads, axis=None))

    def step():
        context = distrib.get_replica_context()
        one = context.replica_id_in_sync_group + 1.0
        context.merge_call(merge, args=({"w": jnp.full(3, one), "b": jnp.asarray(one)},))

    strategy.run(step)
    assert float(state.params["b"]) == 0.0
    strategy.run(step)
    assert float(state.params["b"]) == -3.0


def test_replicas_without_examples_bring_what_they_accumulated_before():
    """The step cannot be traced for no examples, so such replicas take no part in it otherwise."""

    def flattening(params, x, y):
        return loss(params, x.reshape(len(x), -1), y)

    strategy = mirrored(4)
    state = create(strategy, optax.adam(0.1), gradient_accumulation_steps=2)
    train(strategy, state, 9, loss=flattening)  # Batches of 3, 3, 3, 0 and of 1, 0, 0, 0.
    assert_close(state.params, on_one_device(optax.MultiSteps(optax.adam(0.1), 2), 9)[0])


@pytest.mark.parametrize("replicas", [2, 8])
def test_one_all_reduce_for_each_update(replicas):
    """Row 8 of the reports: accumulation failed, because replicas met inside of a condition."""
    strategy = mirrored(replicas)
    state = create(strategy, optax.adam(0.1), gradient_accumulation_steps=4)

    def step(x, y):
        state.apply_gradients(grads=jax.grad(loss)(state.params, x, y))

    data = (np.ones((replicas, 3), np.float32), np.ones(replicas, np.float32))
    (batch,) = strategy.experimental_distribute_dataset(data, batch_size=replicas)
    text = strategy.extended.compiled_text(step, batch)
    assert len(re.findall(r"all-reduce(?:-start)?\(", text)) == 1
    # It stands in the branch of a conditional, which is not the program that runs at each step.
    entry = text[text.index("ENTRY") :]
    assert "all-reduce" not in entry
    assert "conditional(" in entry


@pytest.mark.parametrize("after", ["OneDevice", "Mirrored-2", "Mirrored-4", "CentralStorage-2"])
def test_saved_in_the_middle_and_restored_under_another_strategy(after):
    tx = optax.adam(0.1)
    strategy = mirrored(2)
    state = create(strategy, tx, gradient_accumulation_steps=3)
    train(strategy, state, 5, epochs=2)
    saved = flax.serialization.to_bytes(state)
    other_strategy = STRATEGIES[after]()
    restored = create(other_strategy, tx, gradient_accumulation_steps=3)
    flax.serialization.from_bytes(restored, saved)
    twin = copy.deepcopy(state)
    train(strategy, state, 5, epochs=1)
    train(other_strategy, restored, 5, epochs=1)
    assert_close(restored.params, state.params)
    assert (int(restored.step), int(restored.micro_step)) == (6, 0)
    assert (int(twin.step), int(twin.micro_step)) == (4, 1)  # A copy is another state.
    train(strategy, twin, 5, epochs=1)
    assert_close(twin.params, state.params)


def test_accumulators_are_donated():
    strategy = mirrored(2)
    state = create(strategy, optax.sgd(0.1), gradient_accumulation_steps=2)
    named = {v.name: v.storage for v in state.distributed_variables()}
    old = named["gradient_accumulator['w']"].cell.array
    assert old.shape == (2, 3)  # One for each replica.
    train(strategy, state, 10, epochs=1)
    assert old.is_deleted()


@on_two_replicas
def test_integer_parameters(make_strategy, engine):
    """Means of integers are no integers: they are accumulated as floating numbers."""
    strategy = make_strategy()
    tx = optax.masked(optax.sgd(1.0), {"w": True, "n": False})
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None,
            params={"w": 0.0, "n": jnp.int32(7)},
            tx=tx,
            gradient_accumulation_steps=2,
        )

    def step():
        state.apply_gradients(grads={"w": jnp.float32(1.0), "n": jnp.int32(0)})

    for _ in range(2):
        strategy.run(step)
    assert (float(state.params["w"]), int(state.params["n"])) == (-1.0, 7)


def test_clipping_sees_the_mean_over_the_steps():
    strategy = mirrored(2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    state = create(strategy, tx, gradient_accumulation_steps=2)
    train(strategy, state, 5)
    assert_close(state.params, on_one_device(optax.MultiSteps(tx, 2), 5)[0])


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_numbers_of_steps_that_are_none(steps):
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps is .* at least 1"):
        create(mirrored(2), optax.sgd(0.1), gradient_accumulation_steps=steps)


def test_one_step_is_an_update_each_time():
    assert checked_steps(1) == 1
    strategy = mirrored(2)
    state = create(strategy, optax.adam(0.1), gradient_accumulation_steps=1)
    train(strategy, state, 4)
    assert_close(state.params, on_one_device(optax.adam(0.1), 4)[0])
    assert state.gradient_accumulation_steps == 1
    assert create(strategy, optax.adam(0.1)).gradient_accumulation_steps is None


def test_a_run_without_accumulation_goes_on_with_one_and_the_other_way_round():
    plain = create(mirrored(2), optax.adam(0.1))
    plain.apply_gradients(grads={"w": jnp.ones(3), "b": jnp.ones(())})
    several = create(mirrored(3), optax.adam(0.1), gradient_accumulation_steps=2)
    several.apply_gradients(grads={"w": jnp.ones(3), "b": jnp.ones(())})
    assert int(several.micro_step) == 1
    flax.serialization.from_bytes(several, flax.serialization.to_bytes(plain))
    assert int(several.micro_step) == 0
    assert float(several.gradient_accumulator["w"].sum()) == 0
    np.testing.assert_array_equal(several.params["w"], plain.params["w"])
    flax.serialization.from_bytes(plain, flax.serialization.to_bytes(several))
    assert int(plain.step) == 1
