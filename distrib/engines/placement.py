"""Where the variables of a step are, and who applies its updates: two answers.

``InProgram``: every device has a copy (its row, its part), and the program writes it in place.
``OnOneDevice``: the variables are on one device; before a step they are copied out to the replicas,
the program returns the combined operands of its updates, and that device applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from distrib.engines.deferred_updates import DeferredUpdate, apply_in_order, updated_variables
from distrib.platform import Device
from distrib.platform.mesh import replicated
from distrib.variables import Cell, LentCells, Variable


class UpdatePlacement(Protocol):
    """Where variables live and updates are applied."""

    @property
    def deferred(self) -> bool:
        """Whether all updates are applied after the program, and none within it."""
        ...

    def fetcher(self, variables: Sequence[Variable], mesh: Mesh) -> Callable[[], list[jax.Array]]:
        """Return a function that gives the arrays of ``variables`` as the program takes them."""
        ...

    def applier(
        self, updates: Sequence[DeferredUpdate], operands: Sequence[Any]
    ) -> Callable[[list[jax.Array]], None] | None:
        """Return a function that applies updates to operands of those forms, or None."""
        ...


def fetch(variables: Sequence[Variable], mesh: Mesh) -> Callable[[], list[jax.Array]]:
    """Return a function that gives the arrays of variables, copied to the mesh where need be."""
    storages = [v.storage for v in variables]
    cells = [storage.cell for storage in storages]
    here = [v.distribute_strategy.extended.lives_on(mesh) for v in variables]
    if all(here):
        return lambda: [cell.array for cell in cells]
    elsewhere = [i for i, is_here in enumerate(here) if not is_here]
    everywhere = replicated(mesh)

    def copied() -> list[jax.Array]:
        arrays = [cell.array for cell in cells]
        singles = [
            _one_copy(arrays[i]) if storages[i].shards is None else storages[i].read()
            for i in elsewhere
        ]
        copies = jax.device_put(singles, everywhere)
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

    def applier(self, updates: Sequence[DeferredUpdate], operands: Sequence[Any]) -> None:
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
        self, updates: Sequence[DeferredUpdate], operands: Sequence[Any]
    ) -> Callable[[list[jax.Array]], None] | None:
        """Return a function that brings operands to the device and applies the updates there."""
        if not updates:
            return None
        variables = updated_variables(updates)
        cells = [v.storage.cell for v in variables]
        device = self._device

        def apply_all(olds: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
            values = dict(zip(map(id, variables), olds, strict=True))
            apply_in_order(updates, values, operands)
            return [values[id(v)] for v in variables]

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
