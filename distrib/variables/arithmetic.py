"""The operators of an array for a class that has a value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


def _binary(op: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    def forward(self: ArrayOperators, other: Any) -> Any:
        return op(self.value(), operand(other))

    def reflected(self: ArrayOperators, other: Any) -> Any:
        return op(operand(other), self.value())

    return forward, reflected


def operand(value: Any) -> Any:
    """Return the array of a value that has one, and any other value as it is."""
    return value.value() if isinstance(value, ArrayOperators) else value


class ArrayOperators:
    """Arithmetic, comparison, indexing and conversion through :meth:`value`."""

    def value(self) -> jax.Array:
        """Return the array that the operators work on."""
        raise TypeError(f"{type(self).__name__} has no value")

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul)
    __and__, __rand__ = _binary(operator.and_)
    __or__, __ror__ = _binary(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor)
    __lt__, _ = _binary(operator.lt)
    __le__, _ = _binary(operator.le)
    __gt__, _ = _binary(operator.gt)
    __ge__, _ = _binary(operator.ge)
    __eq__, _ = _binary(operator.eq)
    __ne__, _ = _binary(operator.ne)
    # Comparison is by element, as of arrays; identity is what dictionaries and sets need.
    __hash__ = object.__hash__
    # Without this, a NumPy array on the left would take the operator for each of its elements.
    __array_ufunc__ = None

    def __neg__(self) -> jax.Array:
        return -self.value()

    def __pos__(self) -> jax.Array:
        return self.value()

    def __abs__(self) -> jax.Array:
        return abs(self.value())

    def __invert__(self) -> jax.Array:
        return ~self.value()

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value()[index]

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    @property
    def T(self) -> jax.Array:  # noqa: N802 - the name that arrays have.
        """The transposed value."""
        return self.value().T

    def astype(self, dtype: Any) -> jax.Array:
        """Return the value converted to ``dtype``."""
        return self.value().astype(dtype)

    def reshape(self, *shape: Any) -> jax.Array:
        """Return the value in another shape."""
        return jnp.reshape(self.value(), shape[0] if len(shape) == 1 else shape)

    def sum(self, axis: Any = None) -> jax.Array:
        """Return the sum over ``axis``."""
        return self.value().sum(axis)

    def mean(self, axis: Any = None) -> jax.Array:
        """Return the mean over ``axis``."""
        return self.value().mean(axis)
