"""The values of variables during one step whose replicas run in threads, and how parts meet.

They are kept aside and put back when all replicas have returned, so that a step that fails changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distrib.collectives import CommunicationOptions, ComponentReducer
from distrib.platform import Device, uncommitted
from distrib.reduce_op import ReduceOp
from distrib.values import DistributedValues, local_shards
from distrib.variables import HoldsVariables, Variable, VariableAggregation


class StepValues:
    """The values of variables during one eager step, a component for each replica."""

    def __init__(self, strategy: Any, devices: Sequence[Device], reducer: ComponentReducer):
        self.strategy = strategy
        self.devices = devices
        self._reducer = reducer
        self._components: dict[int, tuple[Variable, list[jax.Array]]] = {}
        self._before: dict[int, list[jax.Array]] = {}
        self._changed: dict[int, Variable] = {}
        self.created: list[Variable] = []

    def get(self, variable: Variable, replica: int) -> jax.Array:
        """Return the component of a replica."""
        return self._of(variable)[replica]

    def _of(self, variable: Variable) -> list[jax.Array]:
        if id(variable) not in self._components:
            copies = variable.storage.components()
            if len(copies) != len(self.devices):
                # One copy, on the parameter device or of another strategy: each replica reads it.
                copies = [copies[0]] * len(self.devices)
            found = [self.here(copy, i) for i, copy in enumerate(copies)]
            self._components[id(variable)] = (variable, found)
            self._before[id(variable)] = list(found)
        return self._components[id(variable)][1]

    def here(self, value: Any, replica: int) -> Any:
        """Return an array, or a tree of them, on the device of a replica.

        It is committed to the device, so that what is computed with it is computed there.
        `jax.default_device` would bring what a replica makes from nothing there as well, but JAX
        then traces a jitted function anew for every device.
        """
        return jax.device_put(value, self.devices[replica])

    def free(self, value: Any, replica: int) -> jax.Array:
        """Return an array on the device of a replica that may be combined with those of others."""
        return uncommitted(self.here(value, replica))

    def outside(self, tree: Any, replica: int) -> Any:
        """Return what a replica hands out, its arrays on its own device and free."""
        return jax.tree.map(
            lambda leaf: self.free(leaf, replica) if _is_array(leaf) else leaf, tree, is_leaf=_kept
        )

    def set(self, variable: Variable, replica: int, value: jax.Array) -> None:
        """Change the component of one replica."""
        self._of(variable)[replica] = self.here(value, replica)
        self._changed[id(variable)] = variable

    def set_all(self, variable: Variable, value: jax.Array) -> None:
        """Give every replica the same value."""
        for replica in range(len(self.devices)):
            self.set(variable, replica, value)

    def aggregated(self, variable: Variable) -> jax.Array:
        """Return what a read in cross-replica context gives."""
        parts = [self.free(part, i) for i, part in enumerate(self._of(variable))]
        if not variable.storage.per_replica or len(parts) == 1:
            return parts[0]
        if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return parts[0]
        if variable.aggregation is VariableAggregation.NONE:
            return variable.storage.read()  # Raises the error that says what to do.
        return self.reduced(ReduceOp.parse(variable.aggregation.name), parts)

    def reduced(self, op: ReduceOp, parts: Sequence[Any]) -> jax.Array:
        """Return the reduction of one value over the replicas, free of any device.

        Raises:
          AggregationError: if the shapes or dtypes of its parts differ.
        """
        return self.free(self.all_reduced(op, [[part] for part in parts])[0][0], 0)

    def all_reduced(
        self,
        op: ReduceOp,
        payloads: Sequence[Sequence[Any]],
        options: CommunicationOptions | None = None,
    ) -> list[list[jax.Array]]:
        """Return for each replica the reductions of the values that the replicas bring.

        Raises:
          AggregationError: if the shapes or dtypes of a value's parts differ.
        """
        wholes = self._reducer.all_reduce(op, list(zip(*payloads, strict=True)), options)
        return self._dealt(wholes)

    def all_reduced_with_feedback(
        self, op: ReduceOp, payloads: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    ) -> list[tuple[list[jax.Array], list[jax.Array]]]:
        """Return for each replica the reductions, and what it has rounded off.

        Args:
          op: how.
          payloads: of each replica the values, and what it rounded off before.
        """
        values, residuals = (list(zip(*each, strict=True)) for each in zip(*payloads, strict=True))
        totals, errors = self._reducer.all_reduce_with_feedback(op, values, residuals)
        own = [[rows[0] for rows in part] for part in self._dealt(errors)]
        return list(zip(self._dealt(totals), own, strict=True))

    def _dealt(self, wholes: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Return for each replica what lies on its device of arrays over all of them."""
        shards = [local_shards(whole) for whole in wholes]
        return [
            [self.here(uncommitted(each[replica].data), replica) for each in shards]
            for replica in range(len(self.devices))
        ]

    def before(self, replica: int) -> list[tuple[Variable, jax.Array]]:
        """Return the variables that the step has touched, with what a replica had of them."""
        return [(self._components[key][0], old[replica]) for key, old in self._before.items()]

    def written(self, replica: int) -> list[tuple[Variable, jax.Array]]:
        """Return the variables that have changed, with what a replica has of them now."""
        return [(v, self._components[key][1][replica]) for key, v in self._changed.items()]

    def put_back(self) -> None:
        """Store what has changed in the variables."""
        for key, variable in self._changed.items():
            variable.storage.put_components(self._components[key][1])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _kept(leaf: Any) -> bool:
    return isinstance(leaf, DistributedValues | Variable | HoldsVariables)
