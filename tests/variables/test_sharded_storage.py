"""Variables that are split over the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.platform import replica_mesh, shards_of
from distrib.values import PerReplica
from distrib.variables import ShardedStorage

SHAPES = [(6, 4), (7, 5)]  # Of three replicas: one divides, one is filled up.


def storage(shape):
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    mesh = replica_mesh(jax.devices()[:3])
    return ShardedStorage(value, mesh, shards_of(shape, 3)), value


@pytest.mark.parametrize("shape", SHAPES)
def test_every_reader_gets_the_value_entire(shape):
    made, value = storage(shape)
    assert not made.per_replica
    np.testing.assert_array_equal(made.read(), value)
    np.testing.assert_array_equal(made.whole(), value)
    assert [next(iter(c.devices())).id for c in made.components()] == [0, 1, 2]
    for component in made.components():
        np.testing.assert_array_equal(component, value)
    parts = [s.data.shape for s in made.cell.array.addressable_shards]
    filled = shards_of(shape, 3).filled_shape
    assert parts == [(filled[0] // 3, filled[1])] * 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "factor"), [("assign", 1), ("add", 2), ("sub", 0)])
def test_assign(shape, kind, factor):
    made, value = storage(shape)
    before = made.cell.array.sharding
    assigned = made.assign(value, kind)
    np.testing.assert_array_equal(made.read(), factor * value)
    np.testing.assert_array_equal(assigned.values[2], factor * value)
    assert made.cell.array.sharding == before


@pytest.mark.parametrize("shape", SHAPES)
def test_components(shape):
    made, value = storage(shape)
    made.put_components([jnp.asarray(value + 1)] * 3)
    np.testing.assert_array_equal(made.read(), value + 1)
    made.assign(PerReplica([value + 2] * 3), "assign")
    np.testing.assert_array_equal(made.read(), value + 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_read_outlives_steps(shape):
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    strategy.extended.experimental_shard_optimizer_state = True
    with strategy.scope():
        v = distrib.Variable(
            np.ones(shape, np.float32),
            aggregation=distrib.VariableAggregation.SUM,
            optimizer_state=True,
        )
    assert isinstance(v.storage, ShardedStorage)
    read = v.value(), v.storage.whole(), v.values[1]
    for _ in range(2):
        strategy.run(lambda: v.assign_add(jnp.ones(shape)))
    for array in read:
        np.testing.assert_array_equal(array, np.ones(shape))
    np.testing.assert_array_equal(v.value(), np.full(shape, 7.0))
    assert isinstance(v.storage.cell.array.sharding, jax.sharding.NamedSharding)


@pytest.mark.parametrize("eager", [False, True])
def test_in_a_replica_and_under_another_strategy(eager):
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    strategy.extended.experimental_shard_optimizer_state = True
    with strategy.scope():
        v = distrib.Variable(np.arange(35.0, dtype=np.float32).reshape(7, 5), optimizer_state=True)
    distrib.config.run_functions_eagerly(eager)
    try:
        for other in (
            strategy,
            distrib.MirroredStrategy(["CPU:3", "CPU:4"]),
            distrib.CentralStorageStrategy(["CPU:0", "CPU:1"]),
            distrib.OneDeviceStrategy("CPU:5"),
        ):
            result = other.run(lambda: v * 2)
            for part in other.experimental_local_results(result):
                np.testing.assert_array_equal(part, 2 * v.numpy())
    finally:
        distrib.config.run_functions_eagerly(False)
