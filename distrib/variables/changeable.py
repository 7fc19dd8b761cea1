"""What can be read and changed: a variable, and one copy of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.errors import SlicesError, VariableError
from distrib.platform import ends_with_users_line
from distrib.values import ArrayOperators, DistributedValues, IndexedSlices
from distrib.variables.change import UNCOMBINED_SCATTERS, change_name


class Changeable(ArrayOperators):
    """A value with a name, a shape and a dtype that assignments and scatters change."""

    @property
    def name(self) -> str:
        """The name, for messages."""
        raise TypeError(f"{type(self).__name__} has no name")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value, without any replica axis."""
        raise TypeError(f"{type(self).__name__} has no shape")

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        raise TypeError(f"{type(self).__name__} has no dtype")

    @property
    def ndim(self) -> int:
        """The number of axes of the value."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return int(np.prod(self.shape, dtype=np.int64))

    def read_value(self) -> jax.Array:
        """Return the current value; the same as :meth:`value`."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """Copy the value to the host."""
        return np.array(self.value())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value(), dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def change(self, kind: str, value: Any) -> Any:
        """Change the value and return the new one.

        Args:
          kind: ``"assign"``, ``"add"``, ``"sub"``, or the name of a scatter method.
          value: an array; for a scatter an :class:`distrib.IndexedSlices`.
        """
        raise TypeError(f"{type(self).__name__} cannot be changed")

    @ends_with_users_line
    def assign(self, value: Any, *, read_value: bool = True) -> Any:
        """Replace the value.

        In a replica, an ``ON_WRITE`` variable combines the replicas' values by ``aggregation``
        first; an ``ON_READ`` one changes this replica's copy alone.

        Args:
          value: an array of :attr:`shape`, or a number for a scalar. Outside of a replica also a
            distributed value, whose components go to the copies.
          read_value: whether to return the new value.

        Returns:
          The new value: an array in a replica, a distributed value outside; None if ``read_value``
          is False.

        Raises:
          VariableError: if shape or dtype do not fit: a number of another kind, a floating one for
            an integer variable, or a Python int outside of its range; or if a boolean is added.
          ContextError: inside the step of another strategy.
          NestedTraceError: inside of a JAX transformation.
        """
        new = self.change("assign", value)
        return new if read_value else None

    @ends_with_users_line
    def assign_add(self, value: Any, *, read_value: bool = True) -> Any:
        """Add ``value``; as :meth:`assign` otherwise."""
        new = self._added("add", value)
        return new if read_value else None

    @ends_with_users_line
    def assign_sub(self, value: Any, *, read_value: bool = True) -> Any:
        """Subtract ``value``; as :meth:`assign` otherwise."""
        new = self._added("sub", value)
        return new if read_value else None

    def _added(self, kind: str, value: Any) -> Any:
        self._check_numbers(kind)
        return self.change(kind, value)

    def _check_numbers(self, kind: str) -> None:
        if self.dtype == jnp.bool_ and kind not in ("assign", *UNCOMBINED_SCATTERS):
            raise VariableError(
                f"{change_name(kind)} was called on variable {self.name!r} of dtype bool: booleans "
                "can be assigned, but not added or multiplied."
            )

    @ends_with_users_line
    def scatter_add(self, sparse_delta: IndexedSlices) -> Any:
        """Add rows to some rows of the value; rows of equal index are all added.

        In a replica the rows of all replicas are brought together: under aggregation SUM all are
        added, under MEAN divided by the number of replicas first; ONLY_FIRST_REPLICA takes those of
        replica 0, and with NONE each replica changes its own copy. The one copy of a
        :class:`distrib.CentralStorageStrategy` takes the rows of every replica, in their order and
        whatever its aggregation, as in tf.distribute.

        Replicas add their own rows of equal index before they exchange them, and send what is left:
        fewer bytes than the table as long as the rows of all replicas are fewer than twice its own.

        Args:
          sparse_delta: the rows. An index that names no row is refused where it is known, and
            dropped in a compiled step, where it is not.

        Returns:
          The new value, as :meth:`assign`.

        Raises:
          TypeError: if ``sparse_delta`` is not an :class:`distrib.IndexedSlices`.
          SlicesError: if its rows are no rows of this variable.
          UnsupportedError: for an ``ON_READ`` variable, whose copies are each replica's own.
        """
        return self._scatter("scatter_add", sparse_delta)

    @ends_with_users_line
    def scatter_sub(self, sparse_delta: IndexedSlices) -> Any:
        """Subtract rows; as :meth:`scatter_add` otherwise."""
        return self._scatter("scatter_sub", sparse_delta)

    @ends_with_users_line
    def scatter_mul(self, sparse_delta: IndexedSlices) -> Any:
        """Multiply by rows, those of equal index one after the other; as :meth:`scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    @ends_with_users_line
    def scatter_div(self, sparse_delta: IndexedSlices) -> Any:
        """Divide by rows, those of equal index one after the other; as :meth:`scatter_add`."""
        return self._scatter("scatter_div", sparse_delta)

    @ends_with_users_line
    def scatter_max(self, sparse_delta: IndexedSlices) -> Any:
        """Keep the larger of each element and the one given; as :meth:`scatter_add` otherwise.

        Raises:
          UnsupportedError: under aggregation SUM or MEAN, of which it can make nothing.
        """
        return self._scatter("scatter_max", sparse_delta)

    @ends_with_users_line
    def scatter_min(self, sparse_delta: IndexedSlices) -> Any:
        """Keep the smaller of each element and the one given; as :meth:`scatter_max`."""
        return self._scatter("scatter_min", sparse_delta)

    @ends_with_users_line
    def scatter_update(self, sparse_delta: IndexedSlices) -> Any:
        """Put rows in place of others, of equal index the last; as :meth:`scatter_max`."""
        return self._scatter("scatter_update", sparse_delta)

    def _scatter(self, kind: str, sparse_delta: Any) -> Any:
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(
                f"{kind} of variable {self.name!r} takes a distrib.IndexedSlices(values, indices), "
                f"and got a {type(sparse_delta).__name__}."
            )
        self._check_numbers(kind)
        return self.change(kind, sparse_delta)

    def fitted(self, value: Any) -> Any:
        """Return ``value`` as an array, or rows, of this variable's shape and dtype.

        Raises:
          VariableError: if it does not fit; the message names both and the fix.
          SlicesError: if rows are no rows of this variable.
        """
        if isinstance(value, IndexedSlices):
            return self._fitted_rows(value)
        python_int = isinstance(value, int) and not isinstance(value, bool)
        array = self._of_number(value) if python_int else as_array(value, self.name)
        if array.shape != self.shape:
            raise VariableError(
                f"Cannot assign value to variable {self.name!r}: Shape mismatch. The variable "
                f"shape {self.shape}, and the assigned value shape {array.shape} are incompatible."
            )
        return self._of_my_dtype(value, array)

    def _fitted_rows(self, slices: IndexedSlices) -> IndexedSlices:
        values = self._of_my_dtype(slices.values, slices.values)
        try:
            return slices.with_values(values).of_shape(self.shape)
        except SlicesError as error:
            raise SlicesError(f"Variable {self.name!r} of shape {self.shape}: {error}") from None

    def _of_my_dtype(self, value: Any, array: jax.Array) -> jax.Array:
        if array.dtype == self.dtype:
            return array
        # Python numbers, and arrays made of them alone, have a kind but no precision of their own.
        if not hasattr(value, "dtype") or getattr(array, "weak_type", False):
            fits = _kind(array.dtype) <= _kind(self.dtype)
        else:
            fits = jnp.promote_types(array.dtype, self.dtype) == self.dtype
        if not fits:
            raise VariableError(
                f"Cannot assign value to variable {self.name!r}: its dtype is {self.dtype}, "
                f"and the value's {array.dtype} would lose information. Convert it first: "
                f"jnp.asarray(value).astype({str(self.dtype)!r})."
            )
        return array.astype(self.dtype)

    def _of_number(self, number: int) -> jax.Array:
        if self.dtype == jnp.bool_:
            raise VariableError(
                f"Cannot assign value to variable {self.name!r}: its dtype is bool, and the value "
                f"is the number {number}. Assign {bool(number)}."
            )
        try:
            return jnp.asarray(number, self.dtype)
        except OverflowError:
            raise VariableError(
                f"Cannot assign value to variable {self.name!r}: {number} is outside of the range "
                f"of its dtype {self.dtype}."
            ) from None


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _kind(dtype: Any) -> int:
    """Return where a dtype stands in: booleans, integers, floating and complex numbers, others."""
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), len(_KINDS))


def as_array(value: Any, name: str | None, dtype: Any = None) -> jax.Array:
    """Return ``value`` as an array that a device can hold.

    Raises:
      VariableError: for text and objects, which none can, and integers that are too large; the
        message names the variable.
    """
    try:
        return jnp.asarray(value, dtype=dtype)
    except OverflowError as error:
        raise VariableError(
            f"Variable {name!r} was given {value!r}, which is too large: {error}. Give it a "
            "floating dtype, or turn on JAX's 64-bit types (jax_enable_x64)."
        ) from error
    except (TypeError, ValueError) as error:
        if isinstance(value, DistributedValues) or np.asarray(value).dtype.kind not in "OSU":
            raise
        raise VariableError(
            f"Variable {name!r} was given {value!r}, which is no array of numbers, and no device "
            "can hold it. Keep text and objects in Python, as an attribute or an argument of the "
            "step: there they are constants."
        ) from error
