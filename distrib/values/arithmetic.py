"""The operators of an array for a class that has a value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
    __lshift__, __rlshift__ = _binary(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift)
    __divmod__, __rdivmod__ = _binary(divmod)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply a NumPy function as JAX does, in a step too; what JAX lacks, as NumPy does."""
        function = getattr(jnp, ufunc.__name__, None)
        if method == "__call__" and function is not None and not options:
            if not any(isinstance(x, list | tuple) for x in inputs):
                return function(*map(operand, inputs))
        arrays = [np.asarray(x) if isinstance(x, ArrayOperators) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **options)

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

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value(), digits or 0)

    def __format__(self, specification: str) -> str:
        return format(self.value(), specification) if specification else repr(self)

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

    @property
    def at(self) -> Any:
        """The helper for updated copies, ``v.at[i].set(x)``; the variable stays what it is."""
        return self.value().at

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self.value().item()

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers."""
        return self.value().tolist()

    def sum(self, axis: Any = None, **options: Any) -> jax.Array:
        """Return the sum over ``axis``; options are those of ``jnp.sum``."""
        return self.value().sum(axis, **options)

    def mean(self, axis: Any = None, **options: Any) -> jax.Array:
        """Return the mean over ``axis``; options are those of ``jnp.mean``."""
        return self.value().mean(axis, **options)

    def max(self, axis: Any = None, **options: Any) -> jax.Array:
        """Return the largest element over ``axis``; options are those of ``jnp.max``."""
        return self.value().max(axis, **options)

    def min(self, axis: Any = None, **options: Any) -> jax.Array:
        """Return the smallest element over ``axis``; options are those of ``jnp.min``."""
        return self.value().min(axis, **options)
