"""Which sums over the replicas are means, and how they are weighted where batches are uneven."""

from __future__ import annotations

from collections.abc import Sequence

from distrib.engines.groups import Group, Lift
from distrib.engines.meetings import Direction, Stretches, cut, divisions, means, replica_groups
from distrib.errors import UnevenReplicasError
from distrib.reduce_op import ReduceOp

_MORE_REPLICAS = 97
"""No real number of replicas plus this is a divisor that a step would have by chance as well."""


Means = dict[tuple[int, int], Direction]
"""Meetings and their operands, by position, that are steps of means, and which way each goes."""


def find_means(cuts: Stretches, group: Group, lift: Lift, over_groups: Means) -> Means:
    """Return the sums that are means over the replicas, in which each example is to count once.

    With unequal batches a replica counts in such a mean as often as it has examples, so that
    synchronised batch normalisation has the statistics of the whole batch. The gradient of the
    mean is weighted by what the user's losses are: if they are means over the examples of a
    replica, in the same way; if they are shares of one sum over all examples, each replica gets
    its own share of the sum of the gradients.

    A division by the number of replicas looks like one by an equal number, of outputs for
    instance, so the step is traced once more as if there were more replicas: where the divisor
    follows, it is theirs. ``over_groups`` is added to what is found so: see ``means_over_groups``.
    """
    found = over_groups | _over_all(cuts, group, lift)
    gradients_are = group.step.gradients_are
    if gradients_are is None and Direction.BACKWARD in found.values():
        raise UnevenReplicasError(
            "The replicas have batches of unequal sizes, and the step differentiates through a "
            "jax.lax.pmean (synchronised batch normalisation, for one). How its gradient is to "
            "be weighted depends on what the losses are: for means over the examples of a "
            "replica combine gradients by apply_gradients() or "
            "distrib.nn.mean_over_examples(); for shares of one sum use "
            'distrib.nn.compute_average_loss() or apply_gradients(aggregation="SUM").'
        )
    if gradients_are is ReduceOp.SUM:
        return {
            place: Direction.SHARED_OUT if direction is Direction.BACKWARD else direction
            for place, direction in found.items()
        }
    return found


def means_over_groups(programs: Sequence[Stretches]) -> Means:
    """Return the sums over groups of replicas (``axis_index_groups``) that are means over them.

    There a replica counts as often as it has examples, among those of its group. A division by the
    size of a group looks like one by an equal number of examples. That differs by program, so what
    holds for all of them is the group's; and a step that goes forward does so in all of them.

    Args:
      programs: those for each shape, which meet at the same collectives.
    """
    found = [_over_groups(cuts) for cuts in programs]
    shared = set.intersection(*(set(means) for means in found))
    backward = {p for means in found for p in means if means[p] is Direction.BACKWARD}
    return {p: Direction.BACKWARD if p in backward else Direction.FORWARD for p in shared}


def _over_groups(cuts: Stretches) -> Means:
    found = {}
    for index, meeting in enumerate(cuts.meetings):
        groups = replica_groups(meeting)
        if groups is not None:
            by_size = means(cuts, divisions(cuts, len(groups[0])))
            found |= {place: way for place, way in by_size.items() if place[0] == index}
    return found


def _over_all(cuts: Stretches, group: Group, lift: Lift) -> Means:
    size = group.weights.num_replicas
    places = divisions(cuts, size)
    if not _ungrouped(cuts, means(cuts, places)):
        return {}
    more = size + _MORE_REPLICAS
    probed = cut(lift(group.forms, group.weights, more).jaxpr, more)
    followed = set(divisions(probed, more))
    return _ungrouped(cuts, means(cuts, [place for place in places if place in followed]))


def _ungrouped(cuts: Stretches, found: Means) -> Means:
    return {p: way for p, way in found.items() if replica_groups(cuts.meetings[p[0]]) is None}
