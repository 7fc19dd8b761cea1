"""Flax NNX modules and optimizers as arguments of a step.

An NNX object is changed in place by the function that it is given to. Inside a step a copy is made
of traced state, the function changes that, and the new state goes back into the user's object. NNX
is looked up among the loaded modules: whoever has an NNX object has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distrib.errors import OutputError, VariableError


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_nnx_object(value: Any) -> bool:
    """Tell whether ``value`` is an NNX module, optimizer, metric or stream of keys."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Pytree)


@dataclass(frozen=True)
class NnxState:
    """The state of the NNX objects of one call, taken apart.

    Attributes:
      graphdef: their structure: hashable, and equal for objects that one program can serve.
      treedef: the structure of the state.
      variables: the NNX variables, in the order of ``treedef``.
      paths: the name of each, for messages.
    """

    graphdef: Any
    treedef: Any
    variables: tuple[Any, ...]
    paths: tuple[str, ...]

    @property
    def arrays(self) -> list[Any]:
        """The value of each variable."""
        return [variable.get_value() for variable in self.variables]

    def key(self) -> Any:
        """Return what of the objects the program depends on."""
        forms = tuple((a.shape, a.dtype) for a in self.arrays)
        return (self.graphdef, self.treedef, forms, tuple(type(v) for v in self.variables))


def take_apart(objects: Sequence[Any]) -> NnxState:
    """Split NNX objects, which may share variables, into structure and state."""
    nnx = _nnx()
    graphdef, state = nnx.split(tuple(objects))
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    paths = tuple(
        ".".join(str(getattr(key, "key", key)) for key in path[1:]) for path, _ in with_paths
    )
    return NnxState(graphdef, treedef, tuple(leaf for _, leaf in with_paths), paths)


def put_together(state: NnxState, arrays: Sequence[Any], replica_id: Any) -> tuple[Any, ...]:
    """Build copies of the objects around other arrays, for one replica.

    The keys of random streams are folded with the replica's id, so that replicas draw differently.
    """
    nnx = _nnx()
    arrays = [
        fold_key(array, replica_id) if isinstance(variable, nnx.RngKey) else array
        for variable, array in zip(state.variables, arrays, strict=True)
    ]
    leaves = [v.replace(a) for v, a in zip(state.variables, arrays, strict=True)]
    return nnx.merge(state.graphdef, jax.tree.unflatten(state.treedef, leaves))


def fold_key(key: Any, replica_id: Any) -> Any:
    """Fold the replica's id into one key or an array of keys."""
    folded = jax.random.fold_in
    for _ in range(key.ndim):
        folded = jax.vmap(folded, in_axes=(0, None))
    return folded(key, replica_id)


def changed(before: NnxState, arrays: Sequence[Any], objects: Sequence[Any]) -> dict[int, Any]:
    """Return the variables that a function changed, by position, with their new values.

    Args:
      before: the state that went in.
      arrays: the traced arrays that went in.
      objects: the copies that the function was given.

    Raises:
      OutputError: if the function changed the structure of the objects.
    """
    nnx = _nnx()
    after = take_apart(objects)
    if after.treedef != before.treedef:
        raise OutputError(
            "The step added or removed variables of an NNX module. A compiled step can change "
            "their values only: build the module entirely before strategy.run."
        )
    return {
        position: new
        for position, (old, new, variable) in enumerate(
            zip(arrays, after.arrays, before.variables, strict=True)
        )
        # A stream's key went in folded with the replica's id and stays what it was outside.
        if new is not old and not isinstance(variable, nnx.RngKey)
    }


def is_batch_statistic(variable: Any) -> bool:
    """Tell whether replicas may differ in ``variable``, whose mean is then kept."""
    return isinstance(variable, _nnx().BatchStat)


def write_back(state: NnxState, new: dict[int, Any]) -> None:
    """Put the new values into the user's objects."""
    for position, array in new.items():
        state.variables[position].set_value(array)


def check_no_nnx_constants(objects: Sequence[Any], constants: Sequence[Any]) -> None:
    """Check that a step has not taken the state of NNX objects that it was not given.

    Args:
      objects: the NNX objects that the step can reach.
      constants: the arrays that became constants of its program.

    Raises:
      VariableError: if one is of an object's state, and would be stale after its next change.
    """
    taken = {id(constant) for constant in constants}
    for value in objects:
        if any(id(array) in taken for array in jax.tree.leaves(_nnx().state(value))):
            raise VariableError(
                f"The step uses an NNX {type(value).__name__} without being given it: its values "
                "would be constants of the compiled step. Pass it as an argument: "
                "strategy.run(step, args=(model, ...))."
            )
