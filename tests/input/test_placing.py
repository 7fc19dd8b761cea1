"""From a batch on the host to values on the devices of the replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distrib import PerReplica
from distrib.errors import InputError
from distrib.input import BatchPlacer
from distrib.platform import replica_mesh
from distrib.values import Layout


def placer(count, to_device=True):
    return BatchPlacer(replica_mesh(jax.devices("cpu")[:count]), to_device)


def where(arrays):
    return [next(iter(array.devices())).id for array in arrays]


def test_a_batch_that_divides_becomes_one_array_over_the_devices():
    batch = {"x": np.arange(12.0).reshape(6, 2), "y": np.arange(6, dtype=np.int64)}
    placed = placer(3).split(batch)
    for name, dtype in (("x", jnp.float32), ("y", jnp.int32)):
        value = placed[name]
        assert value.layout is Layout.CONCATENATED
        assert value.whole.dtype == dtype  # as JAX holds doubles
        assert where(value.values) == [0, 1, 2]
        for i, part in enumerate(value.values):
            np.testing.assert_array_equal(part, batch[name][2 * i : 2 * i + 2])


def test_a_batch_that_does_not_divide_becomes_components():
    placed = placer(4).split((np.arange(5.0),))
    assert placed[0].layout is Layout.COMPONENTS
    assert [part.tolist() for part in placed[0].values] == [[0, 1], [2, 3], [4], []]
    assert where(placed[0].values) == [0, 1, 2, 3]


@pytest.mark.parametrize("examples", [4, 5])
def test_left_on_the_host(examples):
    batch = np.arange(examples)
    placed = placer(2, to_device=False).split(batch)
    assert all(type(part) is np.ndarray and part.base is batch for part in placed.values)
    np.testing.assert_array_equal(np.concatenate(placed.values), batch)


def test_a_jax_array_is_cut_as_well():
    placed = placer(2).split(jnp.arange(4))
    assert [part.tolist() for part in placed.values] == [[0, 1], [2, 3]]
    assert where(placed.values) == [0, 1]


def test_one_replica_gets_plain_arrays_on_its_device():
    alone = BatchPlacer(replica_mesh(jax.devices("cpu")[5:6]))
    placed = alone.split({"x": np.arange(3.0)})
    assert isinstance(placed["x"], jax.Array)
    assert where([placed["x"]]) == [5]
    assert placed["x"].tolist() == [0, 1, 2]
    batch = np.arange(3)
    assert placer(1, to_device=False).split(batch) is batch


def test_without_a_mesh_jax_chooses():
    nowhere = BatchPlacer(None)
    assert nowhere.num_replicas == 1
    placed = nowhere.split(np.arange(3))
    assert isinstance(placed, jax.Array)
    assert not placed.committed


@pytest.mark.parametrize(
    ("pieces", "layout"),
    [
        ([np.arange(2.0), np.arange(2.0) + 2], Layout.CONCATENATED),
        ([np.arange(2.0), np.arange(1.0)], Layout.COMPONENTS),
        ([np.float32(1), np.float32(2)], Layout.COMPONENTS),
    ],
    ids=["alike", "uneven", "scalars"],
)
def test_pieces_of_the_replicas_own(pieces, layout):
    placed = placer(2).pieces(pieces)
    assert isinstance(placed, PerReplica)
    assert placed.layout is layout
    assert [part.tolist() for part in placed.values] == [piece.tolist() for piece in pieces]
    assert where(placed.values) == [0, 1]


@pytest.mark.parametrize("dtype", [object, "U3", "S3"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_no_device_can_hold_is_named(dtype, count):
    batch = {"x": np.arange(2), "tags": np.array(["a", "b"], dtype)}
    for place in (placer(count).split, lambda b: placer(count).pieces([b] * count)):
        with pytest.raises(
            InputError, match="The batch holds tags of dtype .* keep it on the host"
        ):
            place(batch)


def test_leaves_of_different_lengths_are_refused():
    batch = {"x": np.arange(4), "y": np.arange(3)}
    with pytest.raises(InputError, match="x has 4, y has 3"):
        placer(2).split(batch)
