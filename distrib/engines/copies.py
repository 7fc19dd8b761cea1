"""The copies of variables during a step, for ``extended.update`` in a merge function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from distrib.collectives import from_first_replica
from distrib.engines.local_values import as_per_replica, is_kept, local_value
from distrib.engines.step_values import StepValues
from distrib.platform import device_string
from distrib.values import DistributedValues, PerReplica, grouped, ungrouped
from distrib.variables import Variable, combined


class TracedVariables(Protocol):
    """What a traced program has of variables."""

    def own_value(self, variable: Variable) -> jax.Array:
        """Return what ``variable`` holds now, in this replica."""
        ...

    def update(self, variables: Any, apply: Any, operand: Any) -> None:
        """Record that ``variables`` become ``apply(old values, operand)``."""
        ...


class TracedCopies:
    """In a compiled step one traced call stands for all: each replica changes its own copy.

    Args:
      program: the program of the step.
      num_replicas: how many replicas run it.
      one_copy: whether variables have one copy, which gets what belongs to the first replica.
    """

    def __init__(self, program: TracedVariables, num_replicas: int, one_copy: bool):
        self._program = program
        self._size = num_replicas
        self._one_copy = one_copy

    def count(self, variable: Variable) -> int:
        """Return 1."""
        return 1

    def read(self, variable: Variable, index: int) -> jax.Array:
        """Return this replica's copy."""
        return self._program.own_value(variable)

    def change(self, variable: Variable, index: int, kind: str, value: Any) -> jax.Array:
        """Change this replica's copy."""
        self._program.update([variable], lambda olds, x: [combined(kind, olds[0], x)], value)
        return self._program.own_value(variable)

    def device(self, variable: Variable, index: int) -> str:
        """Return the device of the only copy; of several, with index ``*``."""
        first, *others = variable.distribute_strategy.extended.parameter_devices
        return f"{first.rpartition(':')[0]}:*" if others else first

    def select(self, leaf: Any, index: int) -> Any:
        """Return this replica's part of a distributed value."""
        if not isinstance(leaf, DistributedValues):
            return leaf
        local = local_value(leaf)
        if self._one_copy and self._size > 1 and isinstance(leaf, PerReplica):
            return from_first_replica(local)
        return local

    def results(self, trees: Sequence[Any], group: bool) -> Any:
        """Return the one tree; not grouped, with a tuple in place of each leaf."""
        (tree,) = trees
        if not self._one_copy and self._size > 1:
            tree = as_per_replica(tree)
        return tree if group else ungrouped(tree, is_kept)


class EagerCopies:
    """In an eager step each copy is changed by a call of its own.

    Args:
      values: the values of variables during the step.
    """

    def __init__(self, values: StepValues):
        self._values = values

    def count(self, variable: Variable) -> int:
        """Return the number of copies."""
        return min(variable.storage.num_copies, len(self._values.devices))

    def _replicas(self, variable: Variable, index: int) -> Sequence[int]:
        everyone = range(len(self._values.devices))
        return everyone if self.count(variable) == 1 else [index]

    def read(self, variable: Variable, index: int) -> jax.Array:
        """Return the copy, on its device."""
        return self._values.get(variable, index)

    def change(self, variable: Variable, index: int, kind: str, value: Any) -> jax.Array:
        """Change the copy; the only copy is that of every replica."""
        old = self._values.get(variable, index)
        new = combined(kind, old, self._values.here(value, index))
        for replica in self._replicas(variable, index):
            self._values.set(variable, replica, new)
        return new

    def device(self, variable: Variable, index: int) -> str:
        """Return the device of the copy."""
        if self.count(variable) == 1:
            return variable.distribute_strategy.extended.parameter_devices[0]
        return device_string(self._values.devices[index])

    def select(self, leaf: Any, index: int) -> Any:
        """Return a part of a distributed value, and arrays, on the device of the copy."""
        if isinstance(leaf, DistributedValues):
            leaf = leaf.values[index]
        return self._values.here(leaf, index) if isinstance(leaf, jax.Array) else leaf

    def results(self, trees: Sequence[Any], group: bool) -> Any:
        """Return one tree with per-replica values, or, not grouped, with a tuple of parts."""
        free = [self._values.outside(tree, i) for i, tree in enumerate(trees)]
        tree = grouped(free, PerReplica, is_kept)
        return tree if group else ungrouped(tree, is_kept)
