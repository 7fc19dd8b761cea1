import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distrib
from distrib.errors import AggregationError
from distrib.reduce_op import ReduceOp
from distrib.strategies.combining import concatenated, reduce_components, reduce_same
from tests.conformance.table import central, mirrored, rid, values, variable

# A few lengths only: each new shape compiles.
_LENGTHS = st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(any)


def _parts(lengths: list[int], seed: int, dtype: type = np.float32) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(-9, 9, (n, 2)).astype(dtype) for n in lengths]


@settings(max_examples=12)
@given(_LENGTHS, st.integers(0, 1000))
def test_reduce_of_uneven_components_is_numpys(lengths, seed):
    parts = _parts(lengths, seed)
    whole = np.concatenate(parts)
    total = reduce_components(ReduceOp.SUM, parts, 0)
    mean = reduce_components(ReduceOp.MEAN, parts, 0)
    np.testing.assert_array_equal(total, whole.sum(0))
    np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-6)
    np.testing.assert_allclose(
        reduce_components(ReduceOp.MEAN, parts, (0, 1)), whole.mean(), rtol=1e-6, atol=1e-6
    )


@settings(max_examples=12)
@given(_LENGTHS, st.integers(0, 1000))
def test_gather_of_uneven_components_is_numpys(lengths, seed):
    parts = _parts(lengths, seed, np.int32)
    np.testing.assert_array_equal(concatenated(parts, 0), np.concatenate(parts))
    turned = [part.T for part in parts]
    np.testing.assert_array_equal(concatenated(turned, -1), np.concatenate(turned, -1))


@pytest.mark.parametrize("make", [mirrored, central])
@pytest.mark.parametrize("axis", [None, 0, -1, 1, (0, 1)])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_however_the_components_lie_the_result_is_one(make, axis, op):
    """Separate components, rows of a whole, and the pieces of a batch."""
    strategy = make()
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    apart = distrib.PerReplica([jnp.asarray(numbers[:2]), jnp.asarray(numbers[2:])])
    (batch,) = strategy.experimental_distribute_dataset(numbers, batch_size=4)
    stacked = strategy.run(lambda x: x, args=(batch,))
    numpy_axes = {None: 0, 0: (0, 1), -1: (0, 2), 1: (0, 2), (0, 1): (0, 1, 2)}[axis]
    over = np.sum if op == "SUM" else np.mean
    expected = over(numbers.reshape(2, 2, 3), axis=numpy_axes)
    for value in (apart, batch, stacked):
        np.testing.assert_allclose(strategy.reduce(op, value, axis=axis), expected, rtol=1e-6)
        np.testing.assert_array_equal(strategy.gather(value, axis=0), numbers)


@pytest.mark.parametrize("axis", [None, 0])
def test_reduce_in_a_merge_function_is_reduce_outside(axis):
    strategy = mirrored(3)
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    x = distrib.PerReplica(list(rows))

    def step(x):
        def merge(current, y):
            return [current.reduce(op, y, axis=axis) for op in ("SUM", "MEAN")]

        return distrib.get_replica_context().merge_call(merge, args=(x,))

    for op, inside in zip(("SUM", "MEAN"), strategy.run(step, args=(x,)), strict=True):
        outside = strategy.reduce(op, x, axis=axis)
        for part in inside.values:
            np.testing.assert_allclose(part, outside, rtol=1e-6)


def test_gather_of_what_is_not_distributed_is_the_value():
    for strategy in (mirrored(), mirrored(3), central()):
        assert strategy.gather(jnp.array([1.0, 2.0]), axis=0).tolist() == [1.0, 2.0]
        assert strategy.gather(5.0, axis=0) == 5.0
        copies = distrib.Mirrored([jnp.array([1.0])] * strategy.num_replicas_in_sync)
        assert strategy.gather(copies, axis=0).tolist() == [1.0] * len(copies.values)


def test_gather_in_a_merge_function():
    strategy = mirrored()

    def merge(current, y):
        return current.gather(y, axis=0)

    def step():
        return distrib.get_replica_context().merge_call(merge, args=(rid()[None],))

    assert [part.tolist() for part in strategy.run(step).values] == [[0.0, 1.0], [0.0, 1.0]]


def test_results_follow_other_operands_to_their_device():
    strategy = mirrored(3)
    elsewhere = jax.device_put(jnp.float32(1), jax.devices("cpu")[6])
    x = values(strategy, lambda i: jnp.float32(i))
    stacked = strategy.run(lambda: rid())
    for result in (strategy.reduce("SUM", x, None), strategy.reduce("SUM", stacked, None)):
        assert float(result + elsewhere) == 4.0


@pytest.mark.parametrize(
    ("op", "dtype", "expected", "expected_dtype"),
    [
        ("SUM", jnp.int8, 5, jnp.int8),
        ("MEAN", jnp.int8, 2.5, jnp.float32),
        ("SUM", jnp.float16, 5.0, jnp.float16),
        ("MEAN", jnp.bfloat16, 2.5, jnp.bfloat16),
    ],
)
def test_dtypes(op, dtype, expected, expected_dtype):
    strategy = mirrored()
    apart = values(strategy, lambda i: jnp.asarray(i + 2, dtype))
    stacked = strategy.run(lambda x: x, args=(apart,))
    for value in (distrib.PerReplica(apart.values), stacked):
        result = strategy.reduce(op, value, axis=None)
        assert (float(result), result.dtype) == (expected, expected_dtype)


def test_a_value_that_is_the_same_everywhere():
    assert float(reduce_same(ReduceOp.SUM, jnp.array([1.0, 2.0]), 0, 3)) == 9.0
    assert float(reduce_same(ReduceOp.MEAN, jnp.array([1.0, 2.0]), 0, 3)) == 1.5
    assert reduce_same(ReduceOp.SUM, 5, None, 1) == 5
    with pytest.raises(AggregationError, match="it is one value for all 3 replicas"):
        reduce_same(ReduceOp.SUM, 5, None, 3)


def test_variables():
    strategy = mirrored()
    v = variable(strategy, [1.0, 2.0])
    assert strategy.reduce("MEAN", v, axis=None).tolist() == [1.0, 2.0]
    assert float(strategy.reduce("SUM", v, axis=0)) == 6.0
    assert strategy.gather(v, axis=0).tolist() == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize("axis", [1, -2, (0, 3)])
@pytest.mark.parametrize("stacked", [False, True])
def test_no_such_axis(axis, stacked):
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.ones(2))
    if stacked:
        x = strategy.run(lambda y: y, args=(x,))
    with pytest.raises(AggregationError, match="rank 1, which have no such axis"):
        strategy.reduce("SUM", x, axis=axis)
