"""Threads that take turns: a function for each replica, run until it asks for a meeting.

Replica 0 runs until it asks for a meeting or returns, then replica 1, and so on; when all have
asked for the same, the meeting is held and the turns go round again. Only one thread runs at a
time, so Python code needs no locks and prints come in the order of the replicas, as in
tf.distribute. JAX dispatches work without waiting for it, so the devices run side by side all the
same.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distrib.errors import MeetingError, ReplicaDeadlineError
from distrib.platform import stack_as_traceback, user_location

TURN_SECONDS = 300.0
"""A replica that neither returns nor asks for a meeting for this long is given up."""
_SLICE_SECONDS = 0.1
_DEBUGGERS = ("pdb", "bdb", "pydevd", "_pydevd_bundle", "debugpy")


@dataclass(frozen=True)
class Request:
    """What a replica asks of the others.

    Attributes:
      kind: what must be equal of all requests of a meeting.
      shown: the call, for messages.
      payload: what this replica brings.
      timeout: how long the others may take to come, in seconds; None for the usual time.
    """

    kind: Any
    shown: str
    payload: Any
    timeout: float | None = None


class _Abandoned(BaseException):
    """Unwinds the thread of a replica whose step has failed elsewhere."""


class Turn:
    """One replica's thread."""

    def __init__(self, index: int, body: Callable[[Turn], Any]):
        self.index = index
        self.request: Request | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self._answer: Any = None
        self._abandoned = False
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        # The thread sees the caller's context variables.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run, body),
            name=f"distrib-replica-{index}",
            daemon=True,
        )

    def ask(self, request: Request) -> Any:
        """Wait for the others with ``request`` and return this replica's part of the outcome."""
        if self._abandoned:  # It asks again while it unwinds: in a finally block.
            raise _Abandoned
        self.request = request
        self._back.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        return self._answer

    def _run(self, body: Callable[[Turn], Any]) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                self.result = body(self)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: B036 - handed to the caller of run, whatever it is
            self.error = error
        finally:
            self.done = True
            self.request = None
            self._back.release()

    def take(self, answer: Any, seconds: float) -> None:
        """Let the replica run until it asks for a meeting or ends.

        Raises:
          ReplicaDeadlineError: if it does neither in time.
        """
        self._answer, self.request = answer, None
        if not self._thread.is_alive() and not self.done:
            self._thread.start()
        self._go.release()
        end = time.monotonic() + seconds
        # In slices, so that Ctrl-C reaches the main thread.
        while not self._back.acquire(timeout=_SLICE_SECONDS):
            if time.monotonic() > end and not _in_debugger(self._thread):
                raise ReplicaDeadlineError(
                    f"Replica {self.index} has run for {seconds:g} s without returning or reaching "
                    "a collective, while the others wait for it. It is stuck in its own code, at "
                    f"{self.line}: look at what it waits for."
                )

    @property
    def line(self) -> str:
        """The user's line at which the replica waits or runs."""
        return user_location(self.frame) or "a line of no file"

    @property
    def frame(self) -> types.FrameType | None:
        """The innermost frame of the thread."""
        return _current_frame(self._thread)

    def abandon(self) -> None:
        """End the thread, if it waits."""
        self._abandoned = True
        self._go.release()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)


def _in_debugger(thread: threading.Thread) -> bool:
    """Tell whether a debugger has stopped the thread: its user may think as long as they like."""
    frame = _current_frame(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _current_frame(thread: threading.Thread) -> types.FrameType | None:
    return sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - documented


def take_turns(
    bodies: Sequence[Callable[[Turn], Any]],
    meet: Callable[[list[Request]], Sequence[Any]],
    seconds: float = TURN_SECONDS,
) -> list[Any]:
    """Run one function for each replica and hold their meetings.

    Args:
      bodies: called each on its own thread, with the turn by which it asks for meetings.
      meet: from the requests of all replicas, of one kind, to an answer for each.
      seconds: how long one replica may run without meeting the others.

    Returns:
      What the functions returned.

    Raises:
      MeetingError: if replicas ask for different meetings, or one returns while another waits.
      ReplicaDeadlineError: if a replica gets stuck.
    """
    turns = [Turn(i, body) for i, body in enumerate(bodies)]
    answers: Sequence[Any] = [None] * len(turns)
    try:
        while True:
            patience = seconds
            for turn, answer in zip(turns, answers, strict=True):
                turn.take(answer, patience)
                if turn.error is not None:
                    raise turn.error
                if turn.request is not None and turn.request.timeout is not None:
                    patience = min(patience, turn.request.timeout)
            if all(turn.done for turn in turns):
                return [turn.result for turn in turns]
            try:
                answers = meet(_same_meeting(turns))
            except Exception as error:
                # It ends with the line of the step that called for the meeting.
                waiting = next(turn for turn in turns if turn.request is not None)
                error.__traceback__ = stack_as_traceback(waiting.frame, error.__traceback__)
                raise
    finally:
        for turn in turns:
            turn.abandon()


def _same_meeting(turns: Sequence[Turn]) -> list[Request]:
    """Return the requests of all replicas.

    Raises:
      MeetingError: naming two replicas that do not meet, and what each does.
    """
    waiting = next(turn for turn in turns if turn.request is not None)
    requests = []
    for turn in turns:
        if turn.request is None or waiting.request is None:
            shown = waiting.request.shown if waiting.request else ""
            raise MeetingError(
                f"Replica {waiting.index} waits in {shown}, and replica {turn.index} has returned "
                "without it: every replica must make the same collective calls. Replica "
                f"{waiting.index} is at {waiting.line}."
            )
        if turn.request.kind != waiting.request.kind:
            raise MeetingError(
                f"Replica {waiting.index} calls {waiting.request.shown}, and replica {turn.index} "
                f"calls {turn.request.shown}: the replicas must make the same collective calls in "
                f"the same order. They are at {waiting.line} and {turn.line}."
            )
        requests.append(turn.request)
    return requests
