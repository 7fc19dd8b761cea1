"""Loading ahead of use: a bounded queue that a thread fills while the step runs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from distrib.input.options import checked_int
from distrib.platform import thread_settings, with_settings

T = TypeVar("T")

SLICE_SECONDS = 0.5
"""A consumer that waits looks this often whether the thread is still alive."""
FILL_SECONDS = 0.05
"""``take`` leaves the thread alone for so long at most, looking every ``FILL_SLICE_SECONDS``."""
FILL_SLICE_SECONDS = 0.0002
SLOW_AFTER_SECONDS = 60.0
"""After waiting this long, one line is logged."""
CLOSE_SECONDS = 1.0
"""``close`` waits this long for the thread, which may be inside a slow loader."""
EXIT_SECONDS = 0.5
"""All threads together are waited for this long when the interpreter exits."""

_log = logging.getLogger(__name__)
_thread_numbers = itertools.count()
_END: Any = object()


class Prefetcher(Generic[T]):
    """An iterator over ``transform(item)`` that works up to ``depth`` items ahead of use.

    A daemon thread named ``distrib-prefetch-N`` draws and transforms; at no time are there more
    than ``depth`` items that it has drawn and ``next`` has not handed out. An exception of the
    source or of ``transform`` comes out of ``next`` in its item's place, with its own traceback,
    and ends the iterator. The thread ends, closing the source's iterator if that has ``close()``,
    when the source is exhausted or has failed, after ``close()``, when the prefetcher is no longer
    referenced (as after ``break``), and at exit. A thread that is inside a slow loader then ends
    as soon as the loader returns.

    ``next`` blocks until an item is there, and Ctrl-C interrupts it; then ``next`` may be called
    again.

    Args:
      make_iterator: called once, at once and in the caller's thread.
      depth: how many items to prepare ahead of use; 0 prepares each in ``next``, with no thread.
      transform: applied to each item on the thread, such as the placement on devices. Neither it
        nor ``make_iterator`` may refer to the prefetcher, or it would never be collected.
      description: what is waited for, for messages.

    Raises:
      InputError: if ``depth`` is negative; and whatever ``make_iterator`` raises.

    >>> list(Prefetcher(lambda: iter([1, 2, 3]), 2, lambda item: item * 10))
    [10, 20, 30]
    """

    def __init__(
        self,
        make_iterator: Callable[[], Iterator[Any]],
        depth: int,
        transform: Callable[[Any], T],
        *,
        description: str = "the dataset",
    ) -> None:
        """Make the iterator and start the thread."""
        depth = checked_int(
            "depth", depth, minimum=0, fix="pass how many items to prepare ahead of use."
        )
        self._description = description
        self._ended = False
        self._line = _Line(depth)
        self._thread: _Loader | None = None
        self._transform = transform
        iterator = make_iterator()
        if not depth:
            self._iterator = iterator
            return
        self._thread = _Loader(self._line, iterator, transform)
        _wait_for_threads_at_exit()
        # Only signals: to wait here would stall whichever line of code the collector ran in.
        weakref.finalize(self, self._line.stop)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        """Return itself."""
        return self

    def __next__(self) -> T:
        """Return the next item; see the class for what it raises and when it blocks."""
        if self._ended:
            raise StopIteration
        if self._thread is None:
            return self._next_here()
        line = self._line
        try:
            message = line.items.get(block=False)
        except queue.Empty:
            message = self._wait(self._thread)
        if type(message) is not _End:
            line.make_room()
            return message
        self._ended = True
        if message.error is None:
            raise StopIteration
        try:
            raise message.error
        finally:
            # The error's traceback refers to this frame: without this, a cycle.
            del message

    def take(self, count: int) -> list[T]:
        """Return the next ``count`` items, fewer at the end.

        The thread does not wait for room meanwhile: to take turns with it at each item would cost
        more than small items do.

        Args:
          count: how many, 1 or more.
        """
        with self._line.widened(count):
            if self._thread is not None:
                self._line.let_fill(count, self._thread)
            return list(itertools.islice(self, count))

    @property
    def ended(self) -> bool:
        """Whether ``next`` has raised, or would raise, StopIteration for good."""
        return self._ended

    def close(self) -> None:
        """End the thread, give up the items that wait, and make ``next`` raise StopIteration.

        Blocks until the thread has ended and closed the source, but no longer than
        ``CLOSE_SECONDS``: a thread inside a slow loader is left to end by itself. May be called
        again, and from any thread.
        """
        self._ended = True
        self._line.stop()
        if self._thread is None:
            _close(self._iterator)
        elif self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self._line.discard()

    def _next_here(self) -> T:
        item = _END
        try:
            item = _draw(self._iterator, self._transform)
        finally:
            if item is _END:  # exhausted or failed: either way over, as it is with a thread
                self._ended = True
                _close(self._iterator)
        if item is _END:
            raise StopIteration
        return item

    def _wait(self, thread: threading.Thread) -> Any:
        # An interrupt between taking an item and making room would lose the wake-up call.
        self._line.make_room()
        started, logged = time.monotonic(), False
        while True:
            try:
                return self._line.items.get(timeout=SLICE_SECONDS)
            except queue.Empty:
                pass
            if not thread.is_alive():
                try:
                    return self._line.items.get(block=False)  # it may have ended just after
                except queue.Empty:
                    self._ended = True
                    raise RuntimeError(
                        f"the thread {thread.name}, which loads {self._description}, is gone "
                        "without having reached the end. A forked process has no copy of its "
                        "parent's threads: make the iterator in the process that uses it."
                    ) from None
            waited = time.monotonic() - started
            if waited >= SLOW_AFTER_SECONDS and not logged:
                logged = True
                _log.warning(
                    "Waiting for %s for %.0f s: the loader on the thread %s has not returned the "
                    "next batch.",
                    self._description,
                    waited,
                    thread.name,
                )


class _End:
    """The last message in a line: the source is exhausted, or failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Line:
    """What the thread and the consumer share; it refers to neither of them.

    Both queues are ``SimpleQueue``, whose ``put`` may be called from a finalizer that the garbage
    collector runs in the middle of another ``put``; a Condition would deadlock there.
    """

    def __init__(self, depth: int) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopped = False
        self._depth = depth
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def make_room(self) -> None:
        """Wake the thread, if it waits, after an item was taken."""
        # A token that lies there already will make the thread look again, after this taking.
        if self._wake.empty():
            self._wake.put(None)

    def wait_for_room(self) -> bool:
        """Block the thread until an item may be prepared; False when it should end instead."""
        while not self.stopped and self.items.qsize() >= self._depth:
            self._wake.get()
        return not self.stopped

    @contextlib.contextmanager
    def widened(self, count: int) -> Iterator[None]:
        """Let ``count`` more items be prepared for the length of a ``with`` block."""
        self._depth += count
        self.make_room()
        try:
            yield
        finally:
            self._depth -= count

    def let_fill(self, count: int, thread: threading.Thread) -> None:
        """Sleep until ``count`` items are there, the end is, or ``FILL_SECONDS`` are over.

        Small items are made faster than a thread that waits for each is woken up.
        """
        end = time.monotonic() + FILL_SECONDS
        while self.items.qsize() < count and not self.stopped and thread.is_alive():
            if time.monotonic() > end:
                return
            time.sleep(FILL_SLICE_SECONDS)

    def stop(self) -> None:
        """Ask the thread to end, and wake whoever waits on either side."""
        self.stopped = True
        self._wake.put(None)
        self.items.put(_End(None))

    def discard(self) -> None:
        """Give up the items that wait, which may hold device memory, but leave an end."""
        try:
            while True:
                self.items.get(block=False)
        except queue.Empty:
            self.items.put(_End(None))


class _Loader(threading.Thread):
    """The thread: it draws, transforms and queues until the end, and holds no Prefetcher."""

    def __init__(
        self, line: _Line, iterator: Iterator[Any], transform: Callable[[Any], Any]
    ) -> None:
        super().__init__(name=f"distrib-prefetch-{next(_thread_numbers)}", daemon=True)
        self.line = line
        self._work = (iterator, transform)
        # A `with jax.enable_x64(True):` around the loop is meant for what is loaded in it.
        self._settings = thread_settings()

    def run(self) -> None:
        """Fill the line, under the settings of JAX of the thread that made this one."""
        with with_settings(self._settings):
            self._fill()

    def _fill(self) -> None:
        line, (iterator, transform) = self.line, self._work
        del self._work  # so that the loader lives no longer than this frame
        position, error = 0, None
        try:
            while line.wait_for_room() and (item := _draw(iterator, transform)) is not _END:
                if not line.stopped:
                    line.items.put(item)
                # Else this frame would hold the item, on its device, while it waits for room.
                del item
                position += 1
        except BaseException as raised:  # whatever it is, it belongs to the consumer
            raised.add_note(f"Raised while item {position} was loaded on the thread {self.name}.")
            error = raised
        line.items.put(_End(error))
        del error
        try:
            _close(iterator)
        except BaseException:
            _log.warning("The loader on the thread %s failed to close.", self.name, exc_info=True)


def _draw(iterator: Iterator[Any], transform: Callable[[Any], Any]) -> Any:
    """Return the next item, transformed, or ``_END``."""
    try:
        item = next(iterator)
    except StopIteration:
        return _END
    try:
        return transform(item)
    except StopIteration as error:
        # It would pass for the end of the data.
        raise RuntimeError("the transform of a prefetched item raised StopIteration") from error


def _close(iterator: Iterator[Any]) -> None:
    close = getattr(iterator, "close", None)
    if callable(close):
        close()


@functools.cache
def _wait_for_threads_at_exit() -> None:
    # Called when the first thread starts and not on import: what is registered last runs first, and
    # the threads must have ended before JAX takes its devices down.
    atexit.register(_stop_all)


def _stop_all() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Loader)]
    for thread in threads:
        thread.line.stop()
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
