import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import SlicesError
from distrib.values import is_slices, map_apart
from distrib.values.indexed_slices import no_row

LAST = np.iinfo(np.int32).max


def slices(values=(1.0, 2.0, 3.0), indices=(1, 1, 3), shape=(4,)):
    return distrib.IndexedSlices(list(values), list(indices), shape)


def test_what_it_holds():
    given = distrib.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, 5]), [6, 3])
    assert given.dense_shape == (6, 3)
    assert given.dtype == jnp.float32
    assert isinstance(given.values, jax.Array) and given.indices.dtype == jnp.int32
    assert distrib.IndexedSlices([1.0], np.array([0], np.uint8)).indices.dtype == jnp.int32
    assert distrib.IndexedSlices(jnp.zeros((0, 2)), []).indices.dtype == jnp.int32
    assert is_slices(given) and not is_slices(given.values)


@pytest.mark.parametrize(
    ("values", "indices", "shape", "message"),
    [
        ([1.0], [0.0], None, "indices of an IndexedSlices are float32, not integers"),
        ([1.0, 2.0], [0], None, r"values of shape \(2,\) and indices of shape \(1,\)"),
        (1.0, [0], None, r"values of shape \(\)"),
        ([[1.0]], [[0]], None, "give an index, in an array of rank 1"),
        ([[1.0]], [0], (4, 2), r"rows of shape \(1,\), which are no rows of .* \(4, 2\)"),
        ([[1.0]], [0], (4,), r"no rows of a table of shape \(4,\)"),
    ],
)
def test_what_does_not_fit(values, indices, shape, message):
    with pytest.raises(SlicesError, match=message):
        distrib.IndexedSlices(values, indices, shape)


def test_dense():
    assert slices().to_dense().tolist() == [0, 3, 0, 3]
    assert np.asarray(slices()).tolist() == jnp.asarray(slices()).tolist() == [0, 3, 0, 3]
    assert jax.jit(lambda s: s.to_dense())(slices()).tolist() == [0, 3, 0, 3]
    with pytest.raises(SlicesError, match="without a dense_shape"):
        slices(shape=None).to_dense()


@pytest.mark.parametrize("index", [4, -1])
def test_an_index_that_names_no_row(index):
    outside = slices([1.0], [index])
    with pytest.raises(SlicesError, match=f"the index {index}, and the table has rows 0 to 3"):
        outside.to_dense()
    assert jax.jit(lambda s: s.to_dense())(outside).tolist() == [0, 0, 0, 0]


def test_merged():
    merged = slices([1.0, 2.0, 3.0, 4.0], [3, 1, 3, 0]).merged()
    assert merged.indices.tolist() == [0, 1, 3]
    assert merged.values.tolist() == [4, 2, 4]
    assert merged.dense_shape == (4,)
    empty = distrib.IndexedSlices(jnp.zeros((0, 2)), [], (4, 2)).merged()
    assert empty.values.shape == (0, 2)


def test_merged_where_shapes_are_fixed_is_filled_up():
    merged = jax.jit(lambda s: s.merged())(slices([[1.0], [2.0], [3.0]], [1, 1, 3], (4, 1)))
    assert merged.indices.tolist() == [1, 3, LAST]
    assert merged.values.tolist() == [[3], [3], [0]]
    assert merged.to_dense().tolist() == [[0], [3], [0], [3]]
    again = merged.merged()
    assert again.indices.tolist() == [1, 3]
    assert no_row(jnp.int32) == LAST


def test_gradients_go_through():
    def loss(values):
        return (distrib.IndexedSlices(values, [1, 1, 3], (4,)).merged().to_dense() ** 2).sum()

    assert jax.grad(loss)(jnp.array([1.0, 2.0, 3.0])).tolist() == [6, 6, 6]


def test_of_shape():
    assert slices(shape=None).of_shape([5]).dense_shape == (5,)
    with pytest.raises(SlicesError, match=r"of shape \(4,\) were used for one of shape \(5,\)"):
        slices().of_shape((5,))


def test_as_a_pytree():
    doubled = jax.tree.map(lambda x: x * 2, slices())
    assert isinstance(doubled, distrib.IndexedSlices)
    assert (doubled.values.tolist(), doubled.indices.tolist()) == ([2, 4, 6], [2, 2, 6])
    assert jax.tree.structure(slices()) == jax.tree.structure(doubled)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(slices())]
    assert names == [".values", ".indices"]
    assert jax.tree.map(lambda _: "x", slices()).values == "x"


def test_map_apart():
    tree = {"a": 1, "b": [slices(), None], "c": 2}
    mapped = map_apart(
        tree, lambda arrays: jax.tree.map(lambda x: x + 1, arrays), lambda s: s.dense_shape
    )
    assert mapped == {"a": 2, "b": [(4,), None], "c": 3}
    assert map_apart({"a": 1}, lambda arrays: arrays, None) == {"a": 1}
    assert map_apart(slices(), lambda arrays: arrays, lambda s: "rows") == "rows"
