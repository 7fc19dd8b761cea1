"""Arrays that are split over the replicas along one axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distrib.platform import replica_mesh
from distrib.platform.shards import Shards, shards_of


@pytest.mark.parametrize(
    ("shape", "count", "axis", "filled"),
    [
        ((784, 128), 2, 0, (784, 128)),
        ((128, 784), 2, 0, (128, 784)),  # The first axis that divides, whose parts are contiguous.
        ((7, 6), 2, 1, (7, 6)),  # The first does not divide.
        ((7, 6), 3, 1, (7, 6)),
        ((7, 5), 3, 0, (9, 5)),  # None divides: the longest is filled up.
        ((5,), 8, 0, (8,)),
        ((9,), 8, 0, (16,)),  # Parts of two; XLA splits nine into eight in the same places.
        ((2, 2), 2, 0, (2, 2)),
    ],
)
def test_which_axis_is_split(shape, count, axis, filled):
    shards = shards_of(shape, count)
    assert shards == Shards(shape, axis, count)
    assert shards.filled_shape == filled
    assert shards.divides == (shape == filled)


@pytest.mark.parametrize(
    ("shape", "count"), [((), 2), ((1,), 2), ((1, 1), 8), ((784, 128), 1), ((0,), 2), ((0, 1), 2)]
)
def test_what_is_not_split(shape, count):
    assert shards_of(shape, count) is None


@pytest.mark.parametrize(("shape", "count"), [((7, 5), 3), ((6, 4), 2), ((5,), 8), ((3, 9, 2), 4)])
def test_filled_and_cut(shape, count):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    shards = shards_of(shape, count)
    filled = shards.filled(jnp.asarray(array))
    assert filled.shape == shards.filled_shape
    assert float(filled.sum()) == array.sum()
    np.testing.assert_array_equal(shards.cut(filled), array)
    mesh = replica_mesh(jax.devices()[:count])
    placed = jax.device_put(filled, shards.sharding(mesh))
    assert {s.data.nbytes for s in placed.addressable_shards} == {filled.nbytes // count}
