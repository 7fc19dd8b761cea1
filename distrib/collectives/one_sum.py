"""A sum over the replicas that is made of several collectives, as one primitive of the program.

The engines look at the program of a replica: which values are equal on all replicas, and where
replicas of unequal batches meet. A step of a ring says neither: what it brings differs by replica,
and only the last step makes the sum. So the whole algorithm stands in the program as one equation,
and so does its derivative, which is the algorithm again: a sum is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Algorithm = Callable[[jax.Array], jax.Array]

_sum = Primitive("sum_over_replicas")
_sum_with_errors = Primitive("sum_over_replicas_with_errors")
_sum_with_errors.multiple_results = True


ONE_SUM_NAMES = (_sum.name, _sum_with_errors.name)
"""The names of the primitives."""


def one_sum(algorithm: Algorithm, value: jax.Array) -> jax.Array:
    """Return ``algorithm(value)`` as one equation, whose derivative is ``algorithm`` again.

    An algorithm that uses more than `jax.lax.psum` goes through here, so that steps with uneven
    batches and NNX objects work with it. Derivatives of any order, forward and reverse, are
    defined.

    Args:
      algorithm: takes the array of a replica and returns the sum over the replicas, equal on each.
      value: the array of this replica.

    >>> equations = jax.make_jaxpr(lambda x: one_sum(lambda y: y * 2, x))(1.0).jaxpr.eqns
    >>> [equation.primitive.name for equation in equations]
    ['sum_over_replicas']
    >>> print(jax.grad(lambda x: one_sum(lambda y: y * 2, x))(1.0))
    2.0
    """
    return _sum.bind(value, algorithm=algorithm)


def one_sum_with_errors(
    algorithm: Callable[[jax.Array], tuple[jax.Array, jax.Array]], value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``algorithm(value)`` as one equation: the sum, equal everywhere, and an error.

    It has no derivative: what is rounded off is not a linear function of the value.

    Args:
      algorithm: takes the array of a replica and returns the sum over the replicas, and what this
        replica rounded off on the way.
      value: the array of this replica.
    """
    total, error = _sum_with_errors.bind(value, algorithm=algorithm)
    return total, error


def is_one_sum(equation: Any) -> bool:
    """Tell whether an equation of a program is one that this module makes.

    Its first result is equal on all replicas; a second is each replica's own.
    """
    return equation.primitive in (_sum, _sum_with_errors)


def _apply(value: Any, *, algorithm: Callable[[Any], Any]) -> Any:
    return algorithm(value)


def _transposed(gradient: Any, _: Any, *, algorithm: Algorithm) -> list[Any]:
    return [_sum.bind(ad.instantiate_zeros(gradient), algorithm=algorithm)]


def _batched(primitive: Primitive) -> Callable[..., Any]:
    def rule(values: Any, axes: Any, *, algorithm: Callable[[Any], Any]) -> Any:
        (value,), (axis,) = values, axes
        mapped = jax.vmap(algorithm, in_axes=axis, out_axes=axis)
        results = primitive.bind(value, algorithm=mapped)
        return results, [axis] * len(results) if primitive.multiple_results else axis

    return rule


_sum.def_impl(_apply)
_sum.def_abstract_eval(lambda value, **_: value)
ad.deflinear2(_sum, _transposed)
_sum_with_errors.def_impl(_apply)
_sum_with_errors.def_abstract_eval(lambda value, **_: (value, value))
for _primitive in (_sum, _sum_with_errors):
    batching.primitive_batchers[_primitive] = _batched(_primitive)
    mlir.register_lowering(
        _primitive, mlir.lower_fun(_apply, multiple_results=_primitive.multiple_results)
    )
