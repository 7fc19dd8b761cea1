"""Ctrl-C must not fall between a step and the moment when its results are put back.

A step is given the buffers of the variables that it writes. If the interrupt were raised after the
step had taken them and before the new arrays were stored, the variables would hold deleted arrays.
"""

from __future__ import annotations

# signal.signal turns what it is given and returns into enums, which costs 3 us a call. This is the
# function under it.
import _signal  # pyright: ignore[reportMissingImports]
import signal
import threading
from types import FrameType, TracebackType

_main_thread = threading.main_thread()
_SIGINT = int(signal.SIGINT)


class InterruptsDeferred:
    """Hold back SIGINT for the length of a ``with`` block, and deliver it at the end.

    Does nothing in other threads than the main one, where Python raises no KeyboardInterrupt.
    """

    __slots__ = ("_caught", "_previous")

    def __enter__(self) -> None:
        self._caught: FrameType | None | bool = False
        self._previous = None
        if threading.current_thread() is _main_thread:
            self._previous = _signal.signal(_SIGINT, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = frame or True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is None:
            return
        _signal.signal(_SIGINT, self._previous)
        if self._caught is not False and callable(self._previous):
            frame = self._caught if isinstance(self._caught, FrameType) else None
            self._previous(signal.SIGINT, frame)
