"""A sum over the replicas that is made of several collectives, as one equation of the program.

The engines look at the program of a replica: which values are equal on all replicas, and where
replicas of unequal batches meet. A step of a ring says neither: what it brings differs by replica,
and only the last step makes the sum. So the whole algorithm stands in the program as one call with
a name that the engines know, and so does its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ONE_SUM = "distrib_sum_over_replicas"
"""The name of the call that stands for a sum over all replicas."""


def one_sum(algorithm: Callable[[jax.Array], jax.Array], value: jax.Array) -> jax.Array:
    """Return ``algorithm(value)`` as one equation, whose gradient is ``algorithm`` of the gradient.

    A class of :class:`distrib.collectives.CrossDeviceOps` that uses more than `jax.lax.psum` passes
    its algorithm through here, so that steps with uneven batches and NNX objects work with it.
    Reverse-mode derivatives, of any order, are defined; forward mode is not.

    Args:
      algorithm: takes the array of a replica and returns the sum over the replicas, equal on each.
      value: the array of this replica.

    >>> equations = jax.make_jaxpr(lambda x: one_sum(lambda y: y * 2, x))(1.0).jaxpr.eqns
    >>> equations[0].primitive.name
    'custom_vjp_call'
    >>> print(jax.grad(lambda x: one_sum(lambda y: y * 2, x))(1.0))
    2.0
    """

    def named(x: jax.Array) -> jax.Array:
        return algorithm(x)

    named.__name__ = ONE_SUM
    call = jax.jit(named)

    @jax.custom_vjp
    def total(x: jax.Array) -> jax.Array:
        return call(x)

    total.defvjp(lambda x: (total(x), None), lambda _, gradient: (total(gradient),))
    return total(value)


def is_one_sum(equation: Any) -> bool:
    """Tell whether an equation of a program is the call that :func:`one_sum` makes."""
    return equation.params.get("name") == ONE_SUM and equation.primitive.name in ("jit", "pjit")
