import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import PerReplicaError
from distrib.platform import mesh as meshes
from distrib.values import Layout, Mirrored, PerReplica, local_shards


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    # Not in the order of the devices' ids: components follow the mesh.
    return meshes.replica_mesh([jax.devices()[i] for i in (3, 1, 2)])


def split(value: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.device_put(value, meshes.split(mesh))


def test_components_are_kept_as_they_are():
    parts = [jnp.zeros(2), "text", None]
    value = PerReplica(parts)
    assert all(a is b for a, b in zip(value.values, parts, strict=True))
    assert value.layout is Layout.COMPONENTS


def test_stacked_components_lose_the_replica_axis(mesh):
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    value = PerReplica.stacked(split(rows, mesh))
    assert [part.tolist() for part in value.values] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert [part.devices() for part in value.values] == [{d} for d in mesh.devices.flat]


def test_concatenated_components_are_consecutive_rows(mesh):
    value = PerReplica.concatenated(split(np.arange(6, dtype=np.int32), mesh))
    assert [part.tolist() for part in value.values] == [[0, 1], [2, 3], [4, 5]]


def test_components_are_cut_once(mesh):
    value = PerReplica.stacked(split(np.arange(3, dtype=np.float32), mesh))
    assert value.values is value.values


def test_components_of_different_devices_can_be_added(mesh):
    first, second, third = PerReplica.stacked(split(np.arange(3, dtype=np.float32), mesh)).values
    assert float(first + second + third) == 3.0


@pytest.mark.parametrize("use", [np.asarray, jnp.asarray, lambda x: jnp.add(x, 1), np.sum])
def test_per_replica_is_no_array(use):
    with pytest.raises((PerReplicaError, TypeError)):
        use(PerReplica([jnp.ones(2), jnp.ones(2)]))


def test_per_replica_used_as_an_array_says_what_to_do():
    with pytest.raises(PerReplicaError, match="inside strategy.run, or combine it first"):
        np.asarray(PerReplica([1, 2]))


def test_per_replica_is_a_leaf_of_trees():
    value = PerReplica([1, 2])
    assert jax.tree.leaves({"a": [value, 3]}) == [value, 3]


def test_mirrored_from_copies():
    value = Mirrored([jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])])
    np.testing.assert_array_equal(np.asarray(value), [1.0, 2.0])
    np.testing.assert_array_equal(jnp.asarray(value) + 1, [2.0, 3.0])
    assert value.numpy().flags.owndata


def test_mirrored_has_the_shape_of_an_array():
    x = Mirrored([jnp.ones((2, 3), jnp.bfloat16)] * 2)
    assert (x.shape, x.dtype, x.ndim) == ((2, 3), jnp.bfloat16, 2)


def test_mirrored_from_a_whole(mesh):
    value = Mirrored.from_whole(jax.device_put(np.float32(5), meshes.replicated(mesh)))
    assert [float(copy) for copy in value.values] == [5.0, 5.0, 5.0]
    assert [copy.devices() for copy in value.values] == [{d} for d in mesh.devices.flat]
    assert float(value) == 5.0


def test_numpy_of_a_mirrored_value_is_a_copy():
    value = Mirrored([np.zeros(2), np.zeros(2)])
    value.numpy()[0] = 7
    assert value.values[0][0] == 0


def test_mirrored_converts_to_a_dtype():
    assert np.asarray(Mirrored([1.5, 1.5]), dtype=np.float16).dtype == np.float16


def test_local_shards_follow_the_mesh(mesh):
    shards = local_shards(split(np.arange(3, dtype=np.int32), mesh))
    assert [shard.data.tolist() for shard in shards] == [[0], [1], [2]]


def test_repr():
    assert repr(PerReplica([1, 2])) == "PerReplica:{\n  0: 1,\n  1: 2\n}"
    assert repr(Mirrored([3, 3])) == "Mirrored:{\n  0: 3,\n  1: 3\n}"


def test_what_run_returns_is_cut_when_it_is_asked_for():
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    result = strategy.run(lambda: distrib.get_replica_context().replica_id_in_sync_group)
    assert isinstance(result, distrib.PerReplica)
    assert result.layout is Layout.STACKED
    assert result.whole.shape == (2,)
    assert [int(part) for part in result.values] == [0, 1]
