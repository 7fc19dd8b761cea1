"""The threads engine: a Python thread for each replica, on its own device, run eagerly.

For debugging: replica ids are numbers, `print` and debuggers work, Python may branch on values, and
shapes may differ. The replicas meet at the collectives; the values are those of compiled steps.

A replica computes on the device of its arguments and variables. What it makes from nothing, such as
``jnp.zeros(3)``, lies on JAX's default device until it meets one of them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.collectives import ComponentReducer, CrossDeviceOps, algorithm_for, form
from distrib.config import check_numerics_enabled
from distrib.context import Frame, ReplicaContext, entered
from distrib.engines.calls import check_components, check_outside_trace, unjitted
from distrib.engines.interrupts import InterruptsDeferred
from distrib.engines.many_steps import after_steps, joined, with_step_axis
from distrib.engines.nnx_objects import (
    NnxState,
    changed,
    is_batch_statistic,
    is_nnx_object,
    put_together,
    take_apart,
    write_back,
)
from distrib.engines.no_examples import CannotRunEmpty, stand_ins, without_stand_ins
from distrib.engines.numerics import Numerics, require_finite
from distrib.engines.refusals import nnx_differs, unequal_shapes
from distrib.engines.replica_thread import (
    ReplicaThread,
    assign_aggregated,
    update_everywhere,
)
from distrib.engines.run_options import NO_OPTIONS, RunOptions
from distrib.engines.signature import is_argument
from distrib.engines.step_values import StepValues
from distrib.engines.turns import Request, Turn, take_turns
from distrib.engines.weights import ExampleWeights, are_uneven, weights_of
from distrib.errors import AggregationError, ContextError, OutputError
from distrib.platform import (
    Device,
    device_string,
    replica_mesh,
    thread_settings,
    with_settings,
)
from distrib.values import DistributedValues, PerReplica
from distrib.variables import HoldsVariables, Variable


class ThreadsEngine:
    """Runs the steps of one strategy eagerly.

    Args:
      strategy: the strategy, which replica contexts show to the user.
      devices: a device for each replica.
      ops: how values are added over them.
    """

    def __init__(self, strategy: Any, devices: Sequence[Device], ops: CrossDeviceOps):
        self._strategy = strategy
        self._devices = tuple(devices)
        choose = functools.partial(algorithm_for, ops)
        self._reducer = ComponentReducer(replica_mesh(self._devices), choose)

    def run_steps(
        self,
        fn: Callable[..., Any],
        calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        options: RunOptions,
    ) -> Any:
        """Call ``fn`` once for each replica and each ``(args, kwargs)``, one after the other.

        Raises:
          OutputError: if the steps return trees of different structure.
        """
        results = []
        for call in calls:
            with after_steps(len(results)):
                results.append(with_step_axis(self.run(fn, *call, options)))
        return joined(results)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: RunOptions = NO_OPTIONS,
    ) -> Any:
        """Call ``fn`` once for each replica, each in its own thread.

        Options of XLA have no effect: nothing is compiled as a whole.

        Raises:
          NestedTraceError: inside of a JAX transformation.
          MeetingError: if the replicas do not make the same collective calls.
          ReplicaDeadlineError: if one of them gets stuck.
        """
        check_outside_trace()
        fn = unjitted(fn)
        leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=is_argument)
        check_components(leaves, len(self._devices))
        if not options.experimental_enable_dynamic_batch_size and are_uneven(leaves):
            raise unequal_shapes(leaves)
        weights = weights_of(leaves, len(self._devices))
        empty: tuple[int, ...] = ()
        while True:
            try:
                return self._run(fn, leaves, treedef, weights, empty)
            except CannotRunEmpty as failed:
                empty = (*empty, failed.replica)
                weights = weights_of(leaves, len(self._devices), empty)

    def _run(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        treedef: Any,
        weights: Sequence[ExampleWeights | None],
        empty: Sequence[int],
    ) -> Any:
        """Run a step, with stand-ins for the examples of the replicas ``empty``."""
        for_two = self._outcomes(fn, leaves, treedef, weights, empty, 2)[1] if empty else []
        values, outcomes, state, numerics = self._outcomes(fn, leaves, treedef, weights, empty, 1)
        with_examples = next((i for i in range(len(outcomes)) if i not in empty), 0)
        for i in empty:
            result = without_stand_ins(outcomes[i][0], for_two[i][0], outcomes[with_examples][0])
            outcomes[i] = (result, outcomes[with_examples][1])
        _require_finite(values, outcomes, numerics)
        changes = _agreed(state, [change for _, change in outcomes]) if state else {}
        changes = {position: values.free(new, 0) for position, new in changes.items()}
        result = _merged([values.outside(result, i) for i, (result, _) in enumerate(outcomes)])
        with InterruptsDeferred():
            values.put_back()
            if state:
                write_back(state, changes)
        return result

    def _outcomes(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        treedef: Any,
        weights: Sequence[ExampleWeights | None],
        empty: Sequence[int],
        count: int,
    ) -> tuple[StepValues, list[tuple[Any, dict[int, Any]]], NnxState | None, list[Any]]:
        """Call ``fn`` for each replica, with ``count`` stand-ins where there is no example."""
        for replica in empty:
            leaves = [stand_ins(leaf, replica, count) for leaf in leaves]
        values = StepValues(self._strategy, self._devices, self._reducer)
        objects = [leaf for leaf in leaves if is_nnx_object(leaf)]
        state = take_apart(objects) if objects else None
        numerics = [_numerics(i, weights[i]) for i in range(len(self._devices))]
        bodies = [
            self._body(fn, treedef, leaves, i, values, weights[i], state, numerics[i])
            for i in range(len(self._devices))
        ]
        outcomes = take_turns(bodies, lambda requests: self._meet(values, requests))
        return values, outcomes, state, numerics

    def _body(
        self,
        fn: Callable[..., Any],
        treedef: Any,
        leaves: Sequence[Any],
        replica: int,
        values: StepValues,
        weights: ExampleWeights | None,
        state: NnxState | None,
        numerics: Numerics | None,
    ) -> Callable[[Turn], Any]:
        device = self._devices[replica]
        settings = thread_settings()

        def body(turn: Turn) -> Any:
            program = ReplicaThread(values, turn, weights, numerics)
            context = ReplicaContext(
                self._strategy, np.int32(replica), program, (device_string(device),)
            )
            with with_settings(settings), entered(Frame(self._strategy, context, program)):
                arrays = [values.here(a, replica) for a in state.arrays] if state else []
                copies = iter(put_together(state, arrays, replica) if state else ())
                seen = [
                    next(copies) if is_nnx_object(x) else _argument(x, replica, values)
                    for x in leaves
                ]
                args, kwargs = jax.tree.unflatten(treedef, seen)
                if numerics is not None:
                    numerics.given(args, kwargs)
                    if state is not None:
                        numerics.held(state.paths, arrays)
                result = _called(fn, args, kwargs, replica, weights)
                if state is None:
                    return result, {}
                copies = [x for x in seen if is_nnx_object(x)]
                change = changed(state, arrays, copies)
                for position, new in change.items():
                    if is_batch_statistic(state.variables[position]):
                        name = f"NNX variable {state.paths[position]}"
                        change[position] = program.by_examples.average(new, [name])
                if numerics is not None:
                    numerics.changed(state.paths, arrays, change)
                return result, change

        return body

    def _meet(self, values: StepValues, requests: list[Request]) -> Sequence[Any]:
        kind = requests[0].kind
        what = kind[0] if isinstance(kind, tuple) else kind
        payloads = [request.payload for request in requests]
        size = len(self._devices)
        if what == "merge_call":
            return self._merge(values, payloads)
        if what == "all_reduce":
            _, op, options, *_ = kind
            return values.all_reduced(op, payloads, options)
        if what == "feedback":
            return values.all_reduced_with_feedback(kind[1], payloads)
        if what == "all_gather":
            axis, device = kind[1], self._devices[0]
            wholes = [_concatenated(parts, axis, device) for parts in zip(*payloads, strict=True)]
            return [
                ([values.here(w, i) for w in wholes], _starts(payloads, axis, i))
                for i in range(size)
            ]
        if what == "update":
            update_everywhere(values, payloads[0])
        else:
            assign_aggregated(values, requests)
        return [None] * size

    def _merge(self, values: StepValues, payloads: Sequence[Any]) -> Sequence[Any]:
        merge_fn = payloads[0][0]
        args, kwargs = _merged(
            [values.outside((args, kwargs), i) for i, (_, args, kwargs) in enumerate(payloads)]
        )
        with entered(Frame(self._strategy, None, ReplicaThread(values, None, None))):
            result = merge_fn(self._strategy, *args, **kwargs)
        return [
            jax.tree.map(lambda leaf: _part(leaf, i, values), result, is_leaf=_whole)  # noqa: B023
            for i in range(len(self._devices))
        ]


def _numerics(replica: int, weights: ExampleWeights | None) -> Numerics | None:
    """Return what looks at the numbers of a replica, if that is asked for."""
    if not check_numerics_enabled():
        return None
    has_examples = weights is None or weights.mine > 0
    return Numerics(lambda value: value.values[replica], has_examples=has_examples)


def _require_finite(
    values: StepValues,
    outcomes: Sequence[tuple[Any, Any]],
    numerics: Sequence[Numerics | None],
) -> None:
    """Raise if a number of a replica is not finite.

    Raises:
      NonFiniteError: naming the value and the replicas.
    """
    found = []
    for replica, ((result, _), each) in enumerate(zip(outcomes, numerics, strict=True)):
        if each is not None:
            found.append(each.finish(values.before(replica), values.written(replica), result))
    require_finite(found)


def _called(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    replica: int,
    weights: ExampleWeights | None,
) -> Any:
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        if weights is not None and weights.mine == 0 and weights.takes_part:
            raise CannotRunEmpty(replica) from error
        if not isinstance(error, NameError) or "unbound axis name" not in str(error):
            raise
        refusal = ContextError(
            "Replicas that run eagerly are no mesh axis, so the collectives of jax.lax, and layers "
            "with an axis_name, cannot meet. Make such layers without axis_name while you debug "
            "(their statistics are then those of the replica), use "
            "get_replica_context().all_reduce, or run compiled: "
            f"distrib.config.run_functions_eagerly(False). JAX says: {error}"
        )
        raise refusal.with_traceback(error.__traceback__) from error


def _whole(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, DistributedValues | Variable | HoldsVariables)


def _part(leaf: Any, replica: int, values: StepValues) -> Any:
    """Return what a replica gets of a value of cross-replica context."""
    if isinstance(leaf, DistributedValues):
        leaf = leaf.values[replica]
    return values.here(leaf, replica) if isinstance(leaf, jax.Array) else leaf


def _argument(leaf: Any, replica: int, values: StepValues) -> Any:
    """Return what a replica gets of an argument: numbers come as arrays, as in a compiled step."""
    if isinstance(leaf, DistributedValues):
        leaf = leaf.values[replica]
    elif isinstance(leaf, bool | enum.Enum):
        return leaf
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
        return values.here(jnp.asarray(leaf), replica)
    return leaf


def _merged(trees: Sequence[Any]) -> Any:
    """Return one tree of what the replicas returned, or brought to a merge function.

    Raises:
      OutputError: if the trees have different structures.
    """
    if len(trees) == 1:
        return trees[0]
    structures = [jax.tree.structure(tree, is_leaf=_whole) for tree in trees]
    for replica, structure in enumerate(structures):
        if structure != structures[0]:
            raise OutputError(
                f"Replica 0 returns {structures[0]}, and replica {replica} returns {structure}: "
                "the replicas must return values of one structure."
            )

    def merge(*leaves: Any) -> Any:
        first = leaves[0]
        number_or_text = isinstance(first, int | float | complex | str | bytes)
        if all(leaf is first for leaf in leaves) and not isinstance(first, jax.Array):
            return first
        if number_or_text and all(leaf == first for leaf in leaves):
            return first
        return PerReplica(leaves)

    return jax.tree.map(merge, *trees, is_leaf=_whole)


def _concatenated(parts: Sequence[Any], axis: int, device: Device) -> jax.Array:
    arrays = [jax.device_put(part, device) for part in parts]
    dtypes = {array.dtype for array in arrays}
    others = {
        shape[: axis % len(shape)] + (None,) + shape[axis % len(shape) + 1 :]
        for shape in (array.shape for array in arrays)
    }
    if len(others) > 1 or len(dtypes) > 1:
        raise AggregationError(
            f"all_gather along axis {axis} got {', '.join(map(form, arrays))}, which may differ "
            "along that axis only."
        )
    return jnp.concatenate(arrays, axis)


def _starts(payloads: Sequence[Sequence[Any]], axis: int, replica: int) -> list[int]:
    """Return where the part of a replica begins in each concatenation."""
    return [
        sum(part.shape[axis] for part in parts[:replica]) for parts in zip(*payloads, strict=True)
    ]


def _agreed(state: NnxState, changes: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Return the changes of NNX variables, which must be equal on all replicas.

    Raises:
      VariableError: naming a variable that is not.
    """
    for position in sorted({position for change in changes for position in change}):
        copies = [_bits(change.get(position)) for change in changes]
        if any(copy != copies[0] for copy in copies):
            raise nnx_differs(state, position)
    return changes[0]


def _bits(value: Any) -> bytes | None:
    if value is None:
        return None
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value).tobytes()
