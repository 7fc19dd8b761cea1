"""What compressed gradients lose in a step, kept on each replica and added in the next.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", 2014; Karimireddy, Rebjock, Stich and Jaggi,
"Error feedback fixes SignSGD and other gradient compression schemes", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distrib.context import get_strategy
from distrib.values import is_slices
from distrib.variables import Variable, VariableAggregation, VariableSynchronization, VariableTree

RESIDUALS = "residuals"
"""The field of a train state that holds them."""


def residuals_for(params: VariableTree) -> VariableTree | None:
    """Return zeros for what the current strategy will round off gradients, a copy a replica.

    They are a list: an array for each floating parameter, in the order of the leaves.

    None where it rounds nothing off, or so little that nobody keeps it: where its cross-device ops
    are not of those with ``error_feedback``, or there is one replica.

    They are ``ON_READ`` with aggregation SUM, so that a checkpoint keeps what all replicas together
    have not sent yet, and whoever restores it, with any number of replicas, shares it out.
    """
    strategy = get_strategy()
    ops = strategy.extended.cross_device_ops
    if ops is None or not ops.error_feedback or strategy.num_replicas_in_sync == 1:
        return None
    return VariableTree(
        [jnp.zeros(v.shape, _kept_as(v)) for v in params.variables if _is_rounded(v)],
        RESIDUALS,
        VariableAggregation.SUM,
        synchronization=VariableSynchronization.ON_READ,
    )


def combine(
    program: Any,
    params: VariableTree,
    residuals: VariableTree,
    grads: Sequence[Any],
    aggregation: str,
    names: Sequence[str],
) -> Sequence[jax.Array]:
    """Combine gradients over the replicas with error feedback.

    Gradients of rows are made dense, for what is rounded off may be of any row.

    Args:
      program: of the step.
      params: the parameters.
      residuals: what :func:`residuals_for` gave.
      grads: a gradient for each parameter.
      aggregation: ``"SUM"`` or ``"MEAN"``.
      names: a name for each gradient, for messages.
    """
    rounded = [i for i, v in enumerate(params.variables) if _is_rounded(v)]
    totals, errors = program.by_examples.combine_with_feedback(
        [grads[i].to_dense() if is_slices(grads[i]) else grads[i] for i in rounded],
        [v.value() for v in residuals.variables],
        aggregation,
        [names[i] for i in rounded],
    )
    for variable, error in zip(residuals.variables, errors, strict=True):
        variable.assign(error)
    combined = dict(zip(rounded, totals, strict=True))
    rest = [i for i in range(len(grads)) if i not in combined]
    if rest:
        exact = program.by_examples.combine(
            [grads[i] for i in rest], aggregation, [names[i] for i in rest]
        )
        combined.update(zip(rest, exact, strict=True))
    return [combined[i] for i in range(len(grads))]


def _is_rounded(variable: Variable) -> bool:
    return jnp.issubdtype(variable.dtype, jnp.floating)


def _kept_as(variable: Variable) -> Any:
    """Return the dtype of residuals: float32 at least, whatever the gradients have."""
    return jnp.promote_types(variable.dtype, jnp.float32)
