"""The programs that have been made; none keeps its function or its variables alive."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from distrib.engines.captures import captures
from distrib.variables import Variable

WARN_AT = 5
"""A function compiled this often is probably compiled at every step."""


class Entries(dict[Any, Any]):
    """The compiled steps of one function by signature; a dictionary that takes weak references.

    Attributes:
      has_created: whether the function has created variables.
    """

    __slots__ = ("__weakref__", "has_created")

    def __init__(self) -> None:
        super().__init__()
        self.has_created = False


class _ByIdentity:
    """Values by object, each until its object dies.

    A WeakKeyDictionary would compare objects by ``==``, which for a variable is by element.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def setdefault(self, key: Any, default: Any) -> Any:
        item = self._items.get(id(key))
        if item is None:
            items, number = self._items, id(key)
            item = items[number] = (weakref.ref(key, lambda _: items.pop(number, None)), default)
        return item[1]


class CompileCache:
    """Compiled steps by function and signature.

    A function's entries go when the function does. An entry goes when a variable that it uses does,
    and is not used any more when a name by which the function found one means another object.
    """

    def __init__(self) -> None:
        self._by_function = _ByIdentity()
        self._by_code: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def find(self, fn: Callable[..., Any], signature: Any) -> Any:
        """Return the compiled step, or None."""
        step = self._entries(fn).get(signature)
        if step is not None and all(capture.holds() for capture in step.captures):
            return step
        return None

    def add(
        self,
        fn: Callable[..., Any],
        signature: Any,
        step: Any,
        variables: Sequence[Variable],
        objects: Sequence[Any] = (),
    ) -> None:
        """Remember a compiled step until its function or one of ``variables`` dies.

        Args:
          fn: the function.
          signature: what of the call the step depends on.
          step: the compiled step.
          variables: the variables that it reads and changes.
          objects: the Python objects among its arguments, in which it may have found them.
        """
        entries = self._entries(fn)
        entries[signature] = step
        held_weakly = weakref.ref(entries)

        def forget(_: Any) -> None:
            remaining, dead = held_weakly(), step_held_weakly()
            # The step may be gone already, or another made for its signature since.
            if remaining is not None and dead is not None and remaining.get(signature) is dead:
                del remaining[signature]

        step_held_weakly = weakref.ref(step)
        step.watches = [weakref.ref(v, forget) for v in variables]
        step.captures = captures(fn, objects)
        self._count(fn, signature)

    def has_created(self, fn: Callable[..., Any]) -> bool:
        """Tell whether the function has created variables in a step that got to its end."""
        return self._entries(fn).has_created

    def remember_created(self, fn: Callable[..., Any]) -> None:
        """Remember that the function has created variables."""
        self._entries(fn).has_created = True

    def _entries(self, fn: Callable[..., Any]) -> Entries:
        try:
            if isinstance(fn, types.MethodType):
                # A bound method is a new object at each look-up; what lasts is the instance.
                methods = self._by_function.setdefault(fn.__self__, {})
                return methods.setdefault(fn.__func__, Entries())
            return self._by_function.setdefault(fn, Entries())
        except TypeError:
            raise TypeError(
                f"strategy.run got {fn!r} of type {type(fn).__name__}, which cannot be remembered: "
                "it, or the object it is a method of, is not hashable or takes no weak references. "
                "Wrap it in a function."
            ) from None

    def _count(self, fn: Callable[..., Any], signature: Any) -> None:
        code = _code(fn)
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


def _code(fn: Any) -> types.CodeType | None:
    """Return the code that runs when ``fn`` is called, also of a partial or a callable object."""
    fn = getattr(fn, "func", fn)
    code = getattr(fn, "__code__", None)
    return code or getattr(vars(type(fn)).get("__call__"), "__code__", None)


def what_changed(signatures: Sequence[Any]) -> str:
    """Say how the last signature of a function differs from the one before.

    Args:
      signatures: ``(structure, leaf signatures, objects, *options)`` of each compilation, in
        order.
    """
    before, after = signatures[-2], signatures[-1]
    if after in signatures[:-1]:
        return (
            "It had been compiled for such arguments before: it is a new function object each "
            "time, made in a loop or by a lambda, or it finds another object with variables each "
            "time. Define it once, and pass the object as an argument."
        )
    if before[0] != after[0]:
        return f"The structure of its arguments changed from {before[0]} to {after[0]}."
    if before[3:] != after[3:]:
        return (
            "Its RunOptions changed, checks of its numbers were turned on or off, or a setting of "
            "JAX has changed."
        )
    changes = [
        f"argument leaf {i} was {_shown(old)} and is {_shown(new)}"
        for i, (old, new) in enumerate(zip(before[1], after[1], strict=True))
        if old != new
    ]
    changed = "; ".join(changes) or "An object or NNX module among its arguments changed"
    return (
        f"{changed}. Keep shapes and dtypes the same (pad, or drop the last batch) to compile once."
    )


def _shown(leaf: Any) -> str:
    kind, key = leaf
    if isinstance(key, tuple):
        return f"{kind.value} {', '.join(str(getattr(part, 'value', part)) for part in key[:3])}"
    return f"{kind.value} {getattr(key, '__name__', repr(key))}"
