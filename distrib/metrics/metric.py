"""The base of metrics: states that are summed over the replicas, and a result made of the sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distrib.variables import (
    HoldsVariables,
    Variable,
    VariableAggregation,
    VariableSynchronization,
)


class Metric(HoldsVariables):
    """A metric whose states, never its results, are aggregated over the replicas.

    Make it in ``strategy.scope()``, call :meth:`update_state` in a step and :meth:`result` outside.
    A ratio of sums over all replicas is the ratio over all examples, however they were split.

    Args:
      name: a name for messages.
    """

    def __init__(self, name: str):
        self.name = name

    def add_state(self, name: str, shape: tuple[int, ...] = ()) -> Variable:
        """Return a new state: float32 zeros of ``shape`` on each replica, summed when read."""
        return Variable(
            jnp.zeros(shape, jnp.float32),
            name=f"{self.name}/{name}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch; each metric says of what."""
        raise TypeError(f"{type(self).__name__} does not say what a batch adds")

    def result(self) -> jax.Array:
        """Return the value over everything that was added."""
        raise TypeError(f"{type(self).__name__} does not say what its result is")

    def reset_state(self) -> None:
        """Set all states to zero, for the next epoch. Outside of a step."""
        for variable in self.distributed_variables():
            variable.assign(jnp.zeros(variable.shape, variable.dtype))


def weighted(values: Any, sample_weight: Any) -> tuple[jax.Array, jax.Array]:
    """Return values times their weights, and the weights, both in the shape of ``values``.

    Args:
      values: ``[batch, ...]`` or a scalar, of any number dtype or boolean.
      sample_weight: broadcasts against ``values`` from the first axis; None for ones.
    """
    values = jnp.asarray(values).astype(jnp.float32)
    if sample_weight is None:
        return values, jnp.ones_like(values)
    weight = jnp.asarray(sample_weight, jnp.float32)
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    weight = jnp.broadcast_to(weight, values.shape)
    return values * weight, weight
