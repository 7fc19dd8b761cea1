"""``put_pieces`` is a short way to what ``jax.device_put`` returns, and must not differ from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distrib.platform import jax_compat, replica_mesh, replicated, split


@pytest.fixture(params=["private", "public"])
def way(request, monkeypatch):
    """With and without the private function of JAX."""
    if request.param == "public":
        monkeypatch.setattr(jax_compat, "_batched_device_put", None)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_, jnp.bfloat16]
)
@pytest.mark.parametrize("placed", [split, replicated])
def test_the_array_is_that_of_device_put(way, dtype, placed):
    mesh = replica_mesh(jax.devices()[:2])
    devices = list(mesh.devices.flat)
    array = np.arange(24).reshape(4, 6).astype(dtype)
    pieces = [array[:2], array[2:]] if placed is split else [array, array]
    expected = jax.device_put(array, placed(mesh))
    actual = jax_compat.put_pieces(array, placed(mesh), pieces, devices)
    assert actual.aval == expected.aval
    assert actual.sharding == expected.sharding
    assert actual.committed
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    shards = {shard.device: np.asarray(shard.data) for shard in actual.addressable_shards}
    for shard in expected.addressable_shards:
        np.testing.assert_array_equal(shards[shard.device], np.asarray(shard.data))


def test_a_jitted_function_is_not_traced_again_for_it():
    mesh = replica_mesh(jax.devices()[:2])
    array = np.arange(4, dtype=np.float32)
    traced = []

    @jax.jit
    def double(x):
        traced.append(x)
        return x * 2

    double(jax.device_put(array, split(mesh)))
    placed = jax_compat.put_pieces(
        array, split(mesh), [array[:2], array[2:]], list(mesh.devices.flat)
    )
    assert double(placed).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert len(traced) == 1
