"""The algorithms behind an all-reduce: each adds one array over the replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.collectives import CrossDeviceOps, NcclAllReduce, ReductionToOneDevice

SIZE = 3
every_algorithm = pytest.mark.parametrize(
    "ops", [NcclAllReduce(), ReductionToOneDevice()], ids=["nccl", "one-device"]
)


def on_replicas(ops, values):
    """Return the sum as each replica gets it, ``[replica, ...]``."""

    def replica(value):
        return ops.sum_over_replicas(value, len(values))

    return jax.vmap(replica, axis_name=distrib.REPLICA_AXIS)(values)


@every_algorithm
@pytest.mark.parametrize("shape", [(), (4,), (2, 0), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_every_replica_gets_the_sum_in_the_shape_and_dtype_of_its_value(ops, shape, dtype):
    values = jnp.stack([jnp.full(shape, n, dtype) for n in (1, 10, 100)])
    total = on_replicas(ops, values)
    assert (total.shape, total.dtype) == ((SIZE, *shape), dtype)
    expected = jnp.full(shape, 111, dtype)  # bfloat16 has room for 111
    for replica in range(SIZE):
        np.testing.assert_array_equal(total[replica], expected)


def test_one_device_adds_in_the_order_of_the_replicas():
    """In float32, (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1."""
    values = np.float32([1e8, 1, -1e8])
    assert on_replicas(ReductionToOneDevice(), values).tolist() == [0, 0, 0]
    assert on_replicas(ReductionToOneDevice(), values[[0, 2, 1]]).tolist() == [1, 1, 1]


def test_the_accumulation_function_gets_the_list_of_the_replicas_arrays():
    seen = []

    def accumulate(arrays):
        seen.append([array.shape for array in arrays])
        return arrays[0] - arrays[2]

    values = jnp.array([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    result = on_replicas(ReductionToOneDevice(accumulate), values)
    assert seen == [[(2,)] * SIZE]
    assert result.tolist() == [[-9, -18]] * SIZE


@every_algorithm
def test_the_gradient_is_the_sum_of_the_gradients(ops):
    """The loss (sum over replicas of w x)^2 at w=2, x=(1, 3): d/dw = 2*(2*4) * 2 * x."""
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32([1, 3][c.replica_id_in_sync_group])
    )

    def step(x):
        return jax.grad(lambda w: ops.sum_over_replicas(w * x, 2) ** 2)(jnp.float32(2))

    gradients = strategy.run(step, args=(x,)).values
    assert [float(g) for g in gradients] == [32, 96]


class Doubled:
    """A user's own algorithm needs no base class."""

    def sum_over_replicas(self, value, num_replicas):
        return 2 * jax.lax.psum(value, distrib.REPLICA_AXIS)


def test_an_algorithm_is_whatever_has_the_method():
    for ops in (NcclAllReduce(), ReductionToOneDevice(), Doubled()):
        assert isinstance(ops, CrossDeviceOps)
    assert not isinstance("nccl", CrossDeviceOps)
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=Doubled())

    def step():
        return distrib.get_replica_context().all_reduce("SUM", jnp.ones(3))

    assert [x.tolist() for x in strategy.run(step).values] == [[4, 4, 4]] * 2
