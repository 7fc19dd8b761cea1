"""One copy of a variable, as ``extended.update`` hands it to its function."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from distrib.values import IndexedSlices
from distrib.variables.changeable import Changeable


class Copies(Protocol):
    """The copies of variables, where they can be read and changed one by one."""

    def count(self, variable: Any) -> int:
        """Return how many calls of an update function there are for ``variable``."""
        ...

    def read(self, variable: Any, index: int) -> jax.Array:
        """Return a copy."""
        ...

    def change(self, variable: Any, index: int, kind: str, value: Any) -> jax.Array:
        """Change a copy by a value that fits, and return the new one."""
        ...

    def device(self, variable: Any, index: int) -> str:
        """Return the device string of a copy."""
        ...

    def select(self, leaf: Any, index: int) -> Any:
        """Return what belongs to a copy of an array or distributed value."""
        ...

    def results(self, trees: Sequence[Any], group: bool) -> Any:
        """Return what the calls returned as one tree of distributed values, or of tuples."""
        ...


class Component(Changeable):
    """One copy of a variable, on its device; assignments change this copy alone.

    It reads as an array, as the variable does.
    """

    def __init__(self, variable: Any, index: int, copies: Copies):
        self.variable = variable
        self._index = index
        self._copies = copies

    @property
    def name(self) -> str:
        """The name of the variable."""
        return self.variable.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.variable.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self.variable.dtype

    @property
    def device(self) -> str:
        """The device string of this copy; in a compiled step, for all of them, with index ``*``."""
        return self._copies.device(self.variable, self._index)

    def value(self) -> jax.Array:
        """Return this copy."""
        return self._copies.read(self.variable, self._index)

    def change(self, kind: str, value: Any) -> jax.Array:
        """Change this copy and return the new one."""
        if isinstance(value, IndexedSlices):
            self.variable.check_scatter(kind)
        if isinstance(value, Changeable):
            value = value.value()
        return self._copies.change(self.variable, self._index, kind, self.fitted(value))

    def __repr__(self) -> str:
        return f"<copy {self._index} of {self.variable!r}>"


jax.tree_util.register_pytree_node(
    Component,
    lambda component: ((component.value(),), None),
    lambda _, children: children[0],  # pyright: ignore[reportArgumentType]
)


class _Handed:
    """Which variable an array was handed out as a copy of, as long as the array lives."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def remember(self, variable: Any, copies: Sequence[jax.Array]) -> None:
        items = self._items
        for copy in copies:
            key = id(copy)
            gone = weakref.ref(copy, lambda _, key=key: items.pop(key, None))
            items[key] = (gone, weakref.ref(variable))

    def owner(self, value: Any) -> Any:
        item = self._items.get(id(value))
        return None if item is None or item[0]() is not value else item[1]()


_handed = _Handed()


def remember_copies(variable: Any, copies: Sequence[jax.Array]) -> None:
    """Remember that arrays are handed out as the copies of ``variable``."""
    _handed.remember(variable, copies)


def owner_of(value: Any) -> Any:
    """Return the variable of which ``value`` is, or was handed out as, a copy; None of others."""
    return value.variable if isinstance(value, Component) else _handed.owner(value)
