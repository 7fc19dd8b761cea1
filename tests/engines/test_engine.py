"""``run``: how arguments of each kind enter a program, and how programs are found again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distrib
from distrib.engines.engine import entering_leaf
from distrib.engines.signature import Kind, leaf_key, traced_form
from distrib.errors import NestedTraceError
from tests.support.strategies import devices, mirrored, on_every_strategy, on_two_replicas

CPUS = jax.devices("cpu")


def local(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


@on_every_strategy
def test_the_leaves_of_nested_arguments_keep_their_places(make_strategy):
    strategy = make_strategy()
    count = strategy.num_replicas_in_sync
    mine = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(c.replica_id_in_sync_group)
    )
    with strategy.scope():
        v = distrib.Variable(1000.0)
    scale = object()
    seen = []

    def step(tree, *rest, name, flag):
        seen.append((name, flag, tree["object"] is scale, tree["none"], rest[1] is v))
        return {"sum": tree["mine"] + tree["list"][0] + tree["list"][1] + rest[0] + rest[1]}

    tree = {"mine": mine, "list": [10, np.float32(20)], "object": scale, "none": None}
    result = strategy.run(
        step, args=(tree, jnp.float32(100), v), kwargs={"name": "n", "flag": True}
    )
    assert local(strategy, result["sum"]) == [1130 + i for i in range(count)]
    assert seen == [("n", True, True, None, True)]


@on_two_replicas
def test_a_value_of_another_number_of_replicas_is_refused(make_strategy):
    strategy = make_strategy()
    for value in (distrib.PerReplica([1.0, 2.0, 3.0]), mirrored(4).run(lambda: jnp.ones(2))):
        count = len(value.values)
        message = f"PerReplica with {count} components, and the strategy has 2 replicas"
        with pytest.raises(ValueError, match=message):
            strategy.run(lambda x: x, args=(value,))


@on_two_replicas
def test_a_value_of_another_strategy_is_moved(make_strategy):
    strategy = make_strategy()
    other = distrib.MirroredStrategy(["CPU:6", "CPU:5"])
    stacked = other.run(
        lambda: distrib.get_replica_context().replica_id_in_sync_group * jnp.ones(2)
    )
    (batch,) = other.experimental_distribute_dataset(np.arange(4.0), batch_size=4)
    for value, expected in ((stacked, [[1, 1], [2, 2]]), (batch, [[1, 2], [3, 4]])):
        result = strategy.run(lambda x: x + 1, args=(value,))
        assert local(strategy, result) == expected
        homes = [next(iter(part.devices())).id for part in result.values]
        assert homes == [0, 1]


def test_a_moved_value_is_marked_in_its_leaf():
    ours, theirs = mirrored(2), distrib.MirroredStrategy(["CPU:5", "CPU:6"])
    for strategy, moved in ((ours, False), (theirs, True)):
        value = strategy.run(lambda: jnp.ones(3))
        kind, key = leaf_key(value)
        leaf = entering_leaf(value, kind, key, traced_form(value, key), ours.extended.mesh)
        assert (leaf.kind, leaf.form.shape, leaf.moved) == (Kind.SPLIT, (2, 3), moved)


def test_a_plain_array_enters_in_its_own_form():
    x = np.ones((2, 3))
    kind, key = leaf_key(x)
    leaf = entering_leaf(x, kind, key, traced_form(x, key), mirrored(2).extended.mesh)
    assert (leaf.kind, leaf.form.shape, leaf.form.dtype, leaf.moved) == (
        Kind.EVERYWHERE,
        (2, 3),
        jnp.float32,
        False,
    )


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_run_inside_of_a_transformation(transform):
    strategy = mirrored(2)

    def outer(x):
        return strategy.reduce("SUM", strategy.run(lambda y: y, args=(x,)), axis=None)

    argument = jnp.ones(2) if transform is jax.vmap else 1.0
    with pytest.raises(NestedTraceError, match="call it from plain Python, and put jax.jit or jax"):
        transform(outer)(argument)


def test_compiled_text_runs_nothing():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(0.0, aggregation=distrib.VariableAggregation.SUM)
        module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    before = np.asarray(module.bias[...]).tolist()

    def step(module, x):
        v.assign_add(x.sum())
        module.bias[...] = module.bias[...] + 1.0
        return module(x)

    text = strategy.extended.compiled_text(jax.jit(step), (module, jnp.ones((1, 2))))
    assert "ENTRY" in text and "all-reduce" in text
    assert float(v.numpy()) == 0
    assert np.asarray(module.bias[...]).tolist() == before


def test_a_jitted_function_is_the_function_inside():
    strategy = mirrored(2)
    traces = []

    def step(x):
        traces.append(1)
        return x + distrib.get_replica_context().replica_id_in_sync_group

    jitted = jax.jit(step)
    for fn in (step, jitted, step):
        assert local(strategy, strategy.run(fn, args=(jnp.float32(1),))) == [1, 2]
    assert traces == [1]


@on_every_strategy
def test_a_step_without_arguments_or_results(make_strategy):
    strategy = make_strategy()
    assert strategy.run(lambda: None) is None


@pytest.mark.parametrize("count", [1, 2])
def test_the_context_of_a_step_names_its_device(count):
    strategy = distrib.MirroredStrategy(devices(count))
    name = "/job:localhost/replica:0/task:0/device:CPU:" + ("0" if count == 1 else "*")
    assert strategy.run(lambda: distrib.get_replica_context().devices[0]) == name
