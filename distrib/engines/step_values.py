"""The values of variables during one step that runs eagerly.

They are kept aside and put back when all replicas have returned, so that a step that fails changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.errors import AggregationError
from distrib.platform import Device, uncommitted
from distrib.reduce_op import ReduceOp
from distrib.values import DistributedValues
from distrib.variables import HoldsVariables, Variable, VariableAggregation


class StepValues:
    """The values of variables during one eager step, a component for each replica."""

    def __init__(self, strategy: Any, devices: Sequence[Device]):
        self.strategy = strategy
        self.devices = devices
        self._components: dict[int, tuple[Variable, list[jax.Array]]] = {}
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
        return reduced(ReduceOp.parse(variable.aggregation.name), parts, self.devices[0])

    def put_back(self) -> None:
        """Store what has changed in the variables."""
        for key, variable in self._changed.items():
            variable.storage.put_components(self._components[key][1])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _kept(leaf: Any) -> bool:
    return isinstance(leaf, DistributedValues | Variable | HoldsVariables)


def reduced(op: ReduceOp, parts: Sequence[Any], device: Device) -> Any:
    """Add the parts in the order of the replicas, on one device.

    Raises:
      AggregationError: if their shapes or dtypes differ.
    """
    arrays = [uncommitted(jax.device_put(jnp.asarray(part), device)) for part in parts]
    forms = [form(array) for array in arrays]
    if len(set(forms)) > 1:
        raise AggregationError(
            f"The replicas bring {', '.join(forms)} to one all-reduce: shapes and dtypes must be "
            "equal. Reduce over the batch first."
        )
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total if op is ReduceOp.SUM else total / len(arrays)


def form(array: Any) -> str:
    """Return dtype and shape of an array, for messages: ``float32[2,3]``."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
