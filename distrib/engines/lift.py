"""Lifting: from the user's function to a pure function of a replica.

    (values read, inputs of this replica)  ->  (outputs, updates)

The function is traced once, for abstract values, with every living variable of the strategy as a
possible input. What it read and changed is known afterwards; the variables it did not touch are
left out of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from distrib.collectives import CrossDeviceOps
from distrib.context import Frame, ReplicaContext, entered
from distrib.engines.captures import found_nnx_objects
from distrib.engines.creation import created_too_late, kept_if_finished
from distrib.engines.deferred_updates import DeferredUpdate, split_off, updated_variables
from distrib.engines.inlined import InlinedReplicas
from distrib.engines.local_values import local_value
from distrib.engines.nnx_objects import (
    NnxState,
    changed,
    check_no_nnx_constants,
    is_batch_statistic,
    put_together,
)
from distrib.engines.numerics import Check, Numerics
from distrib.engines.outputs import Outputs, record_outputs
from distrib.engines.program import Program, UnknownVariable
from distrib.engines.refusals import nnx_differs
from distrib.engines.varying import used_inputs, varying_outputs
from distrib.engines.weights import ExampleWeights
from distrib.errors import TracedValueError
from distrib.platform import trace_token, uncommitted
from distrib.platform.mesh import REPLICA_AXIS
from distrib.reduce_op import ReduceOp
from distrib.values import PerReplica
from distrib.variables import Variable, live_variables

# What JAX raises when Python asks for a value that exists only when the step runs.
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(frozen=True)
class Call:
    """The arguments of one call to ``run``, as the tracer needs them.

    Attributes:
      fn: the user's function.
      rebuild: from the leaves that the function sees to ``(args, kwargs)``.
      forms: shape and dtype of each array leaf in one replica.
      varying: for each, whether it may differ by replica.
      nnx: the NNX objects among the arguments.
      in_replica: whether the function is a replica's, and not that of cross-replica context, which
        calls replicas by ``strategy.run``.
    """

    fn: Callable[..., Any]
    rebuild: Callable[[Sequence[Any], Sequence[Any]], tuple[tuple, dict]]
    forms: tuple[jax.ShapeDtypeStruct, ...]
    varying: tuple[bool, ...]
    nnx: NnxState | None
    in_replica: bool = True


@dataclass(frozen=True)
class Lifted:
    """A step as a pure function.

    Attributes:
      jaxpr: ``(leaves, NNX arrays, variables) -> (outputs, NNX changes, operands, new values)``,
        all flat, for one replica.
      variables: the variables that are inputs of ``jaxpr``, read or not.
      reads: those of them on whose old values something depends.
      writes: those that it changes in the program: their new values are outputs.
      updates: what is then left to be applied outside of the program; the operands are outputs.
      output: from the array outputs to what the function returned.
      everywhere: for each of these, whether it is one value for all replicas.
      nnx_changes: the positions of the NNX variables that change.
      num_nnx: how many NNX arrays are inputs.
      gradients_are: how gradients are combined, as far as the step has shown it.
      checks: what is looked at for values that are not finite; then the last of the outputs is not
        the function's but their counts.
      created: the variables among ``writes``, or changed by ``updates``, that the trace created.
      accumulators: variables in which replicas have accumulated what they are still to bring, also
        those that have no examples in this step.
    """

    jaxpr: Any
    variables: tuple[Variable, ...]
    reads: tuple[Variable, ...]
    writes: tuple[Variable, ...]
    updates: tuple[DeferredUpdate, ...]
    output: Callable[[Sequence[Any]], Any]
    everywhere: tuple[bool, ...]
    nnx_changes: tuple[int, ...]
    num_nnx: int
    gradients_are: ReduceOp | None
    accumulators: tuple[Variable, ...]
    created: tuple[Variable, ...]
    checks: tuple[Check, ...] = ()

    @property
    def num_outputs(self) -> int:
        """How many outputs of ``jaxpr`` belong to what the function returned."""
        return len(self.everywhere)

    @property
    def touched(self) -> list[Variable]:
        """The variables that the step reads or changes, wherever its updates are applied."""
        return [*self.reads, *self.writes, *updated_variables(self.updates)]


def stand_in(variable: Variable) -> Any:
    """Return what takes the place of a variable on whose value nothing depends."""
    if jnp.issubdtype(variable.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(variable.shape, variable.dtype)


class _Trace:
    """What the traced function leaves behind beside its arrays."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.outputs = Outputs([], (), lambda arrays: None)
        self.everywhere: tuple[bool, ...] = ()
        self.nnx_changes: tuple[int, ...] = ()
        self.writes: tuple[Variable, ...] = ()
        self.updates: tuple[DeferredUpdate, ...] = ()
        self.checks: tuple[Check, ...] = ()


def lift(
    strategy: Any,
    call: Call,
    *,
    num_replicas: int,
    ops: CrossDeviceOps,
    deferred: bool,
    weights: ExampleWeights | None = None,
    devices: tuple[str, ...] = (),
    axis_size: int | None = None,
    check_numerics: bool = False,
) -> Lifted:
    """Trace the function of a call.

    Args:
      strategy: the strategy whose step it is.
      call: the function and the forms of its arguments.
      num_replicas: how many replicas run the program.
      ops: how values are added over them.
      deferred: whether updates are applied outside of the program.
      weights: the examples of each replica, where they differ.
      devices: what the replica context gives as its device.
      axis_size: the size of the mesh axis, if it is not to be the number of replicas.
      check_numerics: whether to look for values that are not finite.

    Raises:
      TracedValueError: if Python code needs a value that exists only when the step runs.
      OutputError: if the function returns something that is not an array or a constant.
      NestedTraceError: if it changes a variable inside of a JAX transformation.
    """
    variables = live_variables(strategy)
    created: list[Variable] = []
    with kept_if_finished(created):
        while True:
            try:
                return _trace(
                    strategy,
                    call,
                    variables,
                    created,
                    num_replicas,
                    ops,
                    deferred,
                    weights,
                    devices,
                    axis_size or num_replicas,
                    check_numerics,
                )
            except UnknownVariable as unknown:
                if created:
                    raise created_too_late(
                        created[0].name,
                        f"by a step that goes on to use {unknown.variable.name!r} of another "
                        "strategy",
                    ) from None
                # A variable of another strategy, or of none. It is an input like the others.
                variables = [*variables, unknown.variable]


def _trace(
    strategy: Any,
    call: Call,
    variables: list[Variable],
    created: list[Variable],
    num_replicas: int,
    ops: CrossDeviceOps,
    deferred: bool,
    weights: ExampleWeights | None,
    devices: tuple[str, ...],
    axis_size: int,
    check_numerics: bool,
) -> Lifted:
    trace = _Trace()
    num_leaves = len(call.forms)
    num_nnx = len(call.nnx.variables) if call.nnx else 0

    def flat_step(*flat: Any) -> list[Any]:
        leaves, nnx_arrays = flat[:num_leaves], flat[num_leaves : num_leaves + num_nnx]
        values = flat[num_leaves + num_nnx :]
        inputs = {id(v): (v, x) for v, x in zip(variables, values, strict=True)}
        numerics = None
        if check_numerics:
            numerics = Numerics(local_value, has_examples=weights is None or weights.mine > 0)
        program = Program(
            strategy,
            num_replicas,
            ops,
            inputs,
            created,
            deferred=deferred,
            weights=weights,
            numerics=numerics,
        )
        trace.program = program
        replica_id = np.int32(0) if num_replicas == 1 else jax.lax.axis_index(REPLICA_AXIS)
        objects: tuple[Any, ...] = ()
        if call.nnx:
            objects = put_together(call.nnx, nnx_arrays, replica_id)
        context = ReplicaContext(strategy, replica_id, program, devices)
        frame = Frame(strategy, context, program)
        if not call.in_replica:
            leaves = _of_all_replicas(leaves, call.varying, num_replicas)
            program.replicas = InlinedReplicas(frame, num_replicas, trace_token()).run
            frame = Frame(strategy, None, program)
        args, kwargs = call.rebuild(leaves, objects)
        if numerics is not None:
            numerics.given(args, kwargs)
            if call.nnx:
                numerics.held(call.nnx.paths, nnx_arrays)
        with entered(frame):
            result = call.fn(*args, **kwargs)
        trace.outputs = record_outputs(result, in_replica=call.in_replica or num_replicas == 1)
        arrays = [*trace.outputs.arrays]
        trace.everywhere = trace.outputs.everywhere
        changes: list[Any] = []
        if call.nnx:
            changes = _record_nnx(trace, call.nnx, nnx_arrays, objects, program)
        updates = _record_updates(trace, program)
        if numerics is not None:
            if call.nnx:
                numerics.changed(
                    call.nnx.paths, nnx_arrays, dict(zip(trace.nnx_changes, changes, strict=True))
                )
            trace.checks, counts = numerics.finish(
                list(program.before.values()), program.changed, result
            )
            arrays.append(counts)
            trace.everywhere = (*trace.everywhere, False)
        return arrays + changes + updates

    forms = [*call.forms]
    if call.nnx:
        forms += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in call.nnx.arrays]
    forms += [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
    try:
        jaxpr = jax.make_jaxpr(flat_step, axis_env=[(REPLICA_AXIS, axis_size)])(*forms)
    except flax.errors.TraceContextError as error:
        error.add_note(
            "distrib: a step can change an NNX object that it is given, not one that it finds by "
            "name: strategy.run(step, args=(model, optimizer, ...))."
        )
        raise
    except _NEEDS_A_VALUE as error:
        # With the traceback of the cause, so that it ends with the user's line too.
        raise _traced_value_error(error).with_traceback(error.__traceback__) from error
    except jax.errors.UnexpectedTracerError as error:
        raise _escaped_value_error().with_traceback(error.__traceback__) from error
    if any(isinstance(constant, Tracer) for constant in jaxpr.consts):
        raise _escaped_value_error()
    if jaxpr.consts:
        check_no_nnx_constants(found_nnx_objects(call.fn), jaxpr.consts)
    jaxpr = ClosedJaxpr(jaxpr.jaxpr, [_on_one_device(constant) for constant in jaxpr.consts])
    program = trace.program
    if program is None:
        raise RuntimeError("the step was not traced")
    if call.nnx and num_replicas > 1:
        _check_nnx_agree(jaxpr, call, trace, variables)
    used_variables = used_inputs(jaxpr.jaxpr)[num_leaves + num_nnx :]
    return Lifted(
        jaxpr=jaxpr,
        variables=tuple(variables),
        reads=tuple(v for v, used in zip(variables, used_variables, strict=True) if used),
        writes=trace.writes,
        updates=trace.updates,
        output=trace.outputs.rebuild,
        everywhere=trace.everywhere,
        nnx_changes=trace.nnx_changes,
        num_nnx=num_nnx,
        gradients_are=program.by_examples.gradients_are,
        accumulators=tuple(program.by_examples.accumulators.values()),
        created=tuple(created),
        checks=trace.checks,
    )


def _of_all_replicas(leaves: Sequence[Any], varying: Sequence[bool], size: int) -> Sequence[Any]:
    """Return what cross-replica context sees of the leaves of a replica."""
    if size == 1:
        return leaves
    return [
        PerReplica.from_local(x) if varies else x for x, varies in zip(leaves, varying, strict=True)
    ]


def _traced_value_error(error: Exception) -> TracedValueError:
    gist = str(error).splitlines()[0]
    return TracedValueError(
        "Python code in a step needed the value of an array that is known only when the step runs: "
        "an `if`, a `while`, float(), int() or NumPy, on the replica id or on data. One compiled "
        "program serves every replica and every batch. Choose with jnp.where or jax.lax.cond, and "
        "print with jax.debug.print; to debug with plain Python, call "
        f"distrib.config.run_functions_eagerly(True). JAX says: {gist}"
    )


def _on_one_device(constant: Any) -> Any:
    """Return an array that the function closes over as one copy, without its mesh."""
    if not isinstance(constant, jax.Array) or len(constant.sharding.device_set) == 1:
        return uncommitted(constant) if isinstance(constant, jax.Array) else constant
    if constant.is_fully_replicated:
        return uncommitted(constant.addressable_shards[0].data)
    return np.asarray(constant)


def _escaped_value_error() -> TracedValueError:
    return TracedValueError(
        "The step used a traced value that escaped from an earlier one: something was stored in a "
        "list, an attribute or a global while a step was traced, or a jitted function that is "
        "older than the step read a variable. Return the value from the step, assign it to a "
        "distrib.Variable, and give jitted functions their values as arguments."
    )


def _record_nnx(
    trace: _Trace, state: NnxState, arrays: Sequence[Any], objects: Sequence[Any], program: Program
) -> list[Any]:
    new = changed(state, arrays, objects)
    for position, value in new.items():
        if is_batch_statistic(state.variables[position]):
            new[position] = program.by_examples.average(
                value, [f"NNX variable {state.paths[position]}"]
            )
    trace.nnx_changes = tuple(new)
    return list(new.values())


def _check_nnx_agree(jaxpr: Any, call: Call, trace: _Trace, variables: list[Variable]) -> None:
    """Raise if the replicas would leave different values in one NNX variable."""
    state = call.nnx
    if state is None:
        return
    inputs = [*call.varying, *(False for _ in state.variables)]
    inputs += [v.storage.per_replica for v in variables]
    vary = varying_outputs(jaxpr.jaxpr, inputs, REPLICA_AXIS)
    start = len(trace.everywhere)
    for offset, position in enumerate(trace.nnx_changes):
        if vary[start + offset]:
            raise nnx_differs(state, position)


def _record_updates(trace: _Trace, program: Program) -> list[Any]:
    """Return the operands of what is applied outside, and the new values of the other variables."""
    trace.writes = tuple(program.writes.values())
    pairs = [split_off(update) for update in program.updates]
    trace.updates = tuple(update for update, _ in pairs)
    operands = [array for _, arrays in pairs for array in arrays]
    return operands + [program.final_value(v) for v in trace.writes]
