import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import DeviceError, VariableError
from tests.conformance.table import central, context, rid, variable

MEAN, SUM = distrib.VariableAggregation.MEAN, distrib.VariableAggregation.SUM


def test_where_variables_live():
    cpu = jax.devices("cpu")
    strategy = distrib.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:7")
    v = variable(strategy, 1.0, aggregation=SUM)
    task = "/job:localhost/replica:0/task:0/device:CPU:"
    assert strategy.extended.parameter_devices == (f"{task}7",)
    assert strategy.extended.worker_devices == (f"{task}1", f"{task}2")
    assert [x.devices() for x in v.values] == [{cpu[7]}]
    result = strategy.run(lambda: v.assign_add(rid()))
    assert [x.devices() for x in v.values] == [{cpu[7]}]
    assert [x.devices() for x in result.values] == [{cpu[1]}, {cpu[2]}]
    assert [float(x) for x in result.values] == [2.0, 2.0]


@pytest.mark.parametrize(("devices", "home"), [(["CPU:3"], "CPU:3"), (["CPU:3", "CPU:4"], "CPU:0")])
def test_the_default_parameter_device(devices, home):
    strategy = distrib.CentralStorageStrategy(devices)
    assert [d.rpartition("device:")[2] for d in strategy.extended.parameter_devices] == [home]


def test_the_parameter_device_may_compute_too():
    strategy = central()
    v = variable(strategy, [1.0, 2.0], aggregation=MEAN)
    for _ in range(3):
        strategy.run(lambda: v.assign_add(jnp.ones(2) * rid()))
    np.testing.assert_array_equal(v.numpy(), [2.5, 3.5])


def test_several_updates_of_one_variable_apply_in_order():
    strategy = central()
    v = variable(strategy, 1.0, aggregation=SUM)
    w = variable(strategy, 0.0, aggregation=MEAN)

    def step():
        v.assign(v.value() * 2)  # 1 -> 2 + 2 = 4
        w.assign(v.value())  # 4
        v.assign_add(rid() + 1)  # 4 + 3 = 7
        v.assign_sub(w.value() / 2)  # 7 - (2 + 2) = 3
        return v.value()

    result = strategy.run(step)
    assert [float(x) for x in result.values] == [3.0, 3.0]
    assert (float(v.numpy()), float(w.numpy())) == (3.0, 4.0)


def test_an_update_whose_value_nobody_reads():
    strategy = central()
    v = variable(strategy, [1.0, 2.0], aggregation=MEAN)

    def step():
        v.assign(jnp.array([5.0, 6.0]) * (rid() + 1))

    strategy.run(step)
    np.testing.assert_array_equal(v.numpy(), [7.5, 9.0])


def test_aggregation_none_is_refused_in_a_step():
    strategy = central()
    v = variable(strategy, 1.0, name="w")
    with pytest.raises(
        ValueError, match="must specify an aggregation method to update variable 'w'"
    ):
        strategy.run(lambda: v.assign(rid()))
    assert float(v.numpy()) == 1.0


def test_synchronization_none_is_refused():
    none = distrib.VariableSynchronization.NONE
    with pytest.raises(VariableError, match="`NONE` variable synchronization mode"):
        variable(central(), synchronization=none)


@pytest.mark.parametrize(("aggregation", "expected"), [("SUM", 3.0), ("MEAN", 1.5)])
def test_an_on_read_variable_has_one_copy(aggregation, expected):
    strategy = central()
    v = variable(
        strategy,
        0.0,
        synchronization=distrib.VariableSynchronization.ON_READ,
        aggregation=distrib.VariableAggregation[aggregation],
    )
    strategy.run(lambda: v.assign(rid() + 1))
    assert float(v.numpy()) == expected
    assert len(v.values) == 1


def test_gradients_are_as_under_mirrored():
    strategy = central()
    v = variable(strategy, 2.0, aggregation=MEAN)
    x = distrib.PerReplica([jnp.float32(1), jnp.float32(3)])

    def step(x):
        return jax.grad(lambda w: context().all_reduce("SUM", w * x) ** 2)(v.value())

    assert [float(g) for g in strategy.run(step, args=(x,)).values] == [32.0, 96.0]


@pytest.mark.parametrize("devices", [["CPU:0", "CPU:0"], ["CPU:9"]])
def test_devices_that_are_refused(devices):
    with pytest.raises(DeviceError):
        distrib.CentralStorageStrategy(devices)


def test_no_such_parameter_device():
    with pytest.raises(DeviceError, match="no device 'GPU:0'"):
        distrib.CentralStorageStrategy(["CPU:0"], "GPU:0")
