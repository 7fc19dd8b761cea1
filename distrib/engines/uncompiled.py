"""Calls with uneven replicas that cannot be compiled: they run in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from absl import logging

from distrib.context import Frame, entered
from distrib.engines.arguments import Arguments
from distrib.errors import ContextError, UnevenReplicasError


class Runs(Protocol):
    """What calls a function as it is, each replica in a thread."""

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``fn`` once for each replica."""
        ...


class Uncompiled:
    """Stands in for the program of a call that has none.

    Where replicas see different shapes their programs have to meet at the same collectives. Where
    they do not (a collective in a loop, an all-gather of pieces of unequal length, a branch on the
    shape) the replicas can still run as Python does, each for itself, and meet as they go.

    Args:
      refusal: why it cannot be compiled.
      fn: the function, which is named in a warning.
    """

    output_shapes = None
    created = ()

    def __init__(self, refusal: UnevenReplicasError, fn: Callable[..., Any]):
        # Not the error itself, whose traceback would hold the arguments of the call.
        self._why = str(refusal)
        self.watches: list[Any] = []
        self.captures: list[Any] = []
        logging.warning(
            "distrib: %s runs eagerly on batches of unequal sizes, a thread for each replica, "
            "because it cannot be compiled for them. That is slow. %s",
            getattr(fn, "__qualname__", fn),
            refusal,
        )

    @property
    def refusal(self) -> UnevenReplicasError:
        """The error that says why there is no program."""
        return UnevenReplicasError(self._why)

    def run(
        self,
        strategy: Any,
        threads: Runs,
        fn: Callable[..., Any],
        arguments: Arguments,
        in_replica: bool,
    ) -> Any:
        """Run the call without compiling it.

        Raises:
          UnevenReplicasError: if it uses collectives of `jax.lax`, which threads cannot meet at.
        """
        args, kwargs = arguments.original
        if not in_replica:
            with entered(Frame(strategy)):
                return fn(*args, **kwargs)
        try:
            return threads.run(fn, args, kwargs)
        except ContextError as error:
            if isinstance(error.__cause__, NameError):  # Of the axis that threads do not have.
                raise self.refusal from None
            raise
