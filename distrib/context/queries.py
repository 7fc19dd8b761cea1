"""The questions that code asks about where it runs, and the checks that answer with an error."""

from __future__ import annotations

from typing import Any

from distrib.context import stack
from distrib.context.replica_context import ReplicaContext
from distrib.errors import ContextError


def get_strategy() -> Any:
    """Return the current strategy: the one whose scope or step this is, or the default strategy.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    return stack.current_frame().strategy


def has_strategy() -> bool:
    """Tell whether a strategy other than the default one is current.

    >>> has_strategy()
    False
    """
    return stack.current_frame().strategy is not stack.default_frame().strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica whose code runs.

    Returns:
      The :class:`ReplicaContext` inside ``strategy.run``; the default one (replica 0 of 1) outside
      any strategy; None in cross-replica context: in a scope outside ``run``, or in a merge
      function.

    >>> get_replica_context().num_replicas_in_sync
    1
    """
    return stack.current_frame().replica


def in_cross_replica_context() -> bool:
    """Tell whether this is a scope outside ``run``, or a merge function.

    >>> in_cross_replica_context()
    False
    """
    return stack.current_frame().replica is None


def current_program() -> stack.ReplicaProgram | None:
    """Return the program that is being built for a replica, or None outside of a compiled step."""
    return stack.current_frame().program


def require_cross_replica_context(strategy: Any, what: str, instead: str) -> None:
    """Raise unless ``strategy`` may be used here as a whole.

    Args:
      strategy: the strategy that was called.
      what: the method, for the message.
      instead: what a replica should call.

    Raises:
      ContextError: in a replica's code, or in the scope of another strategy.
    """
    frame = stack.current_frame()
    if frame is stack.default_frame():
        return
    require_same_strategy(strategy)
    if frame.replica is not None:
        raise ContextError(
            f"{what} requires being in cross-replica context, but it was called inside "
            f"strategy.run: {instead}."
        )


def require_same_strategy(strategy: Any, variable: str | None = None) -> None:
    """Raise if a strategy other than ``strategy`` is current.

    Args:
      strategy: the strategy that is to be used here.
      variable: the name of the variable of it that is to be changed, if it is that.

    Raises:
      ContextError: naming both, and the variable.
    """
    current = stack.current_frame().strategy
    if current is not strategy and current is not stack.default_frame().strategy:
        whose = "" if variable is None else f", to which variable {variable!r} belongs,"
        raise ContextError(
            f"Mixing different distrib.Strategy objects: {strategy!r}{whose} is not {current!r}, "
            "whose scope this is. Leave that scope first, or use the strategy that it belongs to."
        )
