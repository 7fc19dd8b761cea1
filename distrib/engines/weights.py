"""How much each replica counts where replicas have unequally many examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.values import PerReplica, map_apart


@dataclass(frozen=True)
class ExampleWeights:
    """The examples of one replica among those of all.

    Attributes:
      mine: the examples of this replica.
      total: the examples of all replicas.
      num_replicas: how many replicas there are.
      takes_part: whether this replica adds anything at all.
    """

    mine: int
    total: int
    num_replicas: int
    takes_part: bool = True

    @property
    def share(self) -> float:
        """This replica's part of a mean over all examples."""
        return self.mine / self.total

    def applied(self, tree: Any, *, mean: bool) -> Any:
        """Return what this replica adds to the sum over the replicas.

        A replica without examples adds zero to a mean, whatever the mean over its nothing came to.
        To a sum it adds what it has, the share of a regularisation loss for one, less any NaN.
        """
        return map_apart(
            tree,
            lambda arrays: jax.tree.map(lambda x: self._applied(x, mean), arrays),
            lambda slices: slices.with_values(self._applied(slices.values, mean)),
        )

    def _applied(self, x: Any, mean: bool) -> Any:
        if not mean and self.takes_part:
            return x if self.mine else jnp.where(jnp.isnan(x), 0, x)
        return x * jnp.asarray(self.share, x.dtype) if self.mine else jnp.zeros_like(x)


def part_of_sum(
    tree: Any, aggregation: str | None, weights: ExampleWeights | None, num_replicas: int
) -> Any:
    """Return what a replica adds to a sum over the replicas that is to combine gradients.

    Args:
      tree: the gradients of the replica.
      aggregation: SUM; MEAN, weighted by examples; or None: all replicas have the combined ones.
      weights: the examples of the replica, where they differ.
      num_replicas: how many replicas there are.
    """
    if weights is not None and aggregation is not None:
        return weights.applied(tree, mean=aggregation == "MEAN")
    if aggregation == "SUM":
        return tree
    return jax.tree.map(lambda x: x * jnp.asarray(1.0 / num_replicas, x.dtype), tree)


def examples_of(arguments: Iterable[Sequence[tuple[int, ...]]]) -> list[int] | None:
    """Return the examples of each replica, or None where all have equally many.

    They are the lengths of the first axis of the first argument in which replicas differ in it.

    Args:
      arguments: for each per-replica argument, its shape on each replica.
    """
    for shapes in arguments:
        counts = [shape[0] for shape in shapes] if all(shapes) else []
        if len(set(counts)) > 1:
            return counts
    return None


def weights_of(
    leaves: Sequence[Any], num_replicas: int, empty: Sequence[int] = ()
) -> list[ExampleWeights | None]:
    """Return the examples of each replica among those of all; None where they are equal.

    Args:
      leaves: the arguments of a step.
      num_replicas: how many replicas there are.
      empty: the replicas that take no part.
    """
    examples = examples_of([np.shape(part) for part in leaf.values] for leaf in _separate(leaves))
    if examples is None:
        return [None] * num_replicas
    total = sum(examples)
    return [
        ExampleWeights(count, total, num_replicas, takes_part=replica not in empty)
        for replica, count in enumerate(examples)
    ]


def are_uneven(leaves: Sequence[Any]) -> bool:
    """Tell whether replicas see different shapes of an argument."""
    return any(len(set(map(np.shape, leaf.values))) > 1 for leaf in _separate(leaves))


def _separate(leaves: Sequence[Any]) -> list[PerReplica]:
    return [leaf for leaf in leaves if isinstance(leaf, PerReplica) and leaf.whole is None]
