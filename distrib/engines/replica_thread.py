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

from distrib.collectives import check_arrays, check_numbers
from distrib.context import current_frame
from distrib.engines.program import Apply, Update, applied, combined, share_of_total
from distrib.engines.refusals import (
    changed_in_transformation,
    merged_in_transformation,
    number_summed,
    of_another_strategy,
    without_aggregation,
)
from distrib.engines.turns import Request, Turn
from distrib.engines.weights import ExampleWeights, part_of_sum
from distrib.errors import AggregationError, ContextError, NestedTraceError
from distrib.platform import Device, trace_token, uncommitted, under_jit
from distrib.reduce_op import ReduceOp
from distrib.values import DistributedValues
from distrib.variables import HoldsVariables, Variable, VariableAggregation, VariableSynchronization


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
            copies = variable.storage.components()
            if len(copies) != len(self.devices):
                # One copy, on the parameter device or of another strategy: each replica reads it.
                copies = [copies[0]] * len(self.devices)
            found = [self.here(copy, i) for i, copy in enumerate(copies)]
            self._components[id(variable)] = (variable, found)
        return self._components[id(variable)][1]

    def here(self, value: Any, replica: int) -> jax.Array:
        """Return an array on the device of a replica, which takes what is computed with it there.

        It is committed to the device. `jax.default_device` would bring what a replica makes from
        nothing there as well, but JAX then traces a jitted function anew for every device.
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


def _forms(arrays: Sequence[Any]) -> str:
    return ", ".join(form(array) for array in arrays)


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
        self._token = trace_token()

    @property
    def _replica(self) -> int:
        return 0 if self._turn is None else self._turn.index

    def _ask(self, kind: Any, shown: str, payload: Any) -> Any:
        if self._turn is None or current_frame().replica is None:
            raise ContextError(
                f"{shown} was called inside a merge function, where there is no replica. Use the "
                "strategy that the merge function was given."
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
        """Return this replica's value; in cross-replica context the aggregate.

        Raises:
          NestedTraceError: in a function that is traced for ``jax.jit``.
        """
        if under_jit():
            raise NestedTraceError(
                f"Variable {variable.name!r} was read inside jax.jit, whose program would keep the "
                "value of now and give old numbers in later steps. Pass the value to the jitted "
                "function: f(v.value(), x)."
            )
        if current_frame().replica is None:
            return self._values.aggregated(variable)
        return self._values.get(variable, self._replica)

    def assign(self, variable: Variable, kind: str, value: Any) -> Any:
        """Assign, meeting the other replicas if the variable is to be aggregated."""
        self._check_writable(variable)
        if current_frame().replica is None:
            return self._assign_everywhere(variable, kind, value)
        if isinstance(value, DistributedValues):
            value = value.values[self._replica]
        one_copy = len(variable.storage.components()) < self._size
        alone = variable.storage.per_replica or self._size == 1
        if alone or (not one_copy and variable.aggregation is VariableAggregation.NONE):
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
            part = self._values.here(variable.fitted(part), replica)
            self._values.set(variable, replica, combined(kind, old, part))
        return self._values.aggregated(variable)

    def _check_writable(self, variable: Variable) -> None:
        if trace_token() != self._token:
            raise changed_in_transformation(variable)
        if variable.distribute_strategy is not self._values.strategy:
            raise of_another_strategy(variable, self._values.strategy)

    def update(self, variables: Sequence[Variable], apply: Apply, operand: Any) -> None:
        """Apply an update once and give every replica its results."""
        update = Update(tuple(variables), apply, operand)
        for variable in variables:
            self._check_writable(variable)
        if current_frame().replica is None:
            update_everywhere(self._values, update)
        else:
            self._ask(("update", *map(id, variables)), "an optimizer update", update)

    # The meeting of the replicas.

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        """Reduce a tree over the replicas; the gradient is the same reduction."""
        treedef = jax.tree.structure(value)
        shown = f"all_reduce({op.name})"
        arrays = check_numbers(value, shown) if treedef.num_leaves else []
        if self._size == 1:
            return jax.tree.unflatten(treedef, [_mean_of_one(op, array) for array in arrays])

        def reduce(inputs: list) -> list:
            shown_inputs = f"{shown} of {_forms(inputs)}"
            return self._ask(("all_reduce", op, treedef), shown_inputs, inputs)

        @jax.custom_vjp
        def meet(inputs: list) -> list:
            return reduce(inputs)

        def gradient(_: None, incoming: list) -> tuple[list]:
            kind = ("all_reduce", op, "gradient", treedef)
            return (self._of_floats(kind, f"the gradient of {shown}", incoming),)

        meet.defvjp(lambda inputs: (reduce(inputs), None), gradient)
        return jax.tree.unflatten(treedef, meet(arrays) if arrays else arrays)

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """Concatenate a tree over the replicas, of lengths that may differ along ``axis``."""
        treedef = jax.tree.structure(value)
        shown = f"all_gather(axis={axis})"
        arrays = check_arrays(value, "all_gather") if treedef.num_leaves else []
        for array in arrays:
            if not -array.ndim <= axis < array.ndim:
                raise AggregationError(
                    f"all_gather along axis {axis} got an array of shape {array.shape}, which has "
                    "no such axis. Scalars can be gathered as x[None] along axis 0."
                )
        if self._size == 1 or not arrays:
            return jax.tree.unflatten(treedef, arrays)

        def gather(inputs: list) -> tuple[list, list]:
            shown_inputs = f"{shown} of {_forms(inputs)}"
            return self._ask(("all_gather", axis, treedef), shown_inputs, inputs)

        @jax.custom_vjp
        def meet(inputs: list) -> list:
            return gather(inputs)[0]

        def gradient(starts: list, incoming: list) -> tuple[list]:
            kind = ("all_reduce", ReduceOp.SUM, "gradient", axis, treedef)
            totals = self._of_floats(kind, f"the gradient of {shown}", incoming)
            return ([_cut(*item, axis) for item in zip(totals, starts, arrays, strict=True)],)

        meet.defvjp(gather, gradient)
        return jax.tree.unflatten(treedef, meet(arrays))

    def _of_floats(self, kind: Any, shown: str, incoming: list) -> list:
        """All-reduce the gradients of floating arrays; integers have none."""
        floats = [i for i, x in enumerate(incoming) if x.dtype != jax.dtypes.float0]
        answers = self._ask(kind, shown, [incoming[i] for i in floats])
        gradients: list[Any] = [None] * len(incoming)
        for i, answer in zip(floats, answers, strict=True):
            gradients[i] = answer
        return gradients

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict) -> Any:
        """Call ``merge_fn`` once for all replicas, when all have come."""
        if trace_token() != self._token:
            raise merged_in_transformation()
        name = getattr(merge_fn, "__qualname__", repr(merge_fn))
        return self._ask("merge_call", f"merge_call({name})", (merge_fn, tuple(args), kwargs))

    def combine(self, value: Any, aggregation: str, *, in_parts: bool = False) -> Any:
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
            treedef, self._ask(("all_reduce", op, "combine", treedef), shown, leaves)
        )

    def accumulate(
        self,
        variables: Sequence[Variable],
        value: Sequence[Any],
        aggregation: str | None,
        due: Any,
    ) -> list[Any]:
        """Add gradients to this replica's ``variables``; where ``due``, sum and clear these."""
        parts = part_of_sum(value, aggregation, self._weights, self._size)
        sums = [v.fitted(self.read(v) + x) for v, x in zip(variables, parts, strict=True)]
        zeros = [jnp.zeros_like(x) for x in sums]
        totals, left = zeros, sums
        if due:
            kind = ("all_reduce", ReduceOp.SUM, "accumulated", *map(id, variables))
            totals, left = self._ask(kind, "the sum of accumulated gradients", sums), zeros
        for variable, x in zip(variables, left, strict=True):
            self._check_writable(variable)
            self._values.set(variable, self._replica, x)
        return totals

    def average(self, value: Any) -> Any:
        """Return the mean of a tree over the replicas, weighted by the examples of each."""
        return self.combine(value, "MEAN")

    def global_examples(self, local: int) -> int:
        """Return the examples of all replicas, of which this one has ``local``."""
        return local * self._size if self._weights is None else self._weights.total


def _mean_of_one(op: ReduceOp, array: jax.Array) -> jax.Array:
    """Return ``array``, in a floating dtype for a mean as with many replicas."""
    return array / 1 if op is ReduceOp.MEAN else array


def _cut(total: Any, start: int, mine: jax.Array, axis: int) -> Any:
    """Return this replica's part of the gradient of a concatenation."""
    if total is None:
        return None
    axis = axis % mine.ndim
    return jax.lax.slice_in_dim(total, start, start + mine.shape[axis], axis=axis)


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
        raise without_aggregation(variable)
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    same_number = not hasattr(first, "dtype") and all(part == first for part in parts)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        value = first
    elif same_number and not on_read:
        if aggregation is VariableAggregation.SUM:
            raise number_summed(variable, first)
        value = first
    else:
        value = reduced(ReduceOp.parse(aggregation.name), parts, values.devices[0])
    operand = values.here(variable.fitted(value), 0)
    values.set_all(variable, combined(kind, values.get(variable, 0), operand))
