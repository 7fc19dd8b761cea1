"""The programs that have been made, for each function; none keeps its function or variables alive."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from distrib.variables import Variable

WARN_AT = 5
"""A function compiled this often is probably compiled at every step."""


class CompileCache:
    """Compiled steps by function and signature.

    A function's entries go when the function does; an entry goes when a variable that it uses does, so
    that a function whose global ``state`` is made anew is compiled anew.
    """

    def __init__(self) -> None:
        self._by_function: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._by_code: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def entries(self, fn: Callable[..., Any]) -> dict[Any, Any]:
        """Return the entries of ``fn`` by signature: a mutable mapping, to be filled."""
        if isinstance(fn, types.MethodType):
            # A bound method is a new object at each look-up; what lasts is the instance.
            of_instance = self._mapping(fn.__self__)
            return of_instance.setdefault(fn.__func__, {})
        return self._mapping(fn)

    def _mapping(self, key: Any) -> dict[Any, Any]:
        try:
            return self._by_function.setdefault(key, {})
        except TypeError:
            raise TypeError(
                f"strategy.run got {key!r} of type {type(key).__name__}, which cannot be remembered: "
                "it is not hashable, or takes no weak references. Wrap it in a function."
            ) from None

    def add(
        self, fn: Callable[..., Any], signature: Any, entry: Any, variables: Sequence[Variable]
    ) -> None:
        """Remember a compiled step until its function or one of ``variables`` dies."""
        entries = self.entries(fn)
        entries[signature] = entry
        entries_ref = _WeakDict(entries)

        def forget(_: Any) -> None:
            entries_ref.pop(signature)

        entry.watches = [weakref.ref(v, forget) for v in variables]
        self._count(fn, signature)

    def _count(self, fn: Callable[..., Any], signature: Any) -> None:
        code = getattr(fn, "__code__", None)
        if code is None:
            return
        signatures = self._by_code.setdefault(code, [])
        signatures.append(signature)
        if len(signatures) == WARN_AT:
            logging.warning(
                "distrib: %s (%s:%d) has been compiled %d times. %s",
                getattr(fn, "__qualname__", fn),
                code.co_filename,
                code.co_firstlineno,
                WARN_AT,
                what_changed(signatures),
            )


class _WeakDict:
    """The mapping of a function's entries, held by the callbacks of variables that may outlive it.

    An entry holds its callbacks; a callback that held the mapping would close a cycle, which only the
    garbage collector could take apart.
    """

    def __init__(self, entries: dict[Any, Any]):
        self._entries = entries

    def pop(self, signature: Any) -> None:
        self._entries.pop(signature, None)


def what_changed(signatures: Sequence[Any]) -> str:
    """Say how the last signature of a function differs from the one before.

    Args:
      signatures: ``(structure, leaf signatures, objects)`` of each compilation, in order.
    """
    before, after = signatures[-2], signatures[-1]
    if before == after:
        return (
            "Its arguments did not change: it is a new function object each time, made in a loop or by a lambda. "
            "Define it once, outside of the loop."
        )
    if before[0] != after[0]:
        return f"The structure of its arguments changed from {before[0]} to {after[0]}."
    changes = [
        f"argument leaf {i} was {_shown(old)} and is {_shown(new)}"
        for i, (old, new) in enumerate(zip(before[1], after[1], strict=True))
        if old != new
    ]
    changed = "; ".join(changes) or "An object or NNX module among its arguments changed"
    return f"{changed}. Keep shapes and dtypes the same (pad, or drop the last batch) to compile once."


def _shown(leaf: Any) -> str:
    kind, key = leaf
    if isinstance(key, tuple):
        return f"{kind.value} {', '.join(str(getattr(part, 'value', part)) for part in key)}"
    return f"{kind.value} {getattr(key, '__name__', repr(key))}"
