import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from tests.conformance.table import mirrored, rid, variable

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
]
A, B = np.array([1.0, 2.0, 5.0], np.float32), np.array([3.0, 2.0, 2.0], np.float32)


@pytest.fixture(scope="module")
def strategy():
    return mirrored()


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_binary_operators(op, strategy):
    v, w = variable(strategy, A), variable(strategy, B)
    expected = op(A, B)
    for left, right in ((v, w), (v, B), (A, w), (v, jnp.asarray(B)), (jnp.asarray(A), w)):
        result = op(left, right)
        assert isinstance(result, jax.Array)
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "op", [operator.and_, operator.or_, operator.xor], ids=lambda op: op.__name__
)
def test_bit_operators(op, strategy):
    a, b = np.array([1, 6]), np.array([3, 5])
    v = variable(strategy, a)
    np.testing.assert_array_equal(op(v, b), op(a, b))
    np.testing.assert_array_equal(op(b, v), op(b, a))


def test_matmul(strategy):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    v = variable(strategy, matrix)
    np.testing.assert_array_equal(v @ A, matrix @ A)
    np.testing.assert_array_equal(np.ones((1, 2), np.float32) @ v, [[3.0, 5.0, 7.0]])


def test_unary_operators(strategy):
    v = variable(strategy, -A)
    np.testing.assert_array_equal(-v, A)
    np.testing.assert_array_equal(+v, -A)
    np.testing.assert_array_equal(abs(v), A)
    np.testing.assert_array_equal(~variable(strategy, [True, False]), [False, True])


def test_indexing_and_iteration(strategy):
    v = variable(strategy, [[1.0, 2.0], [3.0, 4.0]])
    assert float(v[1, 0]) == 3.0
    np.testing.assert_array_equal(v[:, 1], [2.0, 4.0])
    np.testing.assert_array_equal(v[jnp.array([1, 1])], [[3.0, 4.0], [3.0, 4.0]])
    assert len(v) == 2
    assert [row.tolist() for row in v] == [[1.0, 2.0], [3.0, 4.0]]


def test_conversions(strategy):
    assert float(variable(strategy, 1.5)) == 1.5
    assert int(variable(strategy, 3)) == 3
    assert [10, 20, 30][variable(strategy, 2)] == 30
    assert bool(variable(strategy, True))
    with pytest.raises(ValueError, match="ambiguous"):
        bool(variable(strategy, [1.0, 2.0]))


def test_array_methods(strategy):
    v = variable(strategy, [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(v.T, [[1.0, 3.0], [2.0, 4.0]])
    assert v.astype(jnp.int32).dtype == jnp.int32
    assert v.reshape(4).tolist() == v.reshape((4,)).tolist() == v.reshape(-1).tolist()
    assert v.reshape(1, 4).shape == (1, 4)
    assert (float(v.sum()), v.mean(axis=0).tolist()) == (10.0, [2.0, 3.0])


def test_comparison_is_by_element_and_hash_by_identity(strategy):
    v, w = variable(strategy, A), variable(strategy, A)
    assert (v == w).tolist() == [True, True, True]
    assert {v: "v", w: "w"}[v] == "v"


def test_operators_in_a_replica_use_its_own_value(strategy):
    v = variable(
        strategy,
        1.0,
        synchronization=distrib.VariableSynchronization.ON_READ,
        aggregation=distrib.VariableAggregation.SUM,
    )

    def step():
        v.assign_add(rid())
        return v * 10

    assert [float(x) for x in strategy.run(step).values] == [10.0, 20.0]
    assert float(v * 10) == 30.0


def test_numpy_functions_and_methods_of_arrays():
    v = distrib.Variable([[1.0, 4.0], [9.0, 16.0]])
    np.testing.assert_allclose(np.sqrt(v), [[1, 2], [3, 4]])
    np.testing.assert_allclose(np.matmul(np.eye(2, dtype=np.float32), v), v.numpy())
    np.testing.assert_allclose(np.sum(v, axis=0), [10, 20])
    assert (float(np.max(v)), float(v.min()), float(np.mean(v))) == (16.0, 1.0, 7.5)
    assert v.at[0, 0].set(5.0)[0, 0] == 5.0
    assert v.tolist() == [[1.0, 4.0], [9.0, 16.0]]
    one = distrib.Variable(2.5)
    assert (one.item(), f"{one:.2f}", float(round(one))) == (2.5, "2.50", 2.0)
    two = distrib.Variable(5)
    assert [int(x) for x in divmod(two, 2)] == [2, 1]
    assert (int(two << 1), int(20 >> two)) == (10, 0)


def test_numpy_functions_in_a_step():
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = distrib.Variable([1.0, 4.0])
    result = strategy.run(lambda: np.sqrt(v) + np.ones(2, np.float32) * v)
    np.testing.assert_allclose(result.values[0], [2, 6])
