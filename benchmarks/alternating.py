"""Time two ways of doing one thing in alternation, so that a busy machine slows both alike.

A round times ``calls`` calls of the one and then of the other; the next round begins with the
other. Three ratios, ours over the reference's, come out of the rounds: of the medians, of the
minima, and the median of each round's own ratio. The last one is the most robust where the load of
the machine changes in the course of a run, and is the one that targets are held against.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """The times of one comparison.

    Attributes:
      name: what was compared.
      ours: seconds a call, in each round.
      reference: the same of the reference; empty where there is none to compare with.
      most: the ratio may be at most this; None for no such target.
      difference_most: ours minus the reference may be at most so many seconds; None likewise.
    """

    name: str
    ours: Sequence[float]
    reference: Sequence[float]
    most: float | None = None
    difference_most: float | None = None

    @property
    def ratio(self) -> float:
        """The median over the rounds of ours over the reference's."""
        pairs = zip(self.ours, self.reference, strict=True)
        return statistics.median(mine / other for mine, other in pairs)

    @property
    def ratio_of_medians(self) -> float:
        """The median of ours over the reference's."""
        return statistics.median(self.ours) / statistics.median(self.reference)

    @property
    def ratio_of_minima(self) -> float:
        """The fastest round of ours over the reference's."""
        return min(self.ours) / min(self.reference)

    @property
    def difference(self) -> float:
        """The median over the rounds of ours minus the reference's, in seconds."""
        pairs = zip(self.ours, self.reference, strict=True)
        return statistics.median(mine - other for mine, other in pairs)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none."""
        if not self.reference:
            return None
        if self.difference_most is not None:
            return self.difference <= self.difference_most
        return None if self.most is None else self.ratio <= self.most

    def line(self) -> str:
        """Return one line for people."""
        head = f"{self.name}: ours {_spread(self.ours)}"
        if not self.reference:
            return f"{head}, no reference"
        text = (
            f"{head}, reference {_spread(self.reference)}, ratio {self.ratio:.3f} "
            f"(medians {self.ratio_of_medians:.3f}, minima {self.ratio_of_minima:.3f})"
        )
        if self.difference_most is not None:
            text += (
                f", difference {_time(self.difference)} (target at most "
                f"{_time(self.difference_most)}: {_verdict(self.met)})"
            )
        elif self.most is not None:
            text += f" (target at most {self.most:.2f}: {_verdict(self.met)})"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` writes; times in seconds."""
        fields: dict[str, Any] = {
            "name": self.name,
            "rounds": len(self.ours),
            "ours": {"min": min(self.ours), "median": statistics.median(self.ours)},
        }
        if self.reference:
            fields |= {
                "reference": {
                    "min": min(self.reference),
                    "median": statistics.median(self.reference),
                },
                "ratio": self.ratio,
                "ratio_of_medians": self.ratio_of_medians,
                "ratio_of_minima": self.ratio_of_minima,
                "difference": self.difference,
                "target_ratio": self.most,
                "target_difference": self.difference_most,
                "met": self.met,
            }
        return fields


def alternate(
    name: str,
    ours: Callable[[int], float],
    reference: Callable[[int], float],
    *,
    rounds: int,
    calls: int,
    most: float | None = None,
    difference_most: float | None = None,
) -> Comparison:
    """Time ``ours`` and ``reference`` in alternation.

    Args:
      name: what is compared.
      ours: makes so many calls and returns the seconds they took; see :func:`timed`.
      reference: the same.
      rounds: how often each is timed.
      calls: how many calls make one time.
      most: the target for the ratio.
      difference_most: the target for the difference, in seconds.
    """
    # A first call of each compiles, and fills caches.
    for run in (ours, reference):
        run(max(1, calls // 10))
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for is_ours in (True, False) if number % 2 == 0 else (False, True):
            times[is_ours].append((ours if is_ours else reference)(calls) / calls)
    return Comparison(name, times[True], times[False], most, difference_most)


def timed(
    call: Callable[[], Any], wait: Callable[[Any], Any], *, each: bool = False
) -> Callable[[int], float]:
    """Return a function that makes so many calls and returns the seconds they took.

    Args:
      call: what is timed; it may return before its work is done, as JAX's functions do.
      wait: blocks until the result of ``call`` is there.
      each: whether to measure the caller's thread alone: the processor time that the call takes
        there, with a wait after each that does not count. Otherwise the wait comes after the last
        call and counts, and the time is what a loop takes.
    """

    def pipelined(calls: int) -> float:
        result = None
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        return time.perf_counter() - start

    def alone(calls: int) -> float:
        total = 0.0
        for _ in range(calls):
            # Not the wall clock: on a busy machine the thread may wait for a core.
            start = time.thread_time()
            result = call()
            total += time.thread_time() - start
            wait(result)
        return total

    return alone if each else pipelined


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="write the results to this file, too")
    made.add_argument(
        "--quick", action="store_true", help="few calls: to see that it runs, not how fast"
    )
    return made


def report(results: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Write results, as :meth:`Comparison.as_json` makes them, to ``path`` if one is given."""
    if path is not None:
        path.write_text(json.dumps(list(results), indent=2) + "\n")


def _spread(times: Sequence[float]) -> str:
    return f"{_time(statistics.median(times))} (min {_time(min(times))})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if abs(seconds) < 1e-2 else f"{seconds:,.3f} s"


def _verdict(met: bool | None) -> str:
    return "met" if met else "MISSED"
