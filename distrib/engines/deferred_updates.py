"""Updates that are applied outside of the replicas' program, by whoever holds the variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from distrib.collectives import is_scattered
from distrib.engines.program import Update, applied
from distrib.platform import Shards
from distrib.variables import Variable


@dataclass(frozen=True)
class DeferredUpdate:
    """An update whose operand the program returns.

    Attributes:
      update: the update, without its operand.
      treedef: the structure of the operand.
      shards: for each array of the operand how it is split over the replicas, None where each has
        it entire.
    """

    update: Update
    treedef: Any
    shards: tuple[Shards | None, ...]


def split_off(update: Update) -> tuple[DeferredUpdate, list[jax.Array]]:
    """Return an update without its operand, and the arrays of that: of a split one, the part."""
    leaves, treedef = jax.tree.flatten(update.operand, is_leaf=is_scattered)
    shards = tuple(leaf.shards if is_scattered(leaf) else None for leaf in leaves)
    arrays = [leaf.part if is_scattered(leaf) else jnp.asarray(leaf) for leaf in leaves]
    return DeferredUpdate(Update(update.variables, update.apply, None), treedef, shards), arrays


def updated_variables(updates: Sequence[DeferredUpdate]) -> list[Variable]:
    """Return the variables that updates change, each once."""
    changed = (v for deferred in updates for v in deferred.update.variables)
    return list({id(v): v for v in changed}.values())


def apply_in_order(
    updates: Sequence[DeferredUpdate], values: dict[int, Any], operands: Sequence[jax.Array]
) -> None:
    """Apply updates to the values of variables, by ``id``, with the arrays of all operands."""
    remaining = iter(operands)
    for deferred in updates:
        arrays = [next(remaining) if s is None else s.cut(next(remaining)) for s in deferred.shards]
        update = deferred.update
        operand = jax.tree.unflatten(deferred.treedef, arrays)
        complete = Update(update.variables, update.apply, operand)
        news = applied(complete, [values[id(v)] for v in update.variables])
        values.update(zip(map(id, update.variables), news, strict=True))
