"""The default strategy: one replica where JAX puts it. Current where no other is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distrib.context import (
    Frame,
    ReplicaContext,
    default_frame,
    entered,
    require_same_strategy,
    set_default,
)
from distrib.engines import NO_OPTIONS, RunOptions, joined, with_step_axis
from distrib.reduce_op import ReduceOp
from distrib.strategies.combining import SingleCombiner
from distrib.strategies.extended import StrategyExtended
from distrib.strategies.homes import OnDevice
from distrib.strategies.strategy import Strategy


class _Alone:
    """The meeting of one replica, and the engine that calls its function as it is."""

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        """Return ``value``."""
        return value

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """Return ``value``."""
        return value

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict) -> Any:
        """Call ``merge_fn`` in cross-replica context."""
        strategy = default_frame().strategy
        with entered(Frame(strategy, None)):
            return merge_fn(strategy, *args, **kwargs)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: RunOptions = NO_OPTIONS,
    ) -> Any:
        """Call ``fn``; nothing is compiled that options could be for."""
        return fn(*args, **kwargs)

    def run_steps(
        self,
        fn: Callable[..., Any],
        calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        options: RunOptions,
    ) -> Any:
        """Call ``fn`` for each ``(args, kwargs)``."""
        return joined([with_step_axis(fn(*args, **kwargs)) for args, kwargs in calls])

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``fn``."""
        return fn(*args, **kwargs)

    def compiled_text(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> str:
        """Raise: the default strategy compiles nothing."""
        raise TypeError("The default strategy calls a function as it is, and compiles nothing.")

    explain = compiled_text


class DefaultStrategy(Strategy):
    """What :func:`distrib.get_strategy` returns outside of every scope.

    ``run`` calls its function as it is, variables are plain, and entering its scope changes
    nothing.
    """

    def __init__(self) -> None:
        super().__init__(
            StrategyExtended(
                self,
                devices=(),
                mesh=None,
                home=OnDevice(None),
                engine=_Alone(),
                combiner=SingleCombiner(),
            )
        )

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Do nothing.

        Raises:
          ContextError: where another strategy is current.
        """
        require_same_strategy(self)
        yield self


def install() -> None:
    """Fill the slot of the default strategy."""
    strategy = DefaultStrategy()
    context = ReplicaContext(strategy, 0, _Alone())
    set_default(Frame(strategy, context))
