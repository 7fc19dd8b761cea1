"""What each kind of change makes of a value; numbers of tf.distribute 2.21 where it has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distrib.values import IndexedSlices
from distrib.variables import change_name, combined

OLD = jnp.array([8.0, 8.0, 8.0, 8.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("scatter_add", [16, 8, 12, 8]),
        ("scatter_sub", [0, 8, 4, 8]),
        ("scatter_update", [6, 8, 4, 8]),
        ("scatter_max", [8, 8, 8, 8]),
        ("scatter_min", [2, 8, 4, 8]),
        ("scatter_mul", [96, 8, 32, 8]),
        ("scatter_div", [2 / 3, 8, 2, 8]),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_rows_of_equal_index(kind, expected, compiled):
    rows = IndexedSlices([2.0, 4.0, 6.0], [0, 2, 0])
    change = jax.jit(combined, static_argnums=0) if compiled else combined
    np.testing.assert_allclose(change(kind, OLD, rows), expected, rtol=1e-6)
    none = IndexedSlices(jnp.zeros(0), [])
    np.testing.assert_array_equal(change(kind, OLD, none), OLD)


@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div", "max", "min", "update"])
def test_rows_that_fill_up_a_shape_change_nothing(kind):
    rows = IndexedSlices([2.0, 0.0], [1, np.iinfo(np.int32).max])
    changed = combined(f"scatter_{kind}", OLD, rows)
    assert changed[np.array([0, 2, 3])].tolist() == [8, 8, 8]


def test_integers_divide_towards_zero():
    old = jnp.array([7, -7, 5])
    rows = IndexedSlices(jnp.array([2, 2]), jnp.array([0, 1]))
    assert combined("scatter_div", old, rows).tolist() == [3, -3, 5]


def test_of_rows_that_replace_one_the_last_counts():
    indices = np.random.default_rng(0).integers(0, 5, 40)
    values = np.arange(40.0, dtype=np.float32)
    expected = np.full(5, -1, np.float32)
    for i, value in zip(indices, values, strict=True):
        expected[i] = value
    changed = combined("scatter_update", jnp.full(5, -1.0), IndexedSlices(values, indices))
    np.testing.assert_array_equal(changed, expected)


def test_assignments():
    assert float(combined("assign", jnp.float32(1), 5.0)) == 5
    assert float(combined("add", jnp.float32(1), 5.0)) == 6
    assert float(combined("sub", jnp.float32(1), 5.0)) == -4


def test_names():
    kinds = ("assign", "add", "sub", "scatter_max")
    assert [*map(change_name, kinds)] == ["assign", "assign_add", "assign_sub", "scatter_max"]
