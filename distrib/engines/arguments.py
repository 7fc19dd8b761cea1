"""The arguments of one call, taken apart into what enters a program and what decides which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from distrib.engines.nnx_objects import NnxState, is_nnx_object, take_apart
from distrib.engines.signature import Kind, is_argument, leaf_key


class Arguments:
    """The arguments of one call.

    Attributes:
      treedef: their structure.
      leaves: their leaves: arrays, numbers, per-replica values and Python objects.
      keys: for each leaf, its kind and what of it the program depends on.
      arrays: the leaves that enter the program.
      nnx: the state of the NNX objects among the leaves, if there are any.
    """

    __slots__ = ("arrays", "keys", "leaves", "nnx", "treedef")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        self.leaves, self.treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=is_argument)
        objects = [leaf for leaf in self.leaves if is_nnx_object(leaf)]
        self.nnx: NnxState | None = take_apart(objects) if objects else None
        if objects:
            self.keys = tuple(
                (Kind.OBJECT, None) if is_nnx_object(leaf) else leaf_key(leaf)
                for leaf in self.leaves
            )
        else:
            self.keys = tuple(map(leaf_key, self.leaves))
        self.arrays = [
            leaf
            for leaf, (kind, _) in zip(self.leaves, self.keys, strict=True)
            if kind is not Kind.OBJECT
        ]

    @property
    def key(self) -> Any:
        """What of the arguments decides which program serves them; hashable."""
        return (self.treedef, self.keys, self.nnx.key() if self.nnx else None)

    @property
    def array_keys(self) -> list[tuple[Kind, Any]]:
        """The keys of :attr:`arrays`."""
        return [key for key in self.keys if key[0] is not Kind.OBJECT]

    @property
    def objects(self) -> list[Any]:
        """The Python objects, which are part of the program."""
        pairs = zip(self.leaves, self.keys, strict=True)
        return [leaf for leaf, (kind, _) in pairs if kind is Kind.OBJECT]

    @property
    def are_uneven(self) -> bool:
        """Whether the replicas see different shapes."""
        return any(kind is Kind.UNEVEN for kind, _ in self.keys)

    @property
    def original(self) -> tuple[tuple, dict]:
        """``(args, kwargs)`` as they were given."""
        return jax.tree.unflatten(self.treedef, self.leaves)

    def rebuild(self, arrays: Sequence[Any], nnx_objects: Sequence[Any]) -> tuple[tuple, dict]:
        """Return ``(args, kwargs)`` with other arrays and NNX objects in place of the own ones."""
        arrays_left, objects_left = iter(arrays), iter(nnx_objects)
        filled = []
        for leaf, (kind, _) in zip(self.leaves, self.keys, strict=True):
            if kind is not Kind.OBJECT:
                filled.append(next(arrays_left))
            else:
                filled.append(next(objects_left) if is_nnx_object(leaf) else leaf)
        return jax.tree.unflatten(self.treedef, filled)
