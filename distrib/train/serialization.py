"""What of a train state is saved, and how it is restored, in Flax's serialization."""

from __future__ import annotations

from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp

from distrib.train.accumulation import ACCUMULATED
from distrib.train.error_feedback import RESIDUALS
from distrib.variables import Variable, VariableTree

UNFINISHED = (RESIDUALS, *ACCUMULATED)
"""What a run keeps of gradients that have not reached the optimizer. Whoever restores a run that
kept none begins with zeros; whoever keeps none himself leaves them out."""


def saved(trees: dict[str, VariableTree]) -> dict[str, Any]:
    """Return the values of trees as Flax saves them."""
    values = {name: tree.build_data() for name, tree in trees.items()}
    return flax.serialization.to_state_dict(values)


def restore(trees: dict[str, VariableTree], step: Variable, fields: dict[str, Any]) -> None:
    """Assign what was saved, all of it or, where something does not fit, nothing.

    Args:
      trees: the fields of the train state, by name.
      step: its count of steps.
      fields: what :func:`saved` returned, with ``"step"``.

    Raises:
      ValueError: if a field, or a value in it, is missing or unknown.
      VariableError: if a value has another shape or dtype.
    """
    _check_names(trees, fields)
    pairs = [(step, fields["step"])]
    for name, tree in trees.items():
        if name in fields:
            values = flax.serialization.from_state_dict(tree.build_data(), fields[name], name)
            pairs += zip(tree.variables, jax.tree.leaves(values), strict=True)
        else:
            pairs += [(v, jnp.zeros(v.shape, v.dtype)) for v in tree.variables]
    for variable, value in [(variable, variable.fitted(value)) for variable, value in pairs]:
        variable.assign(value)


def _check_names(trees: dict[str, VariableTree], fields: dict[str, Any]) -> None:
    mine, given = {"step", *trees}, set(fields)
    missing = sorted(mine - given - set(UNFINISHED))
    unknown = sorted(given - mine - set(UNFINISHED))
    if missing or unknown:
        raise ValueError(
            f"The train state that is restored has the fields {', '.join(sorted(mine))}, and the "
            f"saved one {', '.join(sorted(given))}. Missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}. Create the state with the fields that were "
            "saved, or change the dictionary that from_state_dict is given."
        )
