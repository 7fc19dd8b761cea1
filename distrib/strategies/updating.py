"""``extended.update``: a function for each copy of a variable, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from distrib.context import Frame, current_program, entered
from distrib.platform import Device, device_string, uncommitted
from distrib.values import DistributedValues, Mirrored, grouped, ungrouped
from distrib.variables import Component, Copies, Variable, changes_held, combined


class StoredCopies:
    """The copies of variables outside of steps, changed where they are stored.

    Args:
      devices: the devices of the copies; none for a variable that lies where JAX puts it.
    """

    def __init__(self, devices: Sequence[Device]):
        self._devices = devices

    def count(self, variable: Variable) -> int:
        """Return the number of copies."""
        return variable.storage.num_copies

    def _here(self, value: Any, index: int) -> Any:
        """Return a value on the device of a copy, so that what is computed with it is as well."""
        return jax.device_put(value, self._devices[index]) if self._devices else value

    def read(self, variable: Variable, index: int) -> jax.Array:
        """Return the copy."""
        copies = variable.storage.components()
        return self._here(copies[min(index, len(copies) - 1)], index)

    def change(self, variable: Variable, index: int, kind: str, value: Any) -> jax.Array:
        """Change the copy at once."""
        with changes_held():
            new = combined(kind, self.read(variable, index), self._here(value, index))
            copies = list(variable.storage.components())
            copies[min(index, len(copies) - 1)] = new
            variable.storage.put_components([_free(copy) for copy in copies])
        return new

    def device(self, variable: Variable, index: int) -> str:
        """Return the device of the copy."""
        return device_string(self._devices[index]) if self._devices else variable.device

    def select(self, leaf: Any, index: int) -> Any:
        """Return a part of a distributed value, and arrays, on the device of the copy."""
        if isinstance(leaf, DistributedValues):
            leaf = leaf.values[index]
        return self._here(leaf, index) if isinstance(leaf, jax.Array) else leaf

    def results(self, trees: Sequence[Any], group: bool) -> Any:
        """Return one tree with mirrored values, or, not grouped, with a tuple of parts."""
        free = [jax.tree.map(_free, tree, is_leaf=_is_kept) for tree in trees]
        tree = grouped(free, Mirrored, _is_kept)
        return tree if group else ungrouped(tree, _is_kept)


def update(
    variable: Variable,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    group: bool,
    devices: Sequence[Device],
) -> Any:
    """Call ``fn`` for each copy of ``variable`` in cross-replica context.

    If a call outside of a step raises, the variable is what it was.

    Args:
      variable: the variable.
      fn: called with a :class:`distrib.variables.Component` and what belongs to it of the others.
      args: its further arguments.
      kwargs: the same by name.
      group: whether to return distributed values, and not tuples of their parts.
      devices: the devices of the copies.
    """
    program = current_program()
    copies: Copies = StoredCopies(devices) if program is None else program.copies
    strategy = variable.distribute_strategy
    with entered(Frame(strategy, None, program)):
        if program is not None:
            return _called(variable, fn, args, kwargs, group, copies)
        with changes_held():
            before = variable.storage.components()
            try:
                return _called(variable, fn, args, kwargs, group, copies)
            except BaseException:
                variable.storage.put_components(before)
                raise


def _called(
    variable: Variable,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    group: bool,
    copies: Copies,
) -> Any:
    results = []
    for index in range(copies.count(variable)):

        def select(leaf: Any, index: int = index) -> Any:
            if isinstance(leaf, Variable):
                return Component(leaf, index, copies)
            return copies.select(leaf, index)

        chosen_args, chosen = jax.tree.map(select, (tuple(args), kwargs), is_leaf=_is_kept)
        result = fn(Component(variable, index, copies), *chosen_args, **chosen)
        results.append(jax.tree.map(_whole, result, is_leaf=_is_kept))
    return copies.results(results, group)


def _whole(leaf: Any) -> Any:
    """Return the variable in place of its copy: it is what the function was asked to change."""
    return leaf.variable if isinstance(leaf, Component) else leaf


def _free(leaf: Any) -> Any:
    return uncommitted(leaf) if isinstance(leaf, jax.Array) and _is_on_one_device(leaf) else leaf


def _is_on_one_device(array: jax.Array) -> bool:
    return array.sharding.num_devices == 1


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, DistributedValues | Variable | Component)
