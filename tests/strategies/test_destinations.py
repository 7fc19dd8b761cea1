import jax
import jax.numpy as jnp
import pytest

import distrib
from distrib.errors import ContextError, DeviceError
from distrib.strategies.destinations import destination_devices, put_on
from tests.support.strategies import central, mirrored

CPU = jax.devices("cpu")


def made(strategy):
    with strategy.scope():
        return distrib.Variable(0.0)


def where(value):
    parts = value.values if isinstance(value, distrib.DistributedValues) else [value]
    return [next(iter(part.devices())) for part in parts]


def test_which_devices_a_destination_names():
    replicas = CPU[:2]
    assert destination_devices(made(mirrored(3)), replicas) == CPU[:3]
    alone = distrib.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:5")
    assert destination_devices(made(alone), replicas) == [CPU[5]]
    assert destination_devices(distrib.Variable(0.0), replicas) == []
    assert destination_devices(distrib.PerReplica([1, 2]), replicas) == replicas
    assert destination_devices("CPU:4", replicas) == [CPU[4]]
    assert destination_devices(jax.device_put(1.0, CPU[6]), replicas) == [CPU[6]]
    with pytest.raises(DeviceError):
        destination_devices("CPU:99", replicas)
    for wrong in (None, 3.0, ["CPU:0"]):
        with pytest.raises(ValueError, match="must be a distributed value, a distrib.Variable, an"):
            destination_devices(wrong, replicas)


def test_put_on():
    x = jnp.ones(2)
    assert where(put_on(x, CPU[1:3])) == CPU[1:3]
    assert where(put_on(x, CPU[3:4])) == [CPU[3]]
    assert put_on(x, []) is x
    assert put_on(2.0, CPU[:2]) == 2.0


def test_reduce_to_and_batch_reduce_to():
    strategy = mirrored(2)
    v, x = made(strategy), distrib.PerReplica([jnp.float32(1), jnp.float32(3)])
    extended = strategy.extended
    assert where(extended.reduce_to("SUM", x, v)) == CPU[:2]
    assert where(extended.reduce_to("SUM", x, "CPU:3")) == [CPU[3]]
    for_one, for_all = extended.batch_reduce_to("MEAN", [(x, "CPU:3"), ({"a": x}, x)])
    assert where(for_one) == [CPU[3], CPU[3]]
    assert (where(for_all["a"]), float(for_all["a"] + 1.0)) == (CPU[:2], 3.0)
    with pytest.raises(ContextError, match="batch_reduce_to requires .*merge_call"):
        strategy.run(lambda: extended.batch_reduce_to("SUM", [(jnp.ones(1), v)]))


def test_with_one_copy_the_result_is_an_array():
    strategy = central(2)
    v, x = made(strategy), distrib.PerReplica([jnp.float32(1), jnp.float32(3)])
    for result in strategy.extended.batch_reduce_to("SUM", [(x, v), (x, "CPU:0")]):
        assert isinstance(result, jax.Array) and float(result) == 4


def test_in_a_merge_function():
    strategy = mirrored(2)
    v = made(strategy)

    def step():
        context = distrib.get_replica_context()
        x = jnp.asarray(context.replica_id_in_sync_group, jnp.float32) + 1
        return context.merge_call(
            lambda s, y: s.extended.batch_reduce_to("SUM", [(y, v), (y, "CPU:0")]), args=(x,)
        )

    for eager in (False, True):
        distrib.config.run_functions_eagerly(eager)
        results = strategy.run(step)
        distrib.config.run_functions_eagerly(False)
        assert [[float(c) for c in r.values] for r in results] == [[3, 3], [3, 3]]
