"""Optimizer state that is split over the replicas: the same training with a part of the memory."""

import copy
import gc
import re
import weakref

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import STRATEGIES, devices, mirrored

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.normal(size=(7, 6)).astype(np.float32),
    "second": RNG.normal(size=(6, 8)).astype(np.float32),
    "bias": np.ones(5, np.float32),
    "scale": np.ones((), np.float32),
}
X = RNG.normal(size=(48, 7)).astype(np.float32)


def loss(params, x):
    y = jnp.tanh(x @ params["kernel"]) @ params["second"]
    return (y**2).mean() + ((params["bias"][None] + x[:, :5]) ** 2).mean() + params["scale"]


def sharding(count, **options):
    strategy = distrib.MirroredStrategy(devices(count), **options)
    strategy.extended.experimental_shard_optimizer_state = True
    return strategy


def create(strategy, tx, params=PARAMS, **fields):
    with strategy.scope():
        return distrib.TrainState.create(apply_fn=None, params=params, tx=tx, **fields)


def train(strategy, state, examples=48, batch_size=24, aggregation="MEAN"):
    def step(x):
        value, grads = jax.value_and_grad(loss)(state.params, x)
        state.apply_gradients(grads=grads, aggregation=aggregation)
        return value

    for batch in strategy.experimental_distribute_dataset(X[:examples], batch_size=batch_size):
        strategy.run(step, args=(batch,))


def assert_close(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def bytes_on_first_device(state):
    """Return the bytes of the live buffers of the optimizer state on one device."""
    variables = [v for v in state.distributed_variables() if v.name.startswith("opt_state")]
    shards = [s for v in variables for s in v.storage.cell.array.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device.id == 0)


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)),
    "lamb": lambda: optax.lamb(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "multi steps": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_training_is_the_same(name, replicas):
    """Also where a norm is over all parts (clipping, lamb, adafactor), and with odd sizes."""
    plain, sharded = mirrored(replicas), sharding(replicas)
    expected, state = create(plain, OPTIMIZERS[name]()), create(sharded, OPTIMIZERS[name]())
    train(plain, expected)
    train(sharded, state)
    assert_close(state.params, expected.params)
    assert_close(state.opt_state, expected.opt_state)
    assert int(state.step) == 2
    sharded.extended.assert_mirrored(state)
    sharded.extended.assert_mirrored(state.params)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("aggregation", ["SUM", None])
def test_aggregations(replicas, aggregation):
    plain, sharded = mirrored(replicas), sharding(replicas)
    expected, state = create(plain, optax.adam(0.01)), create(sharded, optax.adam(0.01))

    def step(x, state):
        grads = jax.grad(loss)(state.params, x)
        if aggregation is None:
            grads = distrib.get_replica_context().all_reduce("MEAN", grads)
        state.apply_gradients(grads=grads, aggregation=aggregation)

    for strategy, which in ((plain, expected), (sharded, state)):
        for batch in strategy.experimental_distribute_dataset(X, batch_size=24):
            strategy.run(step, args=(batch, which))
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("replicas", [2, 4])
def test_uneven_batches(replicas):
    strategy, sharded = mirrored(replicas), sharding(replicas)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    expected, state = create(strategy, tx), create(sharded, tx)
    train(strategy, expected, examples=9, batch_size=8)
    train(sharded, state, examples=9, batch_size=8)
    assert_close(state.params, expected.params)
    assert_close(state.opt_state, expected.opt_state)
    sharded.extended.assert_mirrored(state)


def test_threads(eagerly):
    plain, sharded = mirrored(3), sharding(3)
    expected, state = create(plain, optax.adam(0.01)), create(sharded, optax.adam(0.01))
    train(plain, expected, examples=40)
    train(sharded, state, examples=40)
    assert_close(state.params, expected.params)
    assert_close(state.opt_state, expected.opt_state)
    distrib.config.run_functions_eagerly(False)
    train(sharded, state)  # Compiled steps go on from there.
    train(plain, expected)
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_memory_is_divided(replicas):
    tx = optax.adam(0.01)
    params = {"kernel": jnp.ones((784, 128)), "bias": jnp.ones(128), "out": jnp.ones((128, 10))}
    strategy = sharding(replicas)
    state = create(strategy, tx, params)

    def step():
        state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))

    strategy.run(step)
    numbers = 784 * 128 + 128 + 1280
    count = 4  # The bytes of the step count, of which every device has a copy.
    assert bytes_on_first_device(state) == 2 * 4 * numbers // replicas + count
    on_first = [
        s.data.nbytes
        for x in jax.tree.leaves(state.opt_state)
        for s in x.addressable_shards
        if s.device.id == 0
    ]
    assert sum(on_first) == bytes_on_first_device(state)


def test_memory_of_odd_sizes():
    """Nothing divides by three: the longest axes are filled up, to 786 and 129."""
    params = {"kernel": jnp.ones((784, 128)), "bias": jnp.ones(128), "scale": jnp.ones(())}
    state = create(sharding(3), optax.sgd(0.1, momentum=0.9), params)
    assert bytes_on_first_device(state) == 4 * (786 * 128 // 3 + 129 // 3 + 1)


def collectives(text):
    names = re.findall(r" (all-reduce|reduce-scatter|all-gather)(?:-start)?\(", text)
    return {name: names.count(name) for name in names}


def test_the_program_scatters_and_gathers():
    strategy = sharding(2)
    state = create(strategy, optax.adam(0.01), {"w": jnp.ones((8, 4)), "v": jnp.ones((4, 6))})

    def step(x):
        def loss(params):
            return ((x @ params["w"] @ params["v"]) ** 2).mean()

        state.apply_gradients(grads=jax.grad(loss)(state.params))

    (batch,) = strategy.experimental_distribute_dataset(np.ones((4, 8), np.float32), batch_size=4)
    text = strategy.extended.compiled_text(step, (batch,))
    # The two small gradients travel together, and each new parameter alone.
    assert collectives(text) == {"reduce-scatter": 1, "all-gather": 2}
    # No device ever has all of a moment: they enter and leave in halves.
    entry = text[text.index("\nENTRY ") :]
    assert len(re.findall(r"f32\[(?:4,4|2,6)\]\S* parameter\(", entry)) == 4


def test_other_cross_device_ops_reduce_first():
    strategy = sharding(2, cross_device_ops=distrib.ReductionToOneDevice())
    state = create(strategy, optax.adam(0.01))
    train(strategy, state)
    plain = mirrored(2)
    expected = create(plain, optax.adam(0.01))
    train(plain, expected)
    assert_close(state.params, expected.params)


# What else a step may do with the state.


def test_reading_and_replacing_in_a_step():
    """Parameters are read after the update, averaged, and the optimizer state is read."""

    def program(strategy):
        state = create(strategy, optax.adam(0.01), ema=PARAMS, seen=0.0)
        with strategy.scope():
            counter = distrib.Variable(0.0, aggregation=distrib.VariableAggregation.SUM)

        def step(x):
            counter.assign_add(jnp.asarray(1.0 * x.shape[0]))
            state.apply_gradients(grads=jax.grad(loss)(state.params, x))
            ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state.ema, state.params)
            state.replace(ema=ema, seen=jnp.abs(state.opt_state[0].mu["kernel"]).sum())
            state.apply_gradients(grads=jax.grad(loss)(state.params, x))
            state.replace(params=jax.tree.map(lambda p: p * 0.99, state.params))
            return loss(state.params, x), state.step

        results = []
        for batch in strategy.experimental_distribute_dataset(X, batch_size=24):
            values, steps = strategy.run(step, args=(batch,))
            results.append([float(v) for v in strategy.experimental_local_results(values)])
            assert [int(s) for s in strategy.experimental_local_results(steps)][0] == int(
                state.step
            )
        return np.asarray(results), state, counter.numpy()

    values, state, count = program(sharding(3))
    others, expected, other_count = program(mirrored(3))
    np.testing.assert_allclose(values, others, rtol=1e-5)
    assert_close(state.params, expected.params)
    assert_close(state.ema, expected.ema)
    assert float(state.seen) == pytest.approx(float(expected.seen), rel=1e-5)
    assert count == other_count == 48


def test_replace_in_a_step():
    strategy = sharding(3)
    state = create(strategy, optax.sgd(0.1, momentum=0.9))

    def step():
        replica = distrib.get_replica_context().replica_id_in_sync_group
        state.replace(opt_state=jax.tree.map(lambda x: x * 0 + replica, state.opt_state))

    strategy.run(step)
    assert_close(state.opt_state, jax.tree.map(jnp.ones_like, state.opt_state))


@pytest.mark.parametrize("replicas", [2, 3])
def test_replace_outside_and_copy(replicas):
    strategy = sharding(replicas)
    state = create(strategy, optax.adam(0.01))
    train(strategy, state)
    twin = copy.deepcopy(state)
    assert bytes_on_first_device(twin) == bytes_on_first_device(state)
    other = create(strategy, optax.adam(0.01))
    other.replace(opt_state=state.opt_state, params=state.params, step=state.step)
    for which in (state, twin, other):
        train(strategy, which)
    assert_close(twin.params, state.params)
    assert_close(other.params, state.params)


@pytest.mark.parametrize("before", ["sharded 2", "sharded 3", "Mirrored-2"])
@pytest.mark.parametrize("after", ["sharded 3", "OneDevice"])
def test_saved_and_restored(before, after):
    made = {"sharded 2": lambda: sharding(2), "sharded 3": lambda: sharding(3), **STRATEGIES}
    first, second = made[before](), made[after]()
    state = create(first, optax.adam(0.01))
    train(first, state)
    saved = flax.serialization.to_bytes(state)
    restored = create(second, optax.adam(0.01))
    flax.serialization.from_bytes(restored, saved)
    assert_close(restored.opt_state, state.opt_state)
    train(first, state)
    train(second, restored)
    assert_close(restored.params, state.params)


def test_outside_of_a_step():
    plain, sharded = mirrored(3), sharding(3)
    expected, state = create(plain, optax.adam(0.01)), create(sharded, optax.adam(0.01))
    for which in (expected, state):
        for _ in range(2):
            which.apply_gradients(grads=jax.tree.map(jnp.ones_like, PARAMS))
    assert_close(state.params, expected.params)
    assert_close(state.opt_state, expected.opt_state)


def test_with_accumulation_and_bfloat16():
    fields = {"gradient_accumulation_steps": 2, "compute_dtype": jnp.bfloat16}
    plain, sharded = mirrored(2), sharding(2)
    expected = create(plain, optax.adam(0.01), **fields)
    state = create(sharded, optax.adam(0.01), **fields)
    train(plain, expected)
    train(sharded, state)
    assert_close(state.params, expected.params)
    assert int(state.opt_state[0].count) == 1


def test_integers_and_keys_are_mirrored():
    strategy = sharding(2)
    tx = optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1, momentum=0.9))
    state = create(strategy, tx)
    plain = mirrored(2)
    expected = create(plain, tx)
    train(strategy, state)
    train(plain, expected)
    assert_close(state.params, expected.params)


def test_integer_parameters():
    params = {"w": jnp.ones((4, 6)), "n": jnp.arange(4)}
    tx = optax.masked(optax.adam(0.1), {"w": True, "n": False})
    strategy = sharding(2)
    state = create(strategy, tx, params)

    def step():
        state.apply_gradients(grads={"w": jnp.ones((4, 6)), "n": jnp.zeros(4, jnp.int32)})

    strategy.run(step)
    np.testing.assert_allclose(state.params["w"], np.full((4, 6), 0.9), rtol=1e-5)
    np.testing.assert_array_equal(state.params["n"], np.arange(4))


def test_parts_are_donated():
    strategy = sharding(2)
    state = create(strategy, optax.adam(0.1))
    # The first parameters were read, to make the optimizer's state, and are spared.
    named = {v.name: v.storage.cell.array for v in state.distributed_variables()}
    train(strategy, state)
    kept = [name for name, old in named.items() if not old.is_deleted()]
    assert all(name.startswith("params") for name in kept)


# Where it may be set.


@pytest.mark.parametrize("name", ["OneDevice", "CentralStorage-2"])
def test_strategies_with_one_copy_refuse(name):
    strategy = STRATEGIES[name]()
    kind = type(strategy).__name__
    with pytest.raises(ValueError, match=f"no effect under {kind}.*use MirroredStrategy"):
        strategy.extended.experimental_shard_optimizer_state = True
    strategy.extended.experimental_shard_optimizer_state = False
    assert strategy.extended.experimental_shard_optimizer_state is False


def test_the_default_strategy_refuses():
    with pytest.raises(ValueError, match="no effect under"):
        distrib.get_strategy().extended.experimental_shard_optimizer_state = True


def test_one_replica_has_all_of_it():
    strategy = sharding(1)
    assert strategy.extended.experimental_shard_optimizer_state is True
    state = create(strategy, optax.adam(0.01))
    train(strategy, state)
    plain = mirrored(1)
    expected = create(plain, optax.adam(0.01))
    train(plain, expected)
    assert_close(state.params, expected.params)


def test_a_step_keeps_no_variable_alive():
    strategy = sharding(2)
    state = create(strategy, optax.adam(0.01))

    def step(state, x):
        state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    for batch in strategy.experimental_distribute_dataset(X, batch_size=24):
        strategy.run(step, args=(state, batch))
    held = [weakref.ref(v) for v in state.distributed_variables()]
    del state
    gc.collect()
    assert [ref for ref in held if ref() is not None] == []
