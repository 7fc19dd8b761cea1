"""Direct calls of cross-device ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib import ReduceOp
from distrib.errors import AggregationError, ContextError, DeviceError
from distrib.experimental import CommunicationOptions
from distrib.values import regroup
from tests.support.algorithms import every_algorithm, mirrored

RING = distrib.RingAllReduce()


def devices_of(value):
    return [next(iter(copy.devices())).id for copy in value.values]


def on_devices(values, ids):
    return distrib.PerReplica(
        [jax.device_put(jnp.asarray(v), jax.devices()[i]) for v, i in zip(values, ids, strict=True)]
    )


@every_algorithm
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_reduce_and_batch_reduce(make, count):
    ops = make()
    values = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    x, ids = distrib.PerReplica(list(values)), distrib.PerReplica(list(range(count)))
    total = ops.reduce(ReduceOp.SUM, x, x)
    np.testing.assert_array_equal(np.asarray(total), values.sum(0))
    mean, mean_id = ops.batch_reduce(ReduceOp.MEAN, [(x, "CPU:1"), (ids, ids)])
    np.testing.assert_allclose(mean, values.mean(0))
    assert float(np.asarray(mean_id)) == (count - 1) / 2
    assert ops.batch_reduce(ReduceOp.SUM, []) == []


def test_results_lie_where_they_are_to_be():
    x = on_devices([1.0, 2.0], [3, 5])
    assert devices_of(RING.reduce(ReduceOp.SUM, x, x)) == [3, 5]
    on_one = RING.reduce(ReduceOp.SUM, x, "CPU:4")
    assert isinstance(on_one, jax.Array)
    assert (float(on_one), [d.id for d in on_one.devices()]) == (3, [4])
    with mirrored(3).scope():
        v = distrib.Variable(0.0)
    for made in (RING.reduce(ReduceOp.SUM, x, v), RING.broadcast(3.0, v)):
        assert isinstance(made, distrib.Mirrored)
        assert [float(copy) for copy in made.values] == [3, 3, 3]
        assert devices_of(made) == [0, 1, 2]
    there = RING.reduce(ReduceOp.SUM, x, jax.device_put(1.0, jax.devices()[6]))
    assert [d.id for d in there.devices()] == [6]
    assert float(made.values[0] + on_one) == 6  # Free to be combined.


def test_components_that_wait_on_one_device_are_added_on_as_many_as_there_are():
    x = distrib.PerReplica([1, 2, 4])
    total = RING.reduce(ReduceOp.SUM, x, x)
    assert [int(copy) for copy in total.values] == [7, 7, 7]
    assert devices_of(total) == [0, 1, 2]
    with pytest.raises(DeviceError, match="9 components, and there are 8 devices of kind CPU"):
        RING.reduce(ReduceOp.SUM, distrib.PerReplica([1.0] * 9), "CPU:0")


def test_what_is_no_per_replica_value():
    """As measured in tf.distribute: a tensor is one value, copies are added."""
    for op in ReduceOp:
        assert RING.reduce(op, 3.0, "CPU:0") == 3.0
    copies = RING.broadcast(jnp.float32(3), distrib.PerReplica([0, 0, 0]))
    assert float(np.asarray(RING.reduce(ReduceOp.SUM, copies, copies))) == 9
    assert float(np.asarray(RING.reduce(ReduceOp.MEAN, copies, copies))) == 3
    (same,) = RING.batch_reduce(ReduceOp.SUM, [(jnp.float32(5), copies)])
    assert float(same) == 5


@pytest.mark.parametrize("of_parts", [False, True])
@pytest.mark.parametrize(("op", "expected"), [("SUM", [3.0, 1.0]), ("MEAN", [1.5, 0.5])])
def test_indexed_slices(of_parts, op, expected):
    """As measured in tf.distribute: the rows of all, wherever they are to be."""
    rows, indices = [jnp.array([1.0, 1.0]), jnp.array([2.0])], [jnp.array([0, 1]), jnp.array([0])]
    parts = [distrib.IndexedSlices(r, i, (2,)) for r, i in zip(rows, indices, strict=True)]
    x = regroup(parts) if of_parts else distrib.PerReplica(parts)
    on_one = RING.reduce(ReduceOp[op], x, "CPU:1")
    assert on_one.to_dense().tolist() == expected
    assert [d.id for d in on_one.values.devices()] == [1]
    on_two = RING.reduce(ReduceOp[op], x, distrib.PerReplica([0, 0]))
    assert devices_of(on_two.values) == devices_of(on_two.indices) == [0, 1]
    assert on_two.to_dense().tolist() == expected
    same = distrib.IndexedSlices(rows[0], indices[0], (2,))
    assert RING.reduce(ReduceOp[op], same, "CPU:0") is same


def test_the_tensors_of_a_batch_are_packed():
    shapes = []

    class Counting(distrib.CrossDeviceOps):
        def sum_over_replicas(self, value, num_replicas):
            shapes.append(value.shape)
            return jax.lax.psum(value, distrib.REPLICA_AXIS)

    x, y = distrib.PerReplica([np.ones(3)] * 2), distrib.PerReplica([np.ones((2, 2))] * 2)
    ops = Counting()
    pairs = [(x, x), (y, "CPU:0"), (x, y)]
    for _ in range(2):  # The program is kept.
        ops.batch_reduce(ReduceOp.SUM, pairs)
    assert shapes == [(10,)]
    ops.batch_reduce(ReduceOp.SUM, pairs, CommunicationOptions(bytes_per_pack=1))
    assert sorted(shapes) == [(2, 2), (3,), (3,), (10,)]


def test_an_option_compresses_one_call():
    x = distrib.PerReplica(list(np.float32([1 / 3, 0])))
    options = CommunicationOptions(compression="bfloat16")
    assert float(RING.reduce(ReduceOp.SUM, x, "CPU:0", options)) == float(jnp.bfloat16(1 / 3))
    assert float(RING.reduce(ReduceOp.SUM, x, "CPU:0")) == np.float32(1 / 3)
    assert RING.with_compression("int8").compression == "int8"
    assert RING.compression is None


def test_what_is_refused():
    x = distrib.PerReplica([1.0, 2.0])
    with pytest.raises(ValueError, match="reduce_op is 'MEAN', and must be ReduceOp.SUM"):
        RING.reduce("MEAN", x, x)
    for destinations in (None, 3, {"a": x}, ["CPU:0", "CPU:1"]):
        with pytest.raises(ValueError, match=r"destinations is [\s\S]*, and must be a per-rep"):
            RING.reduce(ReduceOp.SUM, x, destinations)
        with pytest.raises(ValueError, match="destinations is"):
            RING.reduce(ReduceOp.SUM, 3.0, destinations)
    with pytest.raises(DeviceError, match="There is no device 'CPU:9'"):
        RING.broadcast(1.0, "CPU:9")
    with pytest.raises(ValueError, match="RingAllReduce has been called by name: leave it AUTO"):
        RING.reduce(ReduceOp.SUM, x, x, CommunicationOptions(implementation="NCCL"))
    with pytest.raises(ValueError, match="timeout_seconds is 1 in RingAllReduce.reduce"):
        RING.reduce(ReduceOp.SUM, x, x, CommunicationOptions(timeout_seconds=1.0))
    for tree in ([x], {"a": (x, 1.0)}):
        with pytest.raises(TypeError, match="of distributed values: reduce takes one value"):
            RING.reduce(ReduceOp.SUM, tree, x)
    uneven = distrib.PerReplica([np.ones(2), np.ones(3)])
    with pytest.raises(AggregationError, match=r"bring float32\[2\], float32\[3\] to one"):
        RING.reduce(ReduceOp.SUM, uneven, uneven)
    flags = distrib.PerReplica([True, False])
    for op in ReduceOp:
        with pytest.raises(AggregationError, match="cannot add values of dtype bool"):
            RING.reduce(op, flags, flags)

    def step(y):
        def merge(strategy, y):
            return RING.reduce(ReduceOp.SUM, y, y)

        return distrib.get_replica_context().merge_call(merge, args=(y,))

    with pytest.raises(ContextError, match=r"Use strategy.reduce or strategy.extended.reduce_to"):
        mirrored(2).run(step, args=(x,))


def test_the_base_class_needs_a_sum():
    with pytest.raises(TypeError, match="sum_over_replicas"):
        distrib.CrossDeviceOps()
