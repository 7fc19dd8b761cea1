"""Making a strategy current without a ``with`` block."""

from __future__ import annotations

from distrib.context import Frame, inside_scope, set_base
from distrib.errors import ContextError
from distrib.strategies.strategy import Strategy


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make ``strategy`` current in this thread until it is replaced; None undoes it.

    Raises:
      ContextError: inside a scope.
      TypeError: if ``strategy`` is none.
    """
    if inside_scope():
        raise ContextError(
            "Must not be called inside a strategy's scope: leave the `with` block first."
        )
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"experimental_set_strategy got {strategy!r}: pass a strategy, or None.")
    set_base(None if strategy is None else Frame(strategy))
