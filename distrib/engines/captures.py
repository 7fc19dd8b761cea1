"""The objects with variables that a function finds by name: its globals and its closure.

A program is made of the variables that the function found when it was traced. If the name ``state``
means another object at the next call, the program must be made anew, or it would go on training the
old one.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from distrib.variables import HoldsVariables, Variable


class Capture:
    """A name that a function looks up, and the object that it found.

    Args:
      look_up: returns what the name means now.
      value: what it meant when the function was traced; held weakly if it can be.
    """

    __slots__ = ("_look_up", "_ref")

    def __init__(self, look_up: Callable[[], Any], value: Any):
        self._look_up = look_up
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            # Dictionaries, lists and tuples take no weak references. Their identity has to do, and
            # is enough while their variables live: the program goes when one of those dies.
            identity = id(value)
            self._ref = lambda: look_up() if id(look_up()) == identity else None

    def holds(self) -> bool:
        """Tell whether the name still means the same object."""
        return self._look_up() is self._ref()


def captures(fn: Callable[..., Any]) -> list[Capture]:
    """Return the names by which ``fn``, or a function of its module, finds variables."""
    inner = getattr(fn, "__func__", fn)
    return list(_captures(inner, set())) if isinstance(inner, types.FunctionType) else []


def _captures(fn: types.FunctionType, seen: set[int]) -> Iterator[Capture]:
    if id(fn) in seen:
        return
    seen.add(id(fn))
    for look_up, value in _names(fn):
        if isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__:
            yield from _captures(value, seen)
        elif _holds_variables(value):
            yield Capture(look_up, value)


def _names(fn: types.FunctionType) -> Iterator[tuple[Callable[[], Any], Any]]:
    module = fn.__globals__
    for name in _global_names(fn.__code__):
        if name in module:
            yield lambda name=name: module.get(name), module[name]
    for cell in fn.__closure__ or ():
        try:
            yield lambda cell=cell: cell.cell_contents, cell.cell_contents
        except ValueError:
            continue  # The cell is empty: the enclosing function has not assigned the name yet.


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _holds_variables(value: Any) -> bool:
    if isinstance(value, Variable | HoldsVariables):
        return True
    if not isinstance(value, dict | list | tuple):
        return False
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Variable))
    return any(isinstance(leaf, Variable | HoldsVariables) for leaf in leaves)
