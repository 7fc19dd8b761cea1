"""Iterables and iterators of ready-made batches as sources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from distrib.errors import InputError
from distrib.input.host_arrays import host_batch


class IterableSource:
    """Batches of something that gives a new iterator each time: a list, a loader, a dataset.

    Args:
      make_iterator: starts an epoch.
      kind: what it is, for messages.
      description: a phrase for messages.
      convert: applied to each batch before its leaves become NumPy arrays.
    """

    one_shot = False

    def __init__(
        self,
        make_iterator: Callable[[], Iterator[Any]],
        *,
        kind: str,
        description: str,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        """Keep the parts; no iterator is made yet."""
        self.kind = kind
        self._make_iterator = make_iterator
        self._description = description
        self._convert = convert
        self._most_batches = 0

    def describe(self) -> str:
        """Return the phrase for messages."""
        return self._description

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch.

        Raises:
          InputError: from the iterator, if a leaf is not an array, or if nothing comes where an
            earlier epoch gave batches.
        """
        # The iterator is made here rather than at the first batch, so that what is wrong with the
        # dataset as a whole shows where the loop begins.
        return self._batches(self._make_iterator())

    def first(self) -> Any:
        """Return the first batch of a new iterator, or None."""
        return next(iter(self), None)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        count = 0
        try:
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                if self._convert is not None:
                    batch = self._convert(batch)
                yield _checked(batch, count, self.describe())
                count += 1
                self._most_batches = max(self._most_batches, count)
        finally:
            _close(iterator)
        if not count and self._most_batches:
            # It gives "new" iterators over something that is used up, as a class whose __iter__
            # returns a stored generator does: an epoch of nothing would pass for training.
            raise InputError(
                f"{self.describe()} gave {self._most_batches} batches in an earlier epoch and none "
                "in this one: make its __iter__ start again from the beginning."
            )


class OneShotSource:
    """Batches of an iterator or generator, which cannot start again.

    Each ``iter()`` goes on where the last one stopped; dropping what ``iter()`` returned does not
    close the iterator.

    Args:
      iterator: what the user passed.
      description: a phrase for messages.
    """

    kind = "iterator"
    one_shot = True

    def __init__(self, iterator: Iterator[Any], description: str) -> None:
        """Keep the iterator; nothing is drawn yet."""
        self._iterator = iterator
        self._description = description
        self._count = 0
        self._used_up = False
        # A prefetch thread that was left behind in a slow loader may still be inside next().
        self._lock = threading.Lock()

    def describe(self) -> str:
        """Return the phrase for messages."""
        return self._description

    def __iter__(self) -> Iterator[Any]:
        """Go on with the batches that are left.

        Raises:
          InputError: if the iterator is used up; also from the iterator, if a leaf is not an array.
        """
        if self._used_up:
            raise InputError(
                f"{self.describe()} is used up after {self._count} batches and cannot start again: "
                "pass something that can be iterated anew for each epoch (a list, a loader, an "
                "object whose __iter__ is the generator function), or distribute a new one."
            )
        return self._remaining()

    def first(self) -> Any:
        """Raise: there is no first batch that the next epoch would not miss.

        Raises:
          InputError: always.
        """
        raise InputError(
            f"element_spec would use up the first element of {self.describe()}, which can be read "
            "once only."
        )

    def _remaining(self) -> Iterator[Any]:
        while True:
            with self._lock:
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    self._used_up = True
                    return
                position = self._count
                self._count += 1
            yield _checked(batch, position, self.describe())


def _checked(batch: Any, position: int, description: str) -> Any:
    try:
        return host_batch(batch)
    except InputError as error:
        raise InputError(f"batch {position} of {description}: {error}") from error


def _close(iterator: Iterator[Any]) -> None:
    close = getattr(iterator, "close", None)
    if callable(close):
        close()
