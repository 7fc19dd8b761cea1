"""Where the variables of a step are, and who applies its updates: two answers.

``InProgram``: every device has a copy (or its row), and the program writes it in place.
``OnOneDevice``: the variables are on one device; before a step they are copied out to the replicas,
the program returns the combined operands of its updates, and that device applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from distrib.engines.program import Update, applied
from distrib.platform import Device
from distrib.platform.mesh import replicated
from distrib.variables import Cell, LentCells, Variable

PendingUpdate = tuple[Update, Any, int]
"""An update without its operand, the structure of the operand, and how many arrays it has."""


class UpdatePlacement(Protocol):
    """Where variables live and updates are applied."""

    @property
    def deferred(self) -> bool:
        """Whether updates are applied outside of the program."""
        ...

    def fetcher(self, variables: Sequence[Variable], mesh: Mesh) -> Callable[[], list[jax.Array]]:
        """Return a function that gives the arrays of ``variables`` as the program takes them."""
        ...

    def applier(
        self, updates: Sequence[PendingUpdate], operands: Sequence[Any]
    ) -> Callable[[list[jax.Array]], None] | None:
        """Return a function that applies updates to operands of those forms, or None."""
        ...


def fetch(variables: Sequence[Variable], mesh: Mesh) -> Callable[[], list[jax.Array]]:
    """Return a function that gives the arrays of variables, copied to the mesh where need be."""
    cells = [v.storage.cell for v in variables]
    here = [v.distribute_strategy.extended.lives_on(mesh) for v in variables]
    if all(here):
        return lambda: [cell.array for cell in cells]
    elsewhere = [i for i, is_here in enumerate(here) if not is_here]
    everywhere = replicated(mesh)

    def copied() -> list[jax.Array]:
        arrays = [cell.array for cell in cells]
        copies = jax.device_put([_one_copy(arrays[i]) for i in elsewhere], everywhere)
        for i, copy in zip(elsewhere, copies, strict=True):
            arrays[i] = copy
        return arrays

    return copied


def _one_copy(array: jax.Array) -> jax.Array:
    return array if len(array.sharding.device_set) == 1 else array.addressable_shards[0].data


class InProgram:
    """Variables on every device of the mesh, written by the program."""

    deferred = False

    def fetcher(self, variables: Sequence[Variable], mesh: Mesh) -> Callable[[], list[jax.Array]]:
        """Return a function that gives the arrays as they are; a foreign variable's is copied."""
        return fetch(variables, mesh)

    def applier(self, updates: Sequence[PendingUpdate], operands: Sequence[Any]) -> None:
        """Return None: nothing is left to apply."""
        return None


class OnOneDevice:
    """Variables on one device, which applies the updates.

    Args:
      device: that device.
    """

    deferred = True

    def __init__(self, device: Device):
        self._device = device

    def fetcher(self, variables: Sequence[Variable], mesh: Mesh) -> Callable[[], list[jax.Array]]:
        """Return a function that copies the arrays out to the replicas."""
        return fetch(variables, mesh)

    def applier(
        self, updates: Sequence[PendingUpdate], operands: Sequence[Any]
    ) -> Callable[[list[jax.Array]], None] | None:
        """Return a function that brings operands to the device and applies the updates there."""
        if not updates:
            return None
        variables = list({id(v): v for update, _, _ in updates for v in update.variables}.values())
        position = {id(v): i for i, v in enumerate(variables)}
        cells = [v.storage.cell for v in variables]
        device = self._device

        def apply_all(olds: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
            news = list(olds)
            start = 0
            for update, treedef, count in updates:
                operand = jax.tree.unflatten(treedef, operands[start : start + count])
                start += count
                places = [position[id(v)] for v in update.variables]
                complete = Update(update.variables, update.apply, operand)
                results = applied(complete, [news[i] for i in places])
                for i, result in zip(places, results, strict=True):
                    news[i] = result
            return news

        def form(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

        # Compiled here, and not at the first call, so that no variable is held by the function
        # that is returned: a step must not keep its variables alive.
        jitted = jax.jit(apply_all, donate_argnums=0, keep_unused=True)
        lowered = jitted.lower([form(v) for v in variables], [form(x) for x in operands])
        return _Application(lowered.compile(), cells, device)


class _Application:
    """Compiled updates, and the cells that they change."""

    def __init__(self, compiled: Any, cells: list[Cell], device: Device):
        self._compiled = compiled
        self._cells = cells
        self._device = device
        self._keep = LentCells(cells)

    def __call__(self, operands: list[jax.Array]) -> None:
        self._keep.copy_lent()
        here = jax.device_put([_one_copy(x) for x in operands], self._device)
        news = self._compiled([cell.array for cell in self._cells], here)
        for cell, new in zip(self._cells, news, strict=True):
            cell.array = new
