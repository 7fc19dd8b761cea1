"""The thread-local stack of contexts: whose code runs, for which replica, in which program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class CanBeCurrent:
    """The base of what a frame can make current: strategies, told apart by it in lower layers."""


class CombiningByExamples(Protocol):
    """How replicas combine gradients and statistics, each counting for its examples."""

    def global_examples(self, local: int) -> int:
        """Return the examples of all replicas, of which this one has ``local``."""
        ...

    @property
    def share_of_mean(self) -> float:
        """What a mean over the replicas multiplies this one's value by, weighted by examples."""
        ...

    def average(self, value: Any, names: Any = ()) -> Any:
        """Return the mean of a tree over the replicas, weighted by the examples of each."""
        ...

    def combine(
        self, value: Any, aggregation: str, names: Any = (), *, in_parts: bool = False
    ) -> Any:
        """Combine gradients: SUM, or MEAN weighted by the examples of each replica.

        ``names`` has one for each leaf, for messages. ``in_parts`` allows to leave a part of each
        on each replica; then the result is only good as the operand of an update.
        """
        ...

    def combine_with_feedback(
        self, value: Any, residuals: Any, aggregation: str, names: Any = ()
    ) -> Any:
        """Combine gradients, adding what earlier steps rounded off: return them and the rest."""
        ...

    def accumulate(self, variables: Any, value: Any, aggregation: str | None, due: Any) -> Any:
        """Add gradients to this replica's ``variables``; where ``due``, sum and clear these.

        Args:
          variables: ``ON_READ`` variables with aggregation SUM, of which replicas have their own.
          value: an array for each; what the replicas add is combined by ``aggregation`` once it is
            summed over them.
          aggregation: SUM, MEAN weighted by the examples of each replica, or None for what has been
            combined already.
          due: a boolean scalar, equal on every replica.

        Returns:
          The sums over the replicas, an array for each variable; zeros where not ``due``.
        """
        ...


class ReplicaProgram(Protocol):
    """What variables and strategies may ask of the program of a replica while it is being built."""

    def run(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Call ``fn`` in the replicas of this program, from its cross-replica context."""
        ...

    def read(self, variable: Any) -> Any:
        """Return the value of ``variable`` at this point of the program."""
        ...

    def assign(self, variable: Any, kind: str, value: Any) -> Any:
        """Record a change of a kind, ``"assign"`` for one, and return the new value."""
        ...

    def created_before(self) -> Any:
        """Return the variable that another replica created at this point, or None."""
        ...

    def create(self, variable: Any, value: Any, make_storage: Any) -> Any:
        """Make ``variable``, which starts from the ``value`` of replica 0; return its storage."""
        ...

    def update(self, variables: Any, apply: Any, operand: Any) -> None:
        """Record that ``variables`` become ``apply(old values, operand)`` on every replica."""
        ...

    @property
    def copies(self) -> Any:
        """The copies of variables, to be changed one by one in cross-replica context."""
        ...

    def all_reduce(self, op: Any, value: Any, options: Any) -> Any:
        """Reduce a tree over the replicas, each counting once."""
        ...

    @property
    def by_examples(self) -> CombiningByExamples:
        """How the replicas combine gradients and statistics, each counting for its examples."""
        ...


@dataclass(frozen=True)
class Frame:
    """One level of the stack.

    Attributes:
      strategy: the strategy that is current.
      replica: the ``ReplicaContext`` of the replica whose code runs; None in cross-replica context.
      program: the program that is being built for a replica; None outside of ``run``.
    """

    strategy: Any
    replica: Any = None
    program: ReplicaProgram | None = None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.base: Frame | None = None


_stack = _Stack()
_default_frame: list[Frame] = []


def set_default(frame: Frame) -> None:
    """Fill the slot of the default strategy; the strategies package does so when it loads."""
    _default_frame[:] = [frame]


def current_frame() -> Frame:
    """Return the innermost frame of this thread, or the default strategy's."""
    if _stack.frames:
        return _stack.frames[-1]
    if _stack.base is not None:
        return _stack.base
    return default_frame()


def default_frame() -> Frame:
    """Return the frame of the default strategy: one replica, in replica context."""
    if not _default_frame:
        raise RuntimeError("no default strategy is set: import distrib.strategies first")
    return _default_frame[0]


def set_base(frame: Frame | None) -> None:
    """Make ``frame`` current in this thread until it is replaced, without a ``with`` block."""
    _stack.base = frame


def inside_scope() -> bool:
    """Tell whether this thread is inside a ``with`` block or a step."""
    return bool(_stack.frames)


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
    """Make ``frame`` current for the length of a ``with`` block."""
    _stack.frames.append(frame)
    try:
        yield frame
    finally:
        _stack.frames.pop()
