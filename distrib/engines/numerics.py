"""Whether the numbers of a step are finite, and on which replica they first were not.

Under ``distrib.config.enable_check_numerics()`` each replica counts, beside what the step computes,
the elements that are NaN or infinite: in its arguments and in the variables before the step, in
what it brings to the other replicas, in the new values of variables and in what it returns. The
counts are looked at before anything is stored.
"""

from __future__ import annotations

import collections
import enum
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.engines.signature import is_argument
from distrib.errors import NonFiniteError
from distrib.platform import leaves_with_paths, trace_token, user_location
from distrib.values import DistributedValues, is_slices
from distrib.variables import Variable

MOST_LINES = 10
"""A message lists this many values; when one is NaN, soon all are."""


class Role(enum.Enum):
    """What it means that a value is not finite."""

    GIVEN = "given"
    """A step may be given such a value, a mask for one. It is the cause, if there is a fault."""
    BROUGHT = "brought"
    """A replica brings it to the others, where its place stays its own. It leads to a fault."""
    FAULT = "fault"
    """It must not be."""


@dataclass(frozen=True)
class Check:
    """One value of a step that is looked at, named for messages, and what it is."""

    what: str
    role: Role


class Numerics:
    """The values of one replica that are looked at, with their counts.

    Args:
      local: from a distributed value to what this replica holds of it.
      has_examples: False for a replica that has no example at all. The mean over nothing is NaN,
        counts for nothing, and is no fault.
    """

    def __init__(self, local: Callable[[DistributedValues], Any], *, has_examples: bool = True):
        self._local = local
        self._has_examples = has_examples
        self._token = trace_token()
        self._checks: list[Check] = []
        self._counts: list[Any] = []

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of the step."""
        for path, leaf in leaves_with_paths({"args": args, "kwargs": kwargs}, is_leaf=_end):
            self._add(f"argument {path}", leaf, Role.GIVEN)

    def held(self, names: Iterable[str], values: Iterable[Any]) -> None:
        """Look at values that variables had before the step."""
        for name, value in zip(names, values, strict=True):
            self._add(f"variable {name}, before the step,", value, Role.GIVEN)

    def brought(self, what: str, tree: Any) -> None:
        """Look at what this replica brings to an all-gather, or assigns to a variable of all."""
        line = _users_line()
        for path, leaf in leaves_with_paths(tree):
            self._add(_at(what, path) + line, leaf, Role.BROUGHT)

    def combined(self, what: str, tree: Any, names: Sequence[str] = ()) -> None:
        """Look at what this replica adds to the others' values.

        Args:
          what: the operation.
          tree: the operand.
          names: a name for each leaf, if that says more than its path in the operation.
        """
        found = leaves_with_paths(tree, is_leaf=is_slices)
        shown = names or [_at(what, path) for path, _ in found]
        line = _users_line()
        for name, (_, leaf) in zip(shown, found, strict=True):
            self._add(name + line, leaf, Role.FAULT, counts_here=self._has_examples)

    def changed(self, paths: Sequence[str], olds: Sequence[Any], news: dict[int, Any]) -> None:
        """Look at the new values of variables of NNX objects, by position."""
        for position, new in news.items():
            what = f"the new value of NNX variable {paths[position]}"
            self._add(what, new, Role.FAULT, old=olds[position])

    def finish(
        self,
        before: Sequence[tuple[Variable, Any]],
        written: Sequence[tuple[Variable, Any]],
        result: Any,
    ) -> tuple[tuple[Check, ...], jax.Array]:
        """Look at the variables and at what the step returns.

        Args:
          before: the variables that the step has touched, with their old values.
          written: those that it changes, with their new values. An infinity that was there before
            is no fault: some optimizers start with one.
          result: what the function of the step returned.

        Returns:
          What was looked at, and int32 ``[check, 3]``: how many elements are NaN, infinite, and
          all.
        """
        self.held([v.name for v, _ in before], [value for _, value in before])
        olds = {id(v): value for v, value in before}
        for v, new in written:
            what = f"the new value of variable {v.name}"
            self._add(what, new, Role.FAULT, old=olds.get(id(v)))
        for path, leaf in leaves_with_paths({"output": result}, is_leaf=_end):
            self._add(path, leaf, Role.FAULT, counts_here=self._has_examples)
        nothing = jnp.zeros((0, 3), jnp.int32)
        return tuple(self._checks), jnp.stack(self._counts) if self._counts else nothing

    def _add(
        self, what: str, value: Any, role: Role, *, old: Any = None, counts_here: bool = True
    ) -> None:
        if is_argument(value):  # A variable or NNX object: its values are looked at by themselves.
            return
        if isinstance(value, DistributedValues):
            value = self._local(value)
        if is_slices(value):
            value = value.values
        dtype = getattr(value, "dtype", None)
        # A value of an inner transformation, such as the body of a loop, cannot leave it.
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or trace_token() != self._token:
            return
        self._checks.append(Check(what, role))
        if not counts_here:
            # A row all the same: the replicas of one program have equally many.
            self._counts.append(jnp.zeros(3, jnp.int32))
            return
        infinite = jnp.isinf(value)
        if old is not None:
            infinite &= value != old
        nan = jnp.isnan(value).sum(dtype=jnp.int32)
        size = jnp.asarray(np.size(value), jnp.int32)
        self._counts.append(jnp.stack([nan, infinite.sum(dtype=jnp.int32), size]))


def _end(leaf: Any) -> bool:
    return isinstance(leaf, DistributedValues) or is_argument(leaf)


def _at(what: str, path: str) -> str:
    return what if path == "(root)" else f"{what} at {path}"


def _users_line() -> str:
    line = user_location(inspect.currentframe())
    return f" ({line})" if line else ""


def require_finite(found: Sequence[tuple[Sequence[Check], Any]], which: str = "A step") -> None:
    """Raise if one of the values that must be finite is not.

    Args:
      found: for each replica what was looked at, and int ``[check, 3]``: how many elements are NaN,
        infinite, and all.
      which: the step, for the message.

    Raises:
      NonFiniteError: naming what came in so, then what the step made of it, and the replicas.
    """
    bad: dict[tuple[Check, int], list[list[int]]] = {}
    order: dict[tuple[Check, int], int] = {}
    for replica, (checks, counts) in enumerate(found):
        # Replicas that run eagerly may look at different values; of one name, in their order.
        occurrences: collections.Counter[Check] = collections.Counter()
        rows = np.asarray(counts).tolist()
        for position, (check, (nan, infinite, size)) in enumerate(zip(checks, rows, strict=True)):
            occurrences[check] += 1
            if nan or infinite:
                key = check, occurrences[check]
                order.setdefault(key, position)
                bad.setdefault(key, []).append([replica, nan, infinite, size])
    if not any(check.role is Role.FAULT for check, _ in bad):
        return
    # What came in first, then what was made of it, as the step went.
    listed = sorted(bad, key=lambda key: (key[0].role is not Role.GIVEN, order[key]))
    lines = [f"{key[0].what} {_where(bad[key])}" for key in listed]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    came_in = listed[0][0].role is Role.GIVEN
    origin = "They came in with" if came_in else "They arose in the step, at or before"
    raise NonFiniteError(
        f"{which} gave values that are not finite, and no variable was changed. "
        f"{origin} the first of these:\n  " + "\n  ".join(lines)
    )


def _where(rows: Sequence[Sequence[int]]) -> str:
    """Say on which replicas how many elements are not finite.

    >>> _where([[0, 1, 0, 6], [1, 1, 0, 6], [2, 0, 6, 6]])
    'on replicas 0, 1: 1 NaN of 6; on replica 2: 6 infinite of 6'
    """
    replicas_of: dict[tuple[int, ...], list[int]] = {}
    for replica, *counts in rows:
        replicas_of.setdefault(tuple(counts), []).append(replica)
    parts = []
    for (nan, infinite, size), replicas in replicas_of.items():
        kinds = [
            f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count
        ]
        named = f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
        parts.append(f"on {named}: {' and '.join(kinds)} of {size}")
    return "; ".join(parts)
