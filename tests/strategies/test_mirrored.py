import jax
import jax.numpy as jnp
import pytest

import distrib
from distrib.errors import DeviceError
from tests.conformance.table import context, mirrored, rid, variable


def test_devices_by_string_and_by_object():
    cpu = jax.devices("cpu")
    strategy = distrib.MirroredStrategy(["/cpu:3", cpu[1], "CPU:0"])
    task = "/job:localhost/replica:0/task:0/device:CPU:"
    assert strategy.extended.worker_devices == (f"{task}3", f"{task}1", f"{task}0")
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert strategy.num_replicas_in_sync == 3
    result = strategy.run(lambda: context().replica_id_in_sync_group)
    assert [part.devices() for part in result.values] == [{cpu[3]}, {cpu[1]}, {cpu[0]}]
    assert [int(part) for part in result.values] == [0, 1, 2]


@pytest.mark.parametrize("devices", [(), ([],), (None,)])
def test_all_devices_by_default(devices):
    assert distrib.MirroredStrategy(*devices).num_replicas_in_sync == 8


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (["CPU:0", "/cpu:0"], "listed twice"),
        (["CPU:0", "CPU:8"], r"no device 'CPU:8'.*set_logical_devices"),
        (["GPU:0"], "no device 'GPU:0'"),
        ("CPU:0", r"pass \['CPU:0'\]"),
    ],
)
def test_devices_that_are_refused(devices, match):
    with pytest.raises(DeviceError, match=match):
        distrib.MirroredStrategy(devices)


def test_cross_device_ops_must_be_some():
    with pytest.raises(
        TypeError, match="'nccl', which has no sum_over_replicas: pass distrib.Nccl"
    ):
        distrib.MirroredStrategy(["CPU:0"], cross_device_ops="nccl")


def test_cross_device_ops_of_the_user():
    class Doubled:
        def sum_over_replicas(self, value, num_replicas):
            return 2 * jax.lax.psum(value, distrib.REPLICA_AXIS)

    strategy = mirrored(cross_device_ops=Doubled())
    v = variable(strategy, 0.0, aggregation=distrib.VariableAggregation.SUM)
    strategy.run(lambda: v.assign(rid() + 1))
    assert float(v.numpy()) == 6.0


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("SUM", 6.0), ("MEAN", 2.0), ("ONLY_FIRST_REPLICA", 1.0)]
)
@pytest.mark.parametrize("ops", [distrib.NcclAllReduce(), distrib.ReductionToOneDevice()])
def test_aggregations(aggregation, expected, ops):
    strategy = mirrored(3, cross_device_ops=ops)
    v = variable(strategy, 0.0, aggregation=distrib.VariableAggregation[aggregation])
    strategy.run(lambda: v.assign(rid() + 1))
    assert [float(x) for x in v.values] == [expected] * 3
    strategy.extended.assert_mirrored(v)


def test_only_first_replica_ignores_what_the_others_hold():
    strategy = mirrored(3)
    v = variable(strategy, 0.0, aggregation=distrib.VariableAggregation.ONLY_FIRST_REPLICA)
    strategy.run(lambda: v.assign(jnp.where(rid() == 0, 5.0, jnp.nan)))
    assert [float(x) for x in v.values] == [5.0] * 3


def test_two_strategies_at_once():
    first, second = mirrored(), distrib.MirroredStrategy(["CPU:2", "CPU:3", "CPU:4"])
    mean = distrib.VariableAggregation.SUM
    v, w = variable(first, 0.0, aggregation=mean), variable(second, 0.0, aggregation=mean)
    for _ in range(2):
        first.run(lambda: v.assign_add(jnp.float32(1)))
        second.run(lambda: w.assign_add(jnp.float32(1)))
    assert (float(v.numpy()), float(w.numpy())) == (4.0, 6.0)
