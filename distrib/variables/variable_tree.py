"""A pytree of variables that reads and is assigned as a pytree of arrays."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp

from distrib.context import current_program
from distrib.errors import VariableError
from distrib.platform import leaves_with_paths
from distrib.values import is_slices
from distrib.variables.synchronization import VariableAggregation, VariableSynchronization
from distrib.variables.variable import Variable, check_not_jitted


class VariableTree:
    """A variable for each leaf of a tree.

    Args:
      tree: arrays and numbers; typed PRNG keys are kept as their key data.
      name: the name of the tree; a variable is named by it and its path.
      aggregation: how values that replicas assign are combined, of floating leaves; integers take
        the first replica's.
      trainable: whether the variables are trainable.
      synchronization: when the copies are brought together.
      optimizer_state: whether it is state of an optimizer, which a strategy may split.
    """

    def __init__(
        self,
        tree: Any,
        name: str,
        aggregation: VariableAggregation = VariableAggregation.MEAN,
        trainable: bool = False,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        optimizer_state: bool = False,
    ):
        self._name = name
        self.treedef = jax.tree.structure(tree)
        self.variables: list[Variable] = []
        self._key_impls: list[Any] = []
        for path, leaf in leaves_with_paths({name: tree}):
            impl = _key_impl(leaf)
            value = leaf if impl is None else jax.random.key_data(leaf)
            floating = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
            self._key_impls.append(impl)
            self.variables.append(
                Variable(
                    value,
                    trainable=trainable,
                    name=path,
                    synchronization=synchronization,
                    optimizer_state=optimizer_state and floating,
                    aggregation=aggregation if floating else VariableAggregation.ONLY_FIRST_REPLICA,
                )
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> VariableTree:
        """Return a tree of new variables with equal values."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.variables = [copy.deepcopy(v, memo) for v in self.variables]
        return other

    def value(self) -> Any:
        """Return the tree of current values.

        In a replica these are its values. Outside they are arrays with all of their copies, as they
        lie on the devices, and the aggregate of ``ON_READ`` variables; they are snapshots, which
        training does not change.

        Raises:
          NestedTraceError: outside of a step, in a function that is traced for ``jax.jit``.
        """
        program = current_program()
        if program is None:
            check_not_jitted(self._name)
            return self.build([_snapshot(v) for v in self.variables])
        return self.build([program.read(v) for v in self.variables])

    def build(self, leaves: Any) -> Any:
        """Return the tree with these arrays, one for each variable, as leaves."""
        wrapped = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(leaves, self._key_impls, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, wrapped)

    def build_data(self) -> Any:
        """Return the tree of current values with keys as their key data, which can be saved."""
        return jax.tree.unflatten(self.treedef, [_snapshot(v) for v in self.variables])

    def flatten(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree of the same structure, keys as their key data.

        An :class:`distrib.IndexedSlices` is a leaf too: rows of the variable that stands there.

        Raises:
          VariableError: if the structure or a shape differs; the message names the first
            difference.
        """
        with_paths = leaves_with_paths({self._name: tree}, is_leaf=is_slices)
        if jax.tree.structure(tree, is_leaf=is_slices) != self.treedef:
            mine, given = {v.name for v in self.variables}, {path for path, _ in with_paths}
            lacking, more = sorted(mine - given), sorted(given - mine)
            says = [f"it has no {lacking[0]}"] if lacking else []
            says += [f"it has {more[0]}, where {self._name} has nothing"] if more else []
            raise VariableError(
                f"The tree given for {self._name} has another structure: "
                f"{' and '.join(says) or self.treedef}. Give a tree like {self._name}, with the "
                "same keys."
            )
        leaves = [
            leaf if impl is None else jax.random.key_data(leaf)
            for (_, leaf), impl in zip(with_paths, self._key_impls, strict=True)
        ]
        for position, (variable, leaf) in enumerate(zip(self.variables, leaves, strict=True)):
            if is_slices(leaf):
                leaves[position] = variable.fitted(leaf)
            elif jnp.shape(leaf) != variable.shape:
                raise VariableError(
                    f"{variable.name} has shape {variable.shape}, and was given a value of shape "
                    f"{jnp.shape(leaf)}."
                )
        return leaves

    def assign(self, tree: Any) -> None:
        """Assign a tree of the same structure; in a replica, combined over the replicas first.

        A mean is computed in the dtype of the variable, and weighted by the examples of each
        replica.

        Raises:
          VariableError: if structure, a shape or a dtype does not fit.
        """
        leaves = self.flatten(tree)
        program = current_program()
        if program is None:
            for variable, leaf in zip(self.variables, leaves, strict=True):
                variable.assign(leaf)
            return
        floating = [i for i, v in enumerate(self.variables) if jnp.issubdtype(v.dtype, jnp.inexact)]
        means = [i for i in floating if self.variables[i].aggregation is VariableAggregation.MEAN]
        names = [f"the new value of variable {self.variables[i].name}" for i in means]
        combined = program.by_examples.average(
            [self.variables[i].fitted(leaves[i]) for i in means], names
        )
        if means:
            chosen = [self.variables[i] for i in means]
            program.update(chosen, lambda olds, new: new, combined)
        for i in set(range(len(leaves))) - set(means):
            self.variables[i].assign(leaves[i])


def _snapshot(variable: Variable) -> jax.Array:
    storage = variable.storage
    return storage.read() if storage.per_replica else storage.whole()


def _key_impl(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_impl(leaf)
    return None
