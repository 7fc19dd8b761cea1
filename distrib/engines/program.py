"""The program of one replica while it is traced: what it reads, and the updates that it makes.

This is the half of the design's one idea that faces the user's function. ``run`` traces the
function once; each variable it reads becomes an input of the program, each assignment an update,
and the collectives of its replica context become collectives of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.collectives import (
    CrossDeviceOps,
    algorithm_for,
    all_gather,
    all_reduce,
    all_reduce_rows,
    all_rows,
    check_for_gather,
    check_no_timeout,
    from_first_replica,
    gathered,
)
from distrib.context import Frame, current_frame, entered
from distrib.engines.copies import TracedCopies
from distrib.engines.creation import created_in_transformation, created_too_late
from distrib.engines.local_values import as_per_replica, local_tree
from distrib.engines.numerics import Numerics
from distrib.engines.refusals import (
    changed_in_transformation,
    merged_in_transformation,
    number_summed,
    of_another_strategy,
    run_in_merge_function,
    without_aggregation,
)
from distrib.engines.traced_combining import TracedCombining
from distrib.engines.weights import ExampleWeights
from distrib.platform.jax_compat import trace_token
from distrib.reduce_op import ReduceOp
from distrib.values import IndexedSlices, is_slices, map_apart
from distrib.variables import (
    ADDING_SCATTERS,
    Storage,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    combined,
    share_of_total,
)

Apply = Callable[[list[jax.Array], Any], Sequence[jax.Array]]


class UnknownVariable(Exception):
    """A variable that is not an input of the program was read: trace again with it.

    It never reaches the user.
    """

    def __init__(self, variable: Variable):
        super().__init__(variable.name)
        self.variable = variable


@dataclass(frozen=True)
class Update:
    """Variables that become ``apply(old values, operand)``.

    ``operand`` is a tree that is equal on every replica, but for what is ``Scattered`` over them,
    so the update may be applied by whoever holds the variables: the program on every copy, one
    device, or all devices together.
    """

    variables: tuple[Variable, ...]
    apply: Apply
    operand: Any


class _Pending:
    """The new values of an update, computed when something reads them."""

    def __init__(self, update: Update, olds: list[Any]):
        self._update = update
        self._olds = olds
        self._news: list[jax.Array] | None = None

    def value(self, index: int) -> jax.Array:
        if self._news is None:
            olds = [force(old) for old in self._olds]
            update = self._update
            operand = gathered(update.operand)
            self._news = applied(Update(update.variables, update.apply, operand), olds)
        return self._news[index]


def force(entry: Any) -> Any:
    """Return the value of an entry that may be a pending update's."""
    return entry() if callable(entry) else entry


def applied(update: Update, olds: list[jax.Array]) -> list[jax.Array]:
    """Return the new values of an update, checked against its variables."""
    news = update.apply(olds, update.operand)
    return [v.fitted(new) for v, new in zip(update.variables, news, strict=True)]


class Program:
    """The program of one replica; also the meeting of its replica context.

    Args:
      strategy: the strategy whose step this is.
      num_replicas: how many replicas run the program.
      ops: how values are added over them.
      inputs: the variables that are inputs, by ``id``, with their traced values.
      created: filled with the variables that the step creates.
      deferred: whether all updates are applied outside of the program. Those of variables that are
        split over the devices always are.
      weights: the examples of each replica, where they differ; None where all have equally many.
      numerics: looks at values that must be finite; None where that is not asked for.
    """

    def __init__(
        self,
        strategy: Any,
        num_replicas: int,
        ops: CrossDeviceOps,
        inputs: dict[int, tuple[Variable, Any]],
        created: list[Variable],
        *,
        deferred: bool,
        weights: ExampleWeights | None = None,
        numerics: Numerics | None = None,
    ):
        self._strategy = strategy
        self._size = num_replicas
        self._ops = ops
        self._inputs = inputs
        self._deferred = deferred
        self._weights = weights
        self._numerics = numerics
        self._token = trace_token()
        self._current: dict[int, Any] = {}
        self.before: dict[int, tuple[Variable, Any]] = {}
        self._final: dict[int, Any] = {}
        self.writes: dict[int, Variable] = {}
        self.updates: list[Update] = []
        self.created = created
        self.by_examples = TracedCombining(
            self, num_replicas, ops, weights=weights, numerics=numerics
        )
        # How a program that begins in cross-replica context calls its replicas.
        self.replicas: Callable[..., Any] | None = None

    # Variables.

    def created_before(self) -> None:
        """Return None: one traced function creates a variable for all replicas."""
        return None

    def create(
        self, variable: Variable, value: jax.Array, make_storage: Callable[[Any], Storage]
    ) -> Storage:
        """Make a variable, whose value when the step is over is the first that is stored.

        Until then its storage holds zeros, which the step overwrites.

        Raises:
          NestedTraceError: inside a JAX transformation.
          ContextError: if the replicas have batches of unequal sizes.
        """
        if trace_token() != self._token:
            raise created_in_transformation(variable)
        if self._weights is not None:
            raise created_too_late(
                variable.name, "in a step whose replicas have batches of unequal sizes"
            )
        if not isinstance(value.dtype, np.dtype):
            raise created_too_late(variable.name, f"with the dtype {value.dtype}")
        with jax.ensure_compile_time_eval():
            variable.storage = make_storage(np.zeros(value.shape, value.dtype))
        self.created.append(variable)
        if self._size > 1 and current_frame().replica is not None:
            value = from_first_replica(value)
        self._current[id(variable)] = value
        self.update([variable], lambda olds, x: [x], value)
        return variable.storage

    def read(self, variable: Variable) -> jax.Array:
        """Return the value of ``variable`` at this point, aggregated in cross-replica context."""
        value = self._own(variable)
        if variable.storage.per_replica and current_frame().replica is None:
            return self._aggregate(variable, value)
        return value

    def _own(self, variable: Variable) -> jax.Array:
        return force(self._entry(variable))

    def _input(self, variable: Variable) -> jax.Array:
        key = id(variable)
        if key not in self._inputs:
            raise UnknownVariable(variable)
        self.before[key] = self._inputs[key]
        return self._inputs[key][1]

    def _entry(self, variable: Variable) -> Any:
        """Return the value of ``variable`` now, or the means to compute it when it is wanted."""
        if id(variable) in self._current:
            return self._current[id(variable)]
        return lambda: self._input(variable)

    def assign(self, variable: Variable, kind: str, value: Any) -> jax.Array:
        """Record an assignment and return the new value as this replica sees it."""
        self._check_writable(variable)
        cross = current_frame().replica is None
        value = local_tree(value)
        if variable.storage.per_replica:
            if cross:
                value = share_of_total(variable, kind, value, self._size)
            new = combined(kind, self._own(variable), variable.fitted(value))
            self._set(variable, new)
            return self.read(variable)
        if not cross and is_slices(value):
            value = self._rows_of_all(variable, kind, variable.fitted(value))
        elif not cross:
            value = self._aggregate(variable, value)
        operand = variable.fitted(value)
        self.update([variable], lambda olds, x: [combined(kind, olds[0], x)], operand)
        return self._own(variable)

    def update(self, variables: Sequence[Variable], apply: Apply, operand: Any) -> None:
        """Record that ``variables`` become ``apply(old values, operand)``."""
        for variable in variables:
            self._check_writable(variable)
        update = Update(tuple(variables), apply, operand)
        if any(self._is_deferred(v) for v in variables):
            self.updates.append(update)
            pending = _Pending(update, [self._entry(v) for v in variables])
            for i, variable in enumerate(variables):
                self._current[id(variable)] = lambda i=i: pending.value(i)
        else:
            update = Update(update.variables, apply, gathered(operand))
            news = applied(update, [self._own(v) for v in variables])
            for variable, new in zip(variables, news, strict=True):
                self._set(variable, new)

    @property
    def copies(self) -> TracedCopies:
        """The copies of variables, for ``extended.update``."""
        return TracedCopies(self, self._size, one_copy=self._deferred)

    def own_value(self, variable: Variable) -> jax.Array:
        """Return what this replica's copy of ``variable`` holds now."""
        return self._own(variable)

    def set_own(self, variable: Variable, value: jax.Array) -> None:
        """Change this replica's copy of ``variable`` alone."""
        self._check_writable(variable)
        self._set(variable, value)

    @property
    def changed(self) -> list[tuple[Variable, jax.Array]]:
        """The variables that have changed, wherever that is, with what this replica sees of them.

        For checks: what is updated elsewhere is computed in the program for it too.
        """
        updated = [v for update in self.updates for v in update.variables]
        changed = {id(v): v for v in (*self.writes.values(), *updated)}
        return [(v, self._own(v)) for v in changed.values()]

    def _is_deferred(self, variable: Variable) -> bool:
        """Tell whether ``variable`` is updated outside; once one is, what follows must be too."""
        pending = callable(self._current.get(id(variable)))
        return self._deferred or variable.storage.shards is not None or pending

    def final_value(self, variable: Variable) -> jax.Array:
        """Return what one of :attr:`writes` holds at the end, before the :attr:`updates`."""
        return self._final[id(variable)]

    def _set(self, variable: Variable, value: jax.Array) -> None:
        self._current[id(variable)] = self._final[id(variable)] = value
        self.writes[id(variable)] = variable

    def _check_writable(self, variable: Variable) -> None:
        if trace_token() != self._token:
            raise changed_in_transformation(variable)
        if variable.distribute_strategy is not self._strategy:
            raise of_another_strategy(variable, self._strategy)

    def _aggregate(self, variable: Variable, value: Any) -> Any:
        aggregation = variable.aggregation
        if self._size == 1:
            return value
        if aggregation is VariableAggregation.NONE:
            if variable.storage.per_replica or self._is_deferred(variable):
                raise without_aggregation(variable)
            return value
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return from_first_replica(value)
        if variable.synchronization is VariableSynchronization.ON_READ:
            value = jnp.asarray(value)  # Each replica counts, with one copy as with many.
        if not hasattr(value, "dtype"):
            if aggregation is VariableAggregation.SUM:
                raise number_summed(variable, value)
            return value
        if self._numerics is not None:
            self._numerics.brought(f"what is assigned to variable {variable.name}", value)
        return self._reduce(ReduceOp.parse(aggregation.name), value, None)

    def _rows_of_all(self, variable: Variable, kind: str, rows: IndexedSlices) -> IndexedSlices:
        """Return the rows that a scatter applies, of those that the replicas bring."""
        aggregation = variable.aggregation
        if not self._deferred:
            if self._size == 1 or aggregation is VariableAggregation.NONE:
                return rows
            if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return jax.tree.map(from_first_replica, rows)
        op = ReduceOp.SUM if self._deferred else ReduceOp.parse(aggregation.name)
        return self.add_rows(op, rows, merge=kind in ADDING_SCATTERS)

    # The meeting of the replicas.

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        """Reduce a tree over the replicas."""
        if self._numerics is not None:
            self._numerics.combined(f"the operand of all_reduce({op.name})", value)
        return map_apart(
            value,
            lambda arrays: self._reduce(op, arrays, options),
            lambda slices: self.add_rows(op, slices),
        )

    def _reduce(self, op: ReduceOp, value: Any, options: Any = None) -> Any:
        # With uneven replicas a division by their number marks jax.lax.pmean, which then weights
        # them; all_reduce is tf.distribute's and does not, so it multiplies.
        scale = None if self._weights is None else 1.0 / self._size
        check_no_timeout(options, "a compiled step")
        ops = algorithm_for(self._ops, options)
        return all_reduce(op, value, num_replicas=self._size, ops=ops, options=options, scale=scale)

    def add_rows(self, op: ReduceOp, slices: IndexedSlices, merge: bool = True) -> IndexedSlices:
        """Reduce rows over the replicas, each of which merges its rows of equal index first."""
        if self._weights is not None and merge:
            # Replicas of unequal shapes bring unequally many rows, which cannot be gathered.
            return all_rows(self._reduce(op, slices.to_dense()))
        return all_reduce_rows(
            op,
            slices,
            num_replicas=self._size,
            gather=lambda tree: all_gather(tree, 0),
            merge=merge,
        )

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """Concatenate a tree over the replicas."""
        if self._numerics is not None:
            self._numerics.brought("the operand of all_gather", value)
        check_no_timeout(options, "a compiled step")
        check_for_gather(options)
        return all_gather(value, axis)

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict) -> Any:
        """Call ``merge_fn`` in cross-replica context, with per-replica values that are traced."""
        if trace_token() != self._token:
            raise merged_in_transformation()
        if self._size > 1:
            args, kwargs = as_per_replica((args, kwargs))
        with entered(Frame(self._strategy, None, self)):
            result = merge_fn(self._strategy, *args, **kwargs)
        return local_tree(result)

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``fn`` in the replicas of this program.

        Raises:
          ContextError: in a merge function.
        """
        if self.replicas is None:
            raise run_in_merge_function()
        return self.replicas(fn, args, kwargs)
