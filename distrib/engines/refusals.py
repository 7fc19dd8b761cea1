"""The errors that both engines raise for what a replica must not do with variables and meetings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distrib.engines.nnx_objects import NnxState
from distrib.errors import (
    AggregationError,
    ContextError,
    NestedTraceError,
    UnevenReplicasError,
    VariableError,
)
from distrib.values import PerReplica
from distrib.variables import Variable


def changed_in_transformation(variable: Variable) -> NestedTraceError:
    """Return the error for a change whose value may not leave the transformation it was made in."""
    return NestedTraceError(
        f"Variable {variable.name!r} was changed inside a JAX transformation (jax.grad, jax.jit, "
        "jax.vmap, lax.scan, lax.cond, jax.checkpoint ...), whose values may not leave it. Return "
        "the new value from the transformed function (has_aux=True for gradients), and assign it "
        "outside."
    )


def merged_in_transformation() -> NestedTraceError:
    """Return the error for a ``merge_call`` where the replicas cannot meet."""
    return NestedTraceError(
        "merge_call was called inside a JAX transformation (jax.grad, jax.jit, lax.cond, lax.scan "
        "...), where the replicas cannot meet. Call it in the replica function itself."
    )


def run_in_merge_function() -> ContextError:
    """Return the error for ``strategy.run`` in the middle of a step."""
    return ContextError(
        "strategy.run was called inside a merge function, whose variables are in the middle of a "
        "step. Call it after strategy.run has returned, or in a distrib.function."
    )


def of_another_strategy(variable: Variable, strategy: Any) -> ContextError:
    """Return the error for assigning another strategy's variable in a step of ``strategy``."""
    return ContextError(
        f"Mixing different distrib.Strategy objects: variable {variable.name!r} belongs to "
        f"{variable.distribute_strategy!r} and was assigned in a step of {strategy!r}. Create it "
        "inside `with strategy.scope():` of the strategy that runs the step."
    )


def without_aggregation(variable: Variable) -> AggregationError:
    """Return the error for combining the values of a variable that does not say how."""
    return AggregationError(
        f"You must specify an aggregation method to update variable {variable.name!r} in replica "
        "context, or to read it outside: pass aggregation= to distrib.Variable, or combine the "
        "value yourself with get_replica_context().all_reduce."
    )


def number_summed(variable: Variable, value: Any) -> AggregationError:
    """Return the error for summing a Python number: once, or once for each replica?"""
    return AggregationError(
        f"A non-DistributedValues value {value!r} cannot be reduced with the given reduce op "
        f"ReduceOp.SUM into variable {variable.name!r}: a Python number is one value for all "
        "replicas. Wrap it in jnp.asarray(...) to add it once for each replica."
    )


def unequal_shapes(leaves: Sequence[Any]) -> UnevenReplicasError:
    """Return the error for replicas that see different shapes where the options forbid it."""
    uneven = [leaf for leaf in leaves if isinstance(leaf, PerReplica) and leaf.whole is None]
    shapes = [[np.shape(part) for part in leaf.values] for leaf in uneven]
    return UnevenReplicasError(
        f"The replicas have arguments of unequal shapes, {shapes[0]}, and "
        "RunOptions(experimental_enable_dynamic_batch_size=False) forbids it. Leave the short "
        "batch out (drop_remainder=True), pad it, or allow it."
    )


def nnx_differs(state: NnxState, position: int) -> VariableError:
    """Return the error for leaving another value of an NNX variable on each replica."""
    kind = type(state.variables[position]).__name__
    return VariableError(
        f"The step changes {kind} {state.paths[position]!r} of an NNX object to a value that "
        "differs by replica, so that the copies would no longer agree. Combine the gradients "
        "before the optimizer sees them: grads = distrib.nn.mean_over_examples(grads). Metrics: "
        "use distrib.metrics."
    )
