"""``IndexedSlices``: some rows of a table, such as the gradient of an embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from distrib.errors import SlicesError


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of a table that is otherwise zero; rows of equal index are added.

    As a pytree it has two leaves, values and indices, so that a step may take and return it.

    Sparse or dense: an all-reduce of slices brings every replica the rows of all replicas,
    after each has merged its own rows of equal index; an all-reduce of the table moves
    about twice the rows of the table. With more rows than that, use :meth:`to_dense` first.

    In a compiled step shapes are fixed before the indices are known. Rows that are not needed are
    then filled up: with zeros, and with the largest index that the dtype has, which names no row.

    Args:
      values: the rows, ``[row, ...]``.
      indices: which rows of the table they are, ``[row]``, integers of 32 bits or more.
      dense_shape: the shape of the table, ``(rows, ...)``; None if it is not known.

    Raises:
      SlicesError: if the three do not fit one another.

    >>> slices = IndexedSlices([[1.0], [2.0], [3.0]], [1, 1, 3], dense_shape=(4, 1))
    >>> print(slices.to_dense().ravel())
    [0. 3. 0. 3.]
    >>> print(slices.merged().indices)
    [1 3]
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        values, indices = jnp.asarray(self.values), jnp.asarray(self.indices)
        if indices.size == 0 and not hasattr(self.indices, "dtype"):
            indices = indices.astype(jnp.int32)  # An empty list has no dtype of its own.
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise SlicesError(f"The indices of an IndexedSlices are {indices.dtype}, not integers.")
        if values.ndim < 1 or indices.ndim != 1 or values.shape[0] != indices.shape[0]:
            raise SlicesError(
                f"An IndexedSlices has values of shape {values.shape} and indices of shape "
                f"{indices.shape}: give an index, in an array of rank 1, for each row of values."
            )
        shape = self.dense_shape
        if shape is not None:
            shape = tuple(int(length) for length in shape)
            if len(shape) != values.ndim or shape[1:] != values.shape[1:]:
                raise SlicesError(
                    f"An IndexedSlices has rows of shape {values.shape[1:]}, which are no rows of "
                    f"a table of shape {shape}."
                )
        if indices.dtype.itemsize < 4:
            indices = indices.astype(jnp.int32)
        for name, value in (("values", values), ("indices", indices), ("dense_shape", shape)):
            object.__setattr__(self, name, value)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def with_values(self, values: Any) -> IndexedSlices:
        """Return slices with other values in the same rows."""
        return IndexedSlices(values, self.indices, self.dense_shape)

    def of_shape(self, dense_shape: Sequence[int]) -> IndexedSlices:
        """Return the slices as rows of a table of that shape.

        Raises:
          SlicesError: if they are of another shape, or an index that is known names no row of it.
        """
        shape = tuple(dense_shape)
        if self.dense_shape is not None and self.dense_shape != shape:
            raise SlicesError(
                f"IndexedSlices of a table of shape {self.dense_shape} were used for one of shape "
                f"{shape}."
            )
        of_shape = IndexedSlices(self.values, self.indices, shape)
        if not isinstance(self.indices, Tracer):
            of_shape._check_range(shape[0])
        return of_shape

    def _check_range(self, rows: int) -> None:
        indices = np.asarray(self.indices)
        outside = indices[(indices < 0) | ((indices >= rows) & (indices != no_row(indices.dtype)))]
        if outside.size:
            raise SlicesError(
                f"IndexedSlices have the index {outside[0]}, and the table has rows 0 to "
                f"{rows - 1}. (In a compiled step, where indices are not known, such a row is "
                "dropped.)"
            )

    def merged(self) -> IndexedSlices:
        """Return slices with the rows of equal index added, in ascending order of their indices.

        In a compiled step there are as many rows as before, those not needed being filled up.
        """
        indices = self.indices
        if indices.shape[0] == 0:
            return self
        fill = no_row(indices.dtype)
        if isinstance(indices, Tracer):
            unique, rows = jnp.unique(
                indices, return_inverse=True, size=indices.shape[0], fill_value=fill
            )
        else:
            found, rows = np.unique(np.asarray(indices), return_inverse=True)
            unique = jnp.asarray(found)
        sums = jnp.zeros((unique.shape[0], *self.values.shape[1:]), self.values.dtype)
        merged = IndexedSlices(sums.at[rows].add(self.values), unique, self.dense_shape)
        if isinstance(indices, Tracer) or found[-1] != fill:
            return merged
        return IndexedSlices(merged.values[:-1], unique[:-1], self.dense_shape)

    def to_dense(self) -> jax.Array:
        """Return the table, ``dense_shape``, with zeros in the other rows.

        Raises:
          SlicesError: if the shape of the table is not known, or an index names no row of it.
        """
        if self.dense_shape is None:
            raise SlicesError(
                "IndexedSlices without a dense_shape are rows of a table of any size: give "
                "dense_shape=(rows, ...) to make an array of them."
            )
        slices = self.of_shape(self.dense_shape)
        table = jnp.zeros(self.dense_shape, self.values.dtype)
        return table.at[slices.indices].add(slices.values, mode="drop", wrap_negative_indices=False)

    def __jax_array__(self) -> jax.Array:
        return self.to_dense()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.to_dense(), dtype=dtype)


def no_row(dtype: Any) -> int:
    """Return the index of rows that are only there to fill up a shape."""
    return int(jnp.iinfo(dtype).max)


def is_slices(value: Any) -> bool:
    """Tell whether ``value`` is an :class:`IndexedSlices`; a leaf test for tree functions."""
    return isinstance(value, IndexedSlices)


def map_apart(
    tree: Any, of_arrays: Callable[[Any], Any], of_slices: Callable[[IndexedSlices], Any]
) -> Any:
    """Apply one function to the tree of arrays in ``tree``, another to each IndexedSlices.

    Args:
      tree: a pytree.
      of_arrays: from ``tree`` without its slices to a tree of the same structure.
      of_slices: from one IndexedSlices to what takes its place.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
    if not any(map(is_slices, leaves)):
        return of_arrays(tree)
    arrays = jax.tree.map(lambda x: None if is_slices(x) else x, tree, is_leaf=is_slices)
    results = iter(jax.tree.leaves(of_arrays(arrays)))
    return jax.tree.unflatten(
        treedef, [of_slices(leaf) if is_slices(leaf) else next(results) for leaf in leaves]
    )


def _flattened(slices: IndexedSlices) -> tuple[Any, Any]:
    keys = jax.tree_util.GetAttrKey
    return ((keys("values"), slices.values), (keys("indices"), slices.indices)), slices.dense_shape


def _unflattened(dense_shape: tuple[int, ...] | None, children: Any) -> IndexedSlices:
    slices = object.__new__(IndexedSlices)  # The leaves may be anything, as in all pytrees.
    for name, value in zip(
        ("values", "indices", "dense_shape"), (*children, dense_shape), strict=True
    ):
        object.__setattr__(slices, name, value)
    return slices


jax.tree_util.register_pytree_with_keys(IndexedSlices, _flattened, _unflattened)
