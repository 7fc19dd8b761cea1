"""The program of one replica that runs eagerly, in a thread: variables, and meetings.

The values of variables during a step are kept aside and put back when all replicas have returned,
so that a step that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from distrib.collectives import check_arrays
from distrib.context import current_frame
from distrib.engines.program import Apply, Update, applied, combined, share_of_total
from distrib.engines.turns import Request, Turn
from distrib.engines.weights import ExampleWeights
from distrib.errors import AggregationError, ContextError, NestedTraceError
from distrib.platform import Device, uncommitted
from distrib.reduce_op import ReduceOp
from distrib.values import DistributedValues
from distrib.variables import Variable, VariableAggregation, VariableSynchronization


class StepValues:
    """The values of variables during one eager step, a component for each replica."""

    def __init__(self, strategy: Any, devices: Sequence[Device]):
        self.strategy = strategy
        self.devices = devices
        self._components: dict[int, tuple[Variable, list[jax.Array]]] = {}
        self._changed: dict[int, Variable] = {}

    def get(self, variable: Variable, replica: int) -> jax.Array:
        """Return the component of a replica."""
        return self._of(variable)[replica]

    def _of(self, variable: Variable) -> list[jax.Array]:
        if id(variable) not in self._components:
            found = list(variable.storage.components())
            if len(found) != len(self.devices):
                # One copy, on the parameter device or of another strategy: each replica reads it.
                found = [self.here(found[0], i) for i in range(len(self.devices))]
            self._components[id(variable)] = (variable, found)
        return self._components[id(variable)][1]

    def here(self, value: Any, replica: int) -> Any:
        """Return an array on the device of a replica, free to be combined with others there."""
        return uncommitted(jax.device_put(value, self.devices[replica]))

    def set(self, variable: Variable, replica: int, value: jax.Array) -> None:
        """Change the component of one replica."""
        self._of(variable)[replica] = value
        self._changed[id(variable)] = variable

    def set_all(self, variable: Variable, value: jax.Array) -> None:
        """Give every replica the same value."""
        for replica in range(len(self.devices)):
            self.set(variable, replica, self.here(value, replica))

    def aggregated(self, variable: Variable) -> jax.Array:
        """Return what a read in cross-replica context gives."""
        parts = self._of(variable)
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


def reduced(op: ReduceOp, parts: Sequence[Any], device: Device) -> Any:
    """Add the parts in the order of the replicas, on one device.

    Raises:
      AggregationError: if their shapes differ.
    """
    arrays = [uncommitted(jax.device_put(jnp.asarray(part), device)) for part in parts]
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) > 1:
        raise AggregationError(
            f"The replicas bring arrays of shapes {shapes} to one all-reduce: they must be equal. "
            "Reduce over the batch first."
        )
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total if op is ReduceOp.SUM else total / len(arrays)


class ReplicaThread:
    """The program of one replica; also the meeting of its replica context.

    Args:
      values: the variables during the step.
      turn: the thread, which asks for meetings; None for the program of cross-replica context.
      weights: the examples of this replica among those of all.
    """

    def __init__(self, values: StepValues, turn: Turn | None, weights: ExampleWeights | None):
        self._values = values
        self._turn = turn
        self._weights = weights
        self._size = len(values.devices)

    @property
    def _replica(self) -> int:
        return 0 if self._turn is None else self._turn.index

    def _ask(self, kind: Any, shown: str, payload: Any) -> Any:
        if self._turn is None or current_frame().replica is None:
            raise ContextError(
                f"{shown} was called in a merge function, where there is no replica."
            )
        for leaf in jax.tree.leaves(payload):
            if isinstance(leaf, Tracer):
                raise NestedTraceError(
                    f"{shown} was called inside a JAX transformation, where replicas that run "
                    "eagerly cannot meet. Call it in the replica function itself, or run compiled: "
                    "distrib.config.run_functions_eagerly(False)."
                )
        return self._turn.ask(Request(kind, shown, payload))

    # Variables.

    def read(self, variable: Variable) -> jax.Array:
        """Return this replica's value; in cross-replica context the aggregate."""
        if current_frame().replica is None:
            return self._values.aggregated(variable)
        return self._values.get(variable, self._replica)

    def assign(self, variable: Variable, kind: str, value: Any) -> Any:
        """Assign, meeting the other replicas if the variable is to be aggregated."""
        self._check_writable(variable, value)
        if current_frame().replica is None:
            return self._assign_everywhere(variable, kind, value)
        if isinstance(value, DistributedValues):
            value = value.values[self._replica]
        one_copy = len(variable.storage.components()) < self._size
        alone = variable.storage.per_replica or self._size == 1
        if not alone and not one_copy and variable.aggregation is VariableAggregation.NONE:
            alone = True
        if alone:
            old = self._values.get(variable, self._replica)
            self._values.set(variable, self._replica, combined(kind, old, variable.fitted(value)))
        else:
            name = "assign" if kind == "assign" else f"assign_{kind}"
            shown = f"{name} of variable {variable.name!r}"
            self._ask(("assign", kind, id(variable)), shown, (variable, kind, value))
        return self._values.get(variable, self._replica)

    def _assign_everywhere(self, variable: Variable, kind: str, value: Any) -> Any:
        parts = value.values if isinstance(value, DistributedValues) else [value] * self._size
        for replica, part in enumerate(parts):
            if variable.storage.per_replica:
                part = share_of_total(variable, kind, part, self._size)
            old = self._values.get(variable, replica)
            new = combined(kind, old, self._values.here(variable.fitted(part), replica))
            self._values.set(variable, replica, new)
        return self._values.aggregated(variable)

    def _check_writable(self, variable: Variable, value: Any) -> None:
        if isinstance(value, Tracer):
            raise NestedTraceError(
                f"Variable {variable.name!r} was changed inside a JAX transformation (jax.grad, "
                "jax.jit, lax.scan ...), whose values may not leave it. Return the new value from "
                "the transformed function (has_aux=True for gradients), and assign it outside."
            )
        if variable.distribute_strategy is not self._values.strategy:
            raise ContextError(
                f"Mixing different distrib.Strategy objects: variable {variable.name!r} belongs to "
                f"{variable.distribute_strategy!r} and was assigned in a step of "
                f"{self._values.strategy!r}. Create it inside the scope of the strategy that runs."
            )

    def update(self, variables: Sequence[Variable], apply: Apply, operand: Any) -> None:
        """Apply an update once and give every replica its results."""
        update = Update(tuple(variables), apply, operand)
        for variable in variables:
            self._check_writable(variable, None)
        if current_frame().replica is None:
            update_everywhere(self._values, update)
        else:
            self._ask(("update", *map(id, variables)), "an optimizer update", update)

    # The meeting of the replicas.

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        """Reduce a tree over the replicas; the gradient is the same reduction."""
        leaves, treedef = jax.tree.flatten(value)
        arrays = check_arrays(value, f"all_reduce({op.name})") if leaves else []
        shown = f"all_reduce({op.name})"

        @jax.custom_vjp
        def meet(inputs: list) -> list:
            return self._ask(("all_reduce", op, len(arrays)), shown, inputs)

        meet.defvjp(lambda inputs: (meet(inputs), None), lambda _, gradients: (meet(gradients),))
        if self._size == 1 or not arrays:
            return value
        return jax.tree.unflatten(treedef, meet(arrays))

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """Concatenate a tree over the replicas, of lengths that may differ along ``axis``."""
        leaves, treedef = jax.tree.flatten(value)
        arrays = check_arrays(value, "all_gather") if leaves else []
        for array in arrays:
            if not -array.ndim <= axis < array.ndim:
                raise AggregationError(
                    f"all_gather along axis {axis} got an array of shape {array.shape}, which has "
                    "no such axis. Scalars can be gathered as x[None] along axis 0."
                )
        if self._size == 1 or not arrays:
            return value
        return jax.tree.unflatten(treedef, [self._gathered(a, axis % a.ndim) for a in arrays])

    def _gathered(self, array: jax.Array, axis: int) -> Any:
        shown = f"all_gather(axis={axis})"
        lengths = self._ask(("lengths", axis), shown, np.int64(array.shape[axis]))
        start = int(sum(lengths[: self._replica]))

        @jax.custom_vjp
        def meet(x: Any) -> Any:
            return self._ask(("all_gather", axis), shown, x)

        def gradient(_: None, incoming: Any) -> tuple[Any]:
            (total,) = self._ask(
                ("all_reduce", ReduceOp.SUM, 1), f"gradient of {shown}", [incoming]
            )
            return (jax.lax.slice_in_dim(total, start, start + array.shape[axis], axis=axis),)

        meet.defvjp(lambda x: (meet(x), None), gradient)
        return meet(array)

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict) -> Any:
        """Call ``merge_fn`` once for all replicas, when all have come."""
        name = getattr(merge_fn, "__qualname__", repr(merge_fn))
        return self._ask("merge_call", f"merge_call({name})", (merge_fn, tuple(args), kwargs))

    def combine(self, value: Any, aggregation: str) -> Any:
        """Combine a tree: SUM, or MEAN weighted by the examples of each replica."""
        op = ReduceOp.parse(aggregation)
        if self._size == 1:
            return value
        if self._weights is not None:
            value = self._weights.applied(value, mean=op is ReduceOp.MEAN)
            op = ReduceOp.SUM
        leaves, treedef = jax.tree.flatten(value)
        shown = f"the combination ({aggregation}) of gradients or statistics"
        return jax.tree.unflatten(
            treedef, self._ask(("all_reduce", op, len(leaves)), shown, leaves)
        )

    def global_examples(self, local: int) -> int:
        """Return the examples of all replicas, of which this one has ``local``."""
        return local * self._size if self._weights is None else self._weights.total


def update_everywhere(values: StepValues, update: Update) -> None:
    """Apply an update to the first replica's values, and give all replicas the results."""
    olds = [values.get(v, 0) for v in update.variables]
    operand = jax.tree.map(lambda x: values.here(x, 0), update.operand)
    news = applied(Update(update.variables, update.apply, operand), olds)
    for variable, new in zip(update.variables, news, strict=True):
        values.set_all(variable, new)


def assign_aggregated(values: StepValues, requests: Sequence[Request]) -> None:
    """Combine what the replicas assign by the variable's aggregation, and assign it to all.

    Raises:
      AggregationError: if the variable has no aggregation, or SUM meets a Python number.
    """
    variable, kind, first = requests[0].payload
    parts = [request.payload[2] for request in requests]
    aggregation = variable.aggregation
    if aggregation is VariableAggregation.NONE:
        raise AggregationError(
            f"You must specify an aggregation method to update variable {variable.name!r} in "
            "replica context: pass aggregation= to distrib.Variable, or combine the value yourself "
            "with get_replica_context().all_reduce."
        )
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    same_number = not hasattr(first, "dtype") and all(part == first for part in parts)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        value = first
    elif same_number and not on_read:
        if aggregation is VariableAggregation.SUM:
            raise AggregationError(
                f"A non-DistributedValues value {first!r} cannot be reduced with the given reduce "
                f"op ReduceOp.SUM into variable {variable.name!r}: a Python number is one value "
                "for all replicas. Wrap it in jnp.asarray(...) to add it once for each replica."
            )
        value = first
    else:
        value = reduced(ReduceOp.parse(aggregation.name), parts, values.devices[0])
    operand = values.here(variable.fitted(value), 0)
    values.set_all(variable, combined(kind, values.get(variable, 0), operand))
