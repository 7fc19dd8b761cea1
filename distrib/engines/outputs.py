"""What a step returned, while it is traced: its arrays, and where they stood."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.engines.local_values import local_value
from distrib.errors import OutputError
from distrib.platform.pytree_paths import leaves_with_paths
from distrib.values import DistributedValues, PerReplica
from distrib.variables import HoldsVariables, Variable

_SAME_EVERYWHERE = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Outputs:
    """The outputs of a traced function.

    Attributes:
      arrays: its arrays, traced.
      everywhere: for each, whether it is one value of cross-replica context, equal on all replicas,
        and not the value of one replica.
      rebuild: from the arrays of a call to what the function returned.
    """

    arrays: list[Any]
    everywhere: tuple[bool, ...]
    rebuild: Callable[[Sequence[Any]], Any]


def is_end(leaf: Any) -> bool:
    """Tell where what a step returned ends, for tree functions."""
    return isinstance(leaf, DistributedValues | Variable | HoldsVariables)


def is_array(leaf: Any) -> bool:
    """Tell whether a leaf that a step returned is an array of numbers."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and not isinstance(leaf, np.str_)


def check_returned(leaf: Any, path: str) -> None:
    """Check that a leaf which is no array can be handed out of a step.

    Raises:
      OutputError: if it is not a constant or a variable; the message names its path.
    """
    if not isinstance(leaf, (*_SAME_EVERYWHERE, HoldsVariables, Variable)):
        raise OutputError(
            f"The step returned {leaf!r} of type {type(leaf).__name__} at {path}, which is not "
            "an array. A step returns arrays, numbers, strings, None, variables and pytrees of "
            "them: keep other objects outside."
        )


def record_outputs(result: Any, *, in_replica: bool) -> Outputs:
    """Take the arrays out of what a function returned and remember where they stood.

    Args:
      result: what it returned.
      in_replica: whether it is the function of a replica, and not of cross-replica context.

    Raises:
      OutputError: if a leaf is neither an array nor a constant.
    """
    arrays: list[Any] = []
    everywhere: list[bool] = []
    slots: list[Callable[..., Any]] = []
    for path, leaf in leaves_with_paths(result, is_leaf=is_end):
        differs = in_replica or isinstance(leaf, PerReplica)
        if isinstance(leaf, DistributedValues):
            leaf = local_value(leaf)
        if is_array(leaf):
            arrays.append(jnp.asarray(leaf))
            everywhere.append(not differs)
            slots.append(next if differs else _next_of_first_replica)
            continue
        check_returned(leaf, path)
        if isinstance(leaf, _SAME_EVERYWHERE):
            slots.append(lambda _, leaf=leaf: leaf)
        else:
            # A weak reference: a compiled step must not keep its variables alive.
            reference = weakref.ref(leaf)
            slots.append(lambda _, reference=reference: reference())
    treedef = jax.tree.structure(result, is_leaf=is_end)

    def rebuild(results: Sequence[Any]) -> Any:
        remaining = iter(results)
        return jax.tree.unflatten(treedef, [slot(remaining) for slot in slots])

    return Outputs(arrays, tuple(everywhere), rebuild)


def _next_of_first_replica(remaining: Any) -> Any:
    value = next(remaining)
    return value.values[0] if isinstance(value, PerReplica) else value
