"""When the copies of a variable are brought together, and how."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import jax.numpy as jnp

from distrib.errors import VariableError


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together.

    ``ON_WRITE`` (what ``AUTO`` means): at each assignment, so that all copies agree. ``ON_READ``:
    replicas write to their own copies, and a read outside of them aggregates. ``NONE`` is refused
    by distributed strategies, as in tf.distribute.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the replicas' values of a variable are combined into one.

    ``ON_WRITE`` variables apply it to what replicas assign, ``ON_READ`` variables to their copies.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


_Enum = TypeVar("_Enum", bound=enum.Enum)


def _member(kind: type[_Enum], value: Any, what: str, name: str | None) -> _Enum:
    if isinstance(value, kind):
        return value
    raise VariableError(
        f"Invalid variable {what} mode: {value!r} for variable: {name}. Pass a member of "
        f"distrib.{kind.__name__}: {', '.join(kind.__members__)}."
    )


def check_modes(
    synchronization: Any, aggregation: Any, trainable: bool | None, dtype: Any, name: str | None
) -> tuple[VariableSynchronization, VariableAggregation, bool]:
    """Validate how a variable is synchronised and fill in what AUTO and None mean.

    Returns:
      The synchronization (never AUTO), the aggregation, and whether the variable is trainable.

    Raises:
      VariableError: if a mode is not a member of its enumeration, or MEAN is asked of integers, or
        SUM of booleans.
    """
    sync = _member(VariableSynchronization, synchronization, "synchronization", name)
    agg = _member(VariableAggregation, aggregation, "aggregation", name)
    if agg is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise VariableError(
            f"Variable {name!r} has aggregation=MEAN and the non-floating dtype {dtype}: the mean "
            "of integers is not an integer. Use SUM or ONLY_FIRST_REPLICA, or a floating dtype."
        )
    if agg is VariableAggregation.SUM and dtype == jnp.bool_:
        raise VariableError(
            f"Variable {name!r} has aggregation=SUM and the dtype bool: booleans have no sum. Use "
            "ONLY_FIRST_REPLICA, or a dtype of numbers, int32 for one, to count."
        )
    if trainable is None:
        trainable = sync is not VariableSynchronization.ON_READ
    if sync is VariableSynchronization.AUTO:
        sync = VariableSynchronization.ON_WRITE
    return sync, agg, trainable
