import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import DeviceError
from tests.conformance.table import context, variable


def test_everything_is_on_its_device():
    strategy = distrib.OneDeviceStrategy("CPU:5")
    v = variable(strategy, [1.0, 2.0])
    device = {jax.devices("cpu")[5]}
    assert strategy.extended.worker_devices == ("/job:localhost/replica:0/task:0/device:CPU:5",)
    assert v.values[0].devices() == device
    result = strategy.run(lambda x: x * v, args=(np.float32(2),))
    assert isinstance(result, jax.Array)
    assert result.devices() == device
    (batch,) = strategy.experimental_distribute_dataset(np.arange(3), batch_size=3)
    assert batch.devices() == device


def test_collectives_of_one_replica():
    strategy = distrib.OneDeviceStrategy(jax.devices("cpu")[1])

    def step():
        replica = context()
        x = jnp.array([1.0, 2.0])
        return {
            "id": replica.replica_id_in_sync_group,
            "sum": replica.all_reduce("SUM", x),
            "mean": replica.all_reduce("MEAN", x),
            "gather": replica.all_gather(x, 0),
            "merge": replica.merge_call(lambda st, y: st.reduce("SUM", y, axis=0), args=(x,)),
            "plain": replica.merge_call(lambda st, y: y + 1, args=(x,)),
        }

    result = jax.tree.map(lambda a: np.asarray(a).tolist(), strategy.run(step))
    assert result == {
        "id": 0,
        "sum": [1.0, 2.0],
        "mean": [1.0, 2.0],
        "gather": [1.0, 2.0],
        "merge": 3.0,
        "plain": [2.0, 3.0],
    }


def test_python_code_may_ask_for_the_replica_id():
    strategy = distrib.OneDeviceStrategy("CPU:0")
    result = strategy.run(lambda: 5.0 if context().replica_id_in_sync_group == 0 else 6.0)
    assert result == 5.0


def test_reduce_and_gather():
    strategy = distrib.OneDeviceStrategy("CPU:0")
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(strategy.reduce("SUM", x, axis=None), x)
    np.testing.assert_array_equal(strategy.reduce("SUM", x, axis=0), [4.0, 6.0])
    np.testing.assert_array_equal(strategy.reduce("MEAN", x, axis=(0, 1)), 2.5)
    np.testing.assert_array_equal(strategy.gather({"x": x}, axis=1)["x"], x)
    for value in (distrib.PerReplica([x]), distrib.Mirrored([x])):
        np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=None), x)
        np.testing.assert_array_equal(strategy.gather(value, axis=0), x)


@pytest.mark.parametrize("device", ["CPU:8", "GPU:0", None, "nonsense!"])
def test_no_such_device(device):
    with pytest.raises(DeviceError):
        distrib.OneDeviceStrategy(device)
