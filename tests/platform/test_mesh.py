import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distrib import errors
from distrib.platform import mesh


def test_replica_mesh_is_one_auto_axis_in_the_order_given():
    devices = [jax.devices()[i] for i in (3, 0, 5)]
    made = mesh.replica_mesh(devices)
    assert made.axis_names == (mesh.REPLICA_AXIS,) == ("replica",)
    assert made.axis_types == (jax.sharding.AxisType.Auto,)
    assert list(made.devices) == devices


def test_replica_mesh_of_nothing():
    with pytest.raises(errors.DeviceError, match="at least one device"):
        mesh.replica_mesh([])


def test_replicated_and_split():
    made = mesh.replica_mesh(jax.devices()[:4])
    value = jnp.arange(8)
    copies = jax.device_put(value, mesh.replicated(made)).addressable_shards
    assert [shard.data.shape for shard in copies] == [(8,)] * 4
    parts = jax.device_put(value, mesh.split(made)).addressable_shards
    np.testing.assert_array_equal([shard.data for shard in parts], [[0, 1], [2, 3], [4, 5], [6, 7]])


def test_shardings_are_cached():
    first, again = (mesh.replica_mesh(jax.devices()[:2]) for _ in range(2))
    assert mesh.replicated(first) is mesh.replicated(again)
    assert mesh.split(first) is mesh.split(again)


def test_stack_parts_puts_each_on_its_device():
    made = mesh.replica_mesh([jax.devices()[5], jax.devices()[2]])
    whole = mesh.stack_parts([np.zeros(3), np.ones(3)], jnp.float32, made)
    assert (whole.shape, whole.dtype, whole.sharding) == ((2, 3), jnp.float32, mesh.split(made))
    rows = {next(iter(s.data.devices())).id: s.data.tolist() for s in whole.addressable_shards}
    assert rows == {5: [[0, 0, 0]], 2: [[1, 1, 1]]}
