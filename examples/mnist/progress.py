"""A progress bar over the batches of an epoch; a few plain lines where there is no terminal."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from absl import logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 10.0


def track(batches: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield ``batches``, of which there are ``total``, and show how far it is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _lines(batches, total, description)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        yield from bar.track(batches, total=total, description=description)


def _lines(batches: Iterable[T], total: int, description: str) -> Iterator[T]:
    said = time.monotonic()
    for done, batch in enumerate(batches):
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            logging.info("%s: %d of %d batches", description, done, total)
        yield batch
