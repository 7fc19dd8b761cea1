"""Whether copies that must agree do."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from distrib.errors import NotMirroredError
from distrib.platform import leaves_with_paths, short_device_string
from distrib.values import DistributedValues, Mirrored
from distrib.variables import HoldsVariables, Variable


def assert_mirrored(tree: Any) -> None:
    """Check that every copy of every value in ``tree`` is equal, bit by bit.

    Args:
      tree: variables, train states, mirrored values, arrays, and pytrees of them. An array with one
        copy agrees with itself. What each replica keeps for itself in a train state or metric, such
        as the gradients that it accumulates, is passed over.

    Raises:
      NotMirroredError: naming the value, the devices and the largest difference.
    """
    for path, leaf in leaves_with_paths(tree, is_leaf=_has_copies):
        if isinstance(leaf, HoldsVariables):
            for variable in leaf.distributed_variables():
                if not variable.storage.per_replica:
                    _check(variable, variable.name)
        else:
            _check(leaf, path)


def _has_copies(leaf: Any) -> bool:
    return isinstance(leaf, DistributedValues | Variable | HoldsVariables)


def _check(leaf: Any, name: str) -> None:
    if isinstance(leaf, Variable):
        name = f"variable {leaf.name!r}" if name == "(root)" else f"{name} (variable {leaf.name!r})"
    if isinstance(leaf, Variable) and leaf.storage.per_replica:
        raise NotMirroredError(
            f"Variable {leaf.name!r} is ON_READ: its copies are each replica's own and need not "
            "agree."
        )
    if isinstance(leaf, DistributedValues) and not isinstance(leaf, Mirrored):
        raise NotMirroredError(f"{name} is a {type(leaf).__name__}, whose components may differ.")
    if isinstance(leaf, Variable | Mirrored):
        copies = list(leaf.values)
    elif isinstance(leaf, jax.Array):
        if not leaf.is_fully_replicated:
            raise NotMirroredError(f"{name} is an array that is split over devices, not mirrored.")
        copies = [shard.data for shard in leaf.addressable_shards]
    else:
        return
    first = np.asarray(copies[0])
    for copy in copies[1:]:
        other = np.asarray(copy)
        if first.tobytes() != other.tobytes():
            where = [short_device_string(next(iter(c.devices()))) for c in (copies[0], copy)]
            raise NotMirroredError(
                f"The copies of {name} on {where[0]} and {where[1]} differ, by up to "
                f"{_largest(first, other)}. A replica assigned its own value: give the variable an "
                "aggregation, or all-reduce the value first."
            )


def _largest(a: np.ndarray, b: np.ndarray) -> Any:
    if np.issubdtype(a.dtype, np.number):
        return np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))
    return f"{np.sum(a != b)} elements"
