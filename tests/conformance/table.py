"""The table of conformance cases: small programs, and what tf.distribute gave when it ran them.

A case is a function that returns a tree of plain values, together with the tree that must come
out. Numbers are those of tf.distribute 2.21. A field where ours differs stands in ``differs``, one
that is left out in ``omits``, each with the reason; a test compares both with the file of
measurements where that file is at hand, so that neither a wrong number nor a silent gap can stay.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distrib


@dataclass(frozen=True)
class Raises:
    """An expected error: its built-in kind, and a pattern that its message contains."""

    kind: type[Exception]
    match: str


@dataclass(frozen=True)
class Raised:
    """An error that came out of a part of a program."""

    error: Exception


@dataclass(frozen=True)
class Case:
    """A program and what it must give."""

    program: Callable[[], Any]
    expected: Any
    differs: Mapping[str, str] = field(default_factory=dict)
    omits: Mapping[str, str] = field(default_factory=dict)
    eagerly: str = ""
    eager_only: Mapping[str, str] = field(default_factory=dict)

    def expected_of(self, *, eager: bool) -> Any:
        """Return what one engine must give: the compiled one not the fields that it cannot."""
        if eager or not self.eager_only:
            return self.expected
        return {k: v for k, v in self.expected.items() if k not in self.eager_only}

    def result_of(self, *, eager: bool) -> Any:
        """Run the program and return those fields."""
        result = plain(self.program())
        if eager or not self.eager_only:
            return result
        return {k: v for k, v in result.items() if k not in self.eager_only}


CASES: dict[str, Case] = {}


def case(
    name: str,
    expected: Any,
    *,
    differs: Mapping[str, str] | None = None,
    omits: Mapping[str, str] | None = None,
    eagerly: str = "",
    eager_only: Mapping[str, str] | None = None,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter the decorated program into the table.

    Args:
      name: the id of the case in the file of measurements.
      expected: what the program must return, in the form of :func:`plain`, or a :class:`Raises`.
      differs: the fields in which that is not what tf.distribute gave, and why.
      omits: the fields of the measurement that the program does not produce, and why.
      eagerly: why only the threads engine can run the program; empty if both can.
      eager_only: the fields of the result that only the threads engine can give, and why.
    """

    def enter(program: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(
            program,
            expected,
            dict(differs or {}),
            dict(omits or {}),
            eagerly,
            dict(eager_only or {}),
        )
        return program

    return enter


# What programs are made of.


def mirrored(size: int = 2, **kwargs: Any) -> distrib.MirroredStrategy:
    """Return a mirrored strategy over the first CPU devices."""
    return distrib.MirroredStrategy([f"CPU:{i}" for i in range(size)], **kwargs)


def central() -> distrib.CentralStorageStrategy:
    """Return a central storage strategy of two replicas, its variables on CPU:0."""
    return distrib.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


def variable(strategy: distrib.Strategy, value: Any = 10.0, **kwargs: Any) -> distrib.Variable:
    """Create a variable in the strategy's scope."""
    with strategy.scope():
        return distrib.Variable(value, **kwargs)


def values(strategy: distrib.Strategy, fn: Callable[[int], Any]) -> Any:
    """Make a per-replica value of ``fn(replica id)``."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: fn(context.replica_id_in_sync_group)
    )


def context() -> distrib.ReplicaContext:
    """Return the context of the replica whose code runs."""
    current = distrib.get_replica_context()
    assert current is not None
    return current


def rid() -> jax.Array:
    """Return the replica's id as a float, traced."""
    return jnp.asarray(context().replica_id_in_sync_group, jnp.float32)


def scope_facts(strategy: distrib.Strategy) -> dict[str, bool]:
    """Return what the four questions about the context answer."""
    return {
        "has": distrib.has_strategy(),
        "same": distrib.get_strategy() is strategy,
        "rc_none": distrib.get_replica_context() is None,
        "cross": distrib.in_cross_replica_context(),
    }


def outcome(fn: Callable[[], Any]) -> Any:
    """Return what ``fn`` returns, or the error that it raises."""
    try:
        return plain(fn())
    except Exception as error:
        return Raised(error)


def per_replica(*components: Any) -> dict[str, Any]:
    """Return the plain form of a per-replica value."""
    return {"type": "PerReplica", "per_replica": list(components)}


def mirrored_value(*copies: Any) -> dict[str, Any]:
    """Return the plain form of a mirrored value."""
    return {"type": "Mirrored", "per_replica": list(copies)}


def plain(value: Any) -> Any:
    """Return a tree of dicts, lists, numbers and strings in the form of the measurements."""
    if isinstance(value, distrib.DistributedValues):
        components = [plain(component) for component in value.values]
        return {"type": type(value).__name__, "per_replica": components}
    if isinstance(value, distrib.Variable):
        return plain(value.numpy())
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return plain(np.asarray(value).tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value


# Comparing.


def mismatches(actual: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each place where a result is not what was expected."""
    if isinstance(expected, Raises):
        if not isinstance(actual, Raised):
            yield f"{path}: expected {expected.kind.__name__}, got {actual!r}"
        elif not isinstance(actual.error, expected.kind):
            yield f"{path}: expected {expected.kind.__name__}, got {actual.error!r}"
        elif not re.search(expected.match, str(actual.error), re.DOTALL):
            yield f"{path}: {expected.match!r} is not in {str(actual.error)!r}"
    elif isinstance(expected, dict) and isinstance(actual, dict):
        for key in expected.keys() | actual.keys():
            yield from mismatches(
                actual.get(key, "absent"), expected.get(key, "absent"), joined(path, key)
            )
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for i, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            yield from mismatches(got, wanted, joined(path, i))
    elif not same_leaf(actual, expected):
        yield f"{path}: expected {expected!r}, got {actual!r}"


def same_leaf(a: Any, b: Any) -> bool:
    """Tell whether two numbers, strings, booleans or empty trees are the same."""
    numbers = [isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b)]
    if all(numbers):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return type(a) is type(b) and a == b


def joined(path: str, key: Any) -> str:
    """Return the path of an item."""
    return f"{path}.{key}" if path else str(key)


def disagreements(expected: Any, measured: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield ``("differs" or "omits", path)`` where the table is not what was measured."""
    if isinstance(measured, dict) and "no_error" in measured:
        measured = measured["no_error"]
    if isinstance(measured, dict) and "error" in measured:
        if not isinstance(expected, Raises):
            yield "differs", path
    elif isinstance(measured, dict) and isinstance(expected, dict):
        for key in measured.keys() - expected.keys():
            yield "omits", joined(path, key)
        for key in expected.keys() - measured.keys():
            yield "differs", joined(path, key)
        for key in expected.keys() & measured.keys():
            yield from disagreements(expected[key], measured[key], joined(path, key))
    elif (
        isinstance(measured, list) and isinstance(expected, list) and len(measured) == len(expected)
    ):
        for i, (mine, theirs) in enumerate(zip(expected, measured, strict=True)):
            yield from disagreements(mine, theirs, joined(path, i))
    elif isinstance(expected, Raises) or not same_leaf(expected, measured):
        yield "differs", path
