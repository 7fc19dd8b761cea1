"""The program of one replica that runs eagerly, in a thread: variables, and meetings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from distrib.collectives import (
    all_reduce_rows,
    check_arrays,
    check_for_gather,
    check_numbers,
    concatenated_rows,
    form,
    scaled_rows,
)
from distrib.context import current_frame
from distrib.engines.copies import EagerCopies
from distrib.engines.creation import created_in_transformation
from distrib.engines.eager_combining import EagerCombining
from distrib.engines.no_examples import brought
from distrib.engines.numerics import Numerics
from distrib.engines.program import Apply, Update, applied
from distrib.engines.refusals import (
    changed_in_transformation,
    merged_in_transformation,
    number_summed,
    of_another_strategy,
    run_in_merge_function,
    without_aggregation,
)
from distrib.engines.step_values import StepValues
from distrib.engines.turns import Request, Turn
from distrib.engines.weights import ExampleWeights
from distrib.errors import AggregationError, ContextError, MeetingError, NestedTraceError
from distrib.platform import trace_token
from distrib.reduce_op import ReduceOp
from distrib.values import (
    IndexedSlices,
    is_slices,
    map_apart,
    select_replica,
)
from distrib.variables import (
    ADDING_SCATTERS,
    Storage,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    change_name,
    check_not_jitted,
    combined,
    share_of_total,
)


class ReplicaThread:
    """The program of one replica; also the meeting of its replica context.

    Args:
      values: the variables during the step.
      turn: the thread, which asks for meetings; None for the program of cross-replica context.
      weights: the examples of this replica among those of all.
      numerics: looks at values that must be finite; None where that is not asked for.
    """

    def __init__(
        self,
        values: StepValues,
        turn: Turn | None,
        weights: ExampleWeights | None,
        numerics: Numerics | None = None,
    ):
        self._values = values
        self._turn = turn
        self._weights = weights
        self._numerics = numerics
        self._size = len(values.devices)
        self.by_examples = EagerCombining(self, self._size, weights=weights, numerics=numerics)
        self._token = trace_token()
        self._created = 0

    @property
    def _replica(self) -> int:
        return 0 if self._turn is None else self._turn.index

    def ask(self, kind: Any, shown: str, payload: Any, timeout: float | None = None) -> Any:
        """Meet the other replicas, and return this one's part of the outcome.

        Raises:
          ContextError: in a merge function.
          NestedTraceError: inside of a JAX transformation.
        """
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
        if self._weights is not None and self._weights.mine == 0:
            payload = brought(kind, payload, takes_part=self._weights.takes_part)
        return self._turn.ask(Request(kind, shown, payload, timeout))

    def run(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Raise: only a merge function is in cross-replica context here.

        Raises:
          ContextError: always.
        """
        raise run_in_merge_function()

    # Variables.

    def created_before(self) -> Variable | None:
        """Return the variable that replica 0 created where this one creates its next.

        Raises:
          MeetingError: if replica 0 has created no such variable.
        """
        if self._turn is None or current_frame().replica is None or self._replica == 0:
            return None
        created = self._values.created
        if self._created == len(created):
            raise MeetingError(
                f"Replica {self._replica} creates a variable that replica 0 does not: a variable "
                "starts from the value that replica 0 gives it."
            )
        self._created += 1
        return created[self._created - 1]

    def create(
        self, variable: Variable, value: jax.Array, make_storage: Callable[[Any], Storage]
    ) -> Storage:
        """Make a variable from replica 0's value, at once.

        Raises:
          NestedTraceError: inside a JAX transformation.
        """
        if trace_token() != self._token:
            raise created_in_transformation(variable)
        if current_frame().replica is not None:
            self._values.created.append(variable)
        return make_storage(value)

    def read(self, variable: Variable) -> jax.Array:
        """Return this replica's value; in cross-replica context the aggregate.

        Raises:
          NestedTraceError: in a function that is traced for ``jax.jit``.
        """
        check_not_jitted(f"Variable {variable.name!r}")
        if current_frame().replica is None:
            return self._values.aggregated(variable)
        return self._values.get(variable, self._replica)

    def assign(self, variable: Variable, kind: str, value: Any) -> Any:
        """Assign, meeting the other replicas if the variable is to be aggregated."""
        self._check_writable(variable)
        if current_frame().replica is None:
            return self._assign_everywhere(variable, kind, value)
        value = select_replica(value, self._replica)
        one_copy = variable.storage.num_copies < self._size
        alone = variable.storage.per_replica or self._size == 1
        if alone or (not one_copy and variable.aggregation is VariableAggregation.NONE):
            old = self._values.get(variable, self._replica)
            self.set_own(variable, combined(kind, old, variable.fitted(value)))
        else:
            shown = f"{change_name(kind)} of variable {variable.name!r}"
            means = variable.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA
            if self._numerics is not None and means:
                self._numerics.brought(f"what is assigned to variable {variable.name}", value)
            self.ask(("assign", kind, id(variable)), shown, (variable, kind, value))
        return self._values.get(variable, self._replica)

    def _assign_everywhere(self, variable: Variable, kind: str, value: Any) -> Any:
        for replica in range(self._size):
            part = select_replica(value, replica)
            if variable.storage.per_replica:
                part = share_of_total(variable, kind, part, self._size)
            old = self._values.get(variable, replica)
            part = self._values.here(variable.fitted(part), replica)
            self._values.set(variable, replica, combined(kind, old, part))
        return self._values.aggregated(variable)

    def own_value(self, variable: Variable) -> jax.Array:
        """Return what this replica's copy of ``variable`` holds now."""
        return self._values.get(variable, self._replica)

    def set_own(self, variable: Variable, value: jax.Array) -> None:
        """Change this replica's copy of ``variable`` alone."""
        self._check_writable(variable)
        if self._weights is None or self._weights.takes_part:
            self._values.set(variable, self._replica, value)

    def _check_writable(self, variable: Variable) -> None:
        if trace_token() != self._token:
            raise changed_in_transformation(variable)
        if variable.distribute_strategy is not self._values.strategy:
            raise of_another_strategy(variable, self._values.strategy)

    @property
    def copies(self) -> EagerCopies:
        """The copies of variables, for ``extended.update``."""
        return EagerCopies(self._values)

    def update(self, variables: Sequence[Variable], apply: Apply, operand: Any) -> None:
        """Apply an update once and give every replica its results."""
        update = Update(tuple(variables), apply, operand)
        for variable in variables:
            self._check_writable(variable)
        if current_frame().replica is None:
            update_everywhere(self._values, update)
        else:
            self.ask(("update", *map(id, variables)), "an optimizer update", update)

    # The meeting of the replicas.

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        """Reduce a tree over the replicas; the gradient is the same reduction."""
        return map_apart(
            value,
            lambda arrays: self._all_reduce_arrays(op, arrays, options),
            lambda slices: self.add_rows(op, slices),
        )

    def add_rows(self, op: ReduceOp, slices: IndexedSlices, merge: bool = True) -> IndexedSlices:
        """Reduce rows over the replicas, each of which merges its rows of equal index first."""
        return all_reduce_rows(
            op,
            slices,
            num_replicas=self._size,
            gather=lambda tree: self.all_gather(tree, 0, None),
            merge=merge,
        )

    def _all_reduce_arrays(self, op: ReduceOp, value: Any, options: Any = None) -> Any:
        timeout = None if options is None else options.timeout_seconds
        treedef = jax.tree.structure(value)
        shown = f"all_reduce({op.name})"
        arrays = check_numbers(value, shown) if treedef.num_leaves else []
        if self._numerics is not None:
            self._numerics.combined(f"the operand of {shown}", value)
        if self._size == 1:
            return jax.tree.unflatten(treedef, [_mean_of_one(op, array) for array in arrays])

        def reduce(inputs: list) -> list:
            shown_inputs = f"{shown} of {', '.join(map(form, inputs))}"
            return self.ask(("all_reduce", op, options, treedef), shown_inputs, inputs, timeout)

        @jax.custom_vjp
        def meet(inputs: list) -> list:
            return reduce(inputs)

        def gradient(_: None, incoming: list) -> tuple[list]:
            kind = ("all_reduce", op, options, "gradient", treedef)
            return (self._of_floats(kind, f"the gradient of {shown}", incoming, timeout),)

        meet.defvjp(lambda inputs: (reduce(inputs), None), gradient)
        return jax.tree.unflatten(treedef, meet(arrays) if arrays else arrays)

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """Concatenate a tree over the replicas, of lengths that may differ along ``axis``."""
        check_for_gather(options)
        timeout = None if options is None else options.timeout_seconds
        treedef = jax.tree.structure(value)
        shown = f"all_gather(axis={axis})"
        arrays = check_arrays(value, "all_gather") if treedef.num_leaves else []
        if self._numerics is not None:
            self._numerics.brought("the operand of all_gather", value)
        for array in arrays:
            if not -array.ndim <= axis < array.ndim:
                raise AggregationError(
                    f"all_gather along axis {axis} got an array of shape {array.shape}, which has "
                    "no such axis. Scalars can be gathered as x[None] along axis 0."
                )
        if self._size == 1 or not arrays:
            return jax.tree.unflatten(treedef, arrays)

        def gather(inputs: list) -> tuple[list, list]:
            shown_inputs = f"{shown} of {', '.join(map(form, inputs))}"
            return self.ask(("all_gather", axis, treedef), shown_inputs, inputs, timeout)

        @jax.custom_vjp
        def meet(inputs: list) -> list:
            return gather(inputs)[0]

        def gradient(starts: list, incoming: list) -> tuple[list]:
            kind = ("all_reduce", ReduceOp.SUM, None, "gradient", axis, treedef)
            totals = self._of_floats(kind, f"the gradient of {shown}", incoming, timeout)
            return ([_cut(*item, axis) for item in zip(totals, starts, arrays, strict=True)],)

        meet.defvjp(gather, gradient)
        return jax.tree.unflatten(treedef, meet(arrays))

    def _of_floats(self, kind: Any, shown: str, incoming: list, timeout: float | None) -> list:
        """All-reduce the gradients of floating arrays; integers have none."""
        floats = [i for i, x in enumerate(incoming) if x.dtype != jax.dtypes.float0]
        answers = self.ask(kind, shown, [incoming[i] for i in floats], timeout)
        gradients: list[Any] = [None] * len(incoming)
        for i, answer in zip(floats, answers, strict=True):
            gradients[i] = answer
        return gradients

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict) -> Any:
        """Call ``merge_fn`` once for all replicas, when all have come."""
        if trace_token() != self._token:
            raise merged_in_transformation()
        name = getattr(merge_fn, "__qualname__", repr(merge_fn))
        return self.ask("merge_call", f"merge_call({name})", (merge_fn, tuple(args), kwargs))


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
    if is_slices(first):
        value = _rows_of_all(values, variable, kind, parts)
        values.set_all(variable, combined(kind, values.get(variable, 0), values.here(value, 0)))
        return
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
        value = values.reduced(ReduceOp.parse(aggregation.name), parts)
    operand = values.here(variable.fitted(value), 0)
    values.set_all(variable, combined(kind, values.get(variable, 0), operand))


def _rows_of_all(
    values: StepValues, variable: Variable, kind: str, parts: Sequence[Any]
) -> IndexedSlices:
    """Return the rows that a scatter applies, of those that the replicas bring."""
    fitted = [values.here(variable.fitted(part), 0) for part in parts]
    one_copy = variable.storage.num_copies < len(parts)
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA and not one_copy:
        return fitted[0]
    op = ReduceOp.SUM if one_copy else ReduceOp.parse(variable.aggregation.name)
    fitted = [scaled_rows(op, part, len(parts)) for part in fitted]
    if kind in ADDING_SCATTERS:
        fitted = [part.merged() for part in fitted]
    return concatenated_rows(fitted)
