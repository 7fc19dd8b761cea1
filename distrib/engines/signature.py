"""What of a call to ``run`` decides which program serves it, and how its arguments enter that.

A program is made for a function, a structure of arguments, and for each leaf its kind: split over
the replicas, the same on every replica, or a Python object that is part of the program.
"""

from __future__ import annotations

import enum
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.engines.nnx_objects import is_nnx_object
from distrib.values import Layout, Mirrored, PerReplica
from distrib.variables import HoldsVariables, Variable


class Kind(enum.Enum):
    """How a leaf of the arguments enters the program."""

    SPLIT = "split"
    """A per-replica value whose components have one shape."""
    UNEVEN = "uneven"
    """A per-replica value whose components differ in shape."""
    EVERYWHERE = "everywhere"
    """An array or number that is the same on every replica."""
    OBJECT = "object"
    """A Python object that the function sees as it is."""


def is_argument(node: Any) -> bool:
    """Tell tree functions where the arguments of a step end."""
    return isinstance(node, Variable) or is_nnx_object(node)


class _Identity:
    """A key that equals another of the same living object, and does not keep it alive."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, value: Any):
        self._ref = weakref.ref(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return NotImplemented
        mine = self._ref()
        return mine is not None and mine is other._ref()


class _Constant:
    """A key that equals another of an equal object of the same type: 1 == True == Mode.TRAIN."""

    __slots__ = ("_key",)

    def __init__(self, value: Any):
        self._key = (type(value), value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self._key == other._key

    def __repr__(self) -> str:
        return repr(self._key[1])


_BY_VALUE = (bool, str, bytes, type(None), enum.Enum)


def leaf_key(leaf: Any) -> tuple[Kind, Any]:
    """Return how a leaf enters the program and what of it the program depends on.

    Returns:
      The kind, and a hashable key: shape and dtype of arrays, the type of numbers, the identity or
      value of objects.
    """
    if isinstance(leaf, PerReplica):
        if leaf.signature is None:
            leaf.signature = _components_signature(leaf)
        uneven = leaf.signature[0] is Layout.COMPONENTS
        return (Kind.UNEVEN if uneven else Kind.SPLIT), leaf.signature
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        # The dtype of typed PRNG keys is not NumPy's.
        if isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in "OSU":
            raise TypeError(
                f"strategy.run got an array of dtype {leaf.dtype}, which no device can hold: "
                "convert it to numbers, or pass single strings, which are constants of the program."
            )
        dtype = held_dtype(leaf.dtype)
        return Kind.EVERYWHERE, (leaf.shape, dtype, getattr(leaf, "weak_type", False))
    if isinstance(leaf, _BY_VALUE):
        return Kind.OBJECT, _Constant(leaf)
    if isinstance(leaf, int | float | complex):
        return Kind.EVERYWHERE, type(leaf)
    if isinstance(leaf, Mirrored):
        first = leaf.values[0] if leaf.whole is None else leaf.whole
        return Kind.EVERYWHERE, (np.shape(first), jnp.result_type(first), False)
    if isinstance(leaf, Variable | HoldsVariables):
        return Kind.OBJECT, _Identity(leaf)
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"strategy.run got an argument of type {type(leaf).__name__}, which is neither an "
            "array nor hashable: a program can be made neither from it nor for it. Pass arrays, "
            "numbers, pytrees of them, distributed values, variables, NNX modules or hashable "
            "constants."
        ) from None
    try:
        return Kind.OBJECT, _Identity(leaf)
    except TypeError:  # No weak references to it: a plain value such as a dtype or a range.
        return Kind.OBJECT, _Constant(leaf)


def _components_signature(leaf: PerReplica) -> tuple[Any, ...]:
    parts = leaf.values
    if not all(hasattr(part, "shape") or isinstance(part, int | float | complex) for part in parts):
        raise TypeError(
            f"strategy.run got {leaf!r}, whose components are not arrays or numbers: a compiled "
            "step cannot hand a different Python object to each replica."
        )
    forms = [(np.shape(part), jnp.result_type(part)) for part in parts]
    if all(form == forms[0] for form in forms):
        return (Layout.STACKED, (len(parts), *forms[0][0]), forms[0][1], None)
    return (Layout.COMPONENTS, tuple(forms))


def held_dtype(dtype: Any) -> Any:
    """Return the dtype in which JAX holds an array of ``dtype``: float32 of float64, for one."""
    return _held_dtype(dtype, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _held_dtype(dtype: Any, wide: bool) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def traced_form(leaf: Any, key: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf as the function sees it in a replica.

    Args:
      leaf: a leaf of kind SPLIT or EVERYWHERE.
      key: its key, from :func:`leaf_key`.
    """
    if isinstance(leaf, PerReplica):
        layout, shape, dtype, _ = key
        if layout is Layout.STACKED:
            return jax.ShapeDtypeStruct(shape[1:], dtype)
        return jax.ShapeDtypeStruct((shape[0] // len(leaf.values), *shape[1:]), dtype)
    if isinstance(key, type):
        return jax.ShapeDtypeStruct((), jnp.result_type(key), weak_type=True)
    shape, dtype, weak_type = key
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
