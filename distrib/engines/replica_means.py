"""Which sums over the replicas are means, and how they are weighted where batches are uneven."""

from __future__ import annotations

from distrib.engines.groups import Group, Lift
from distrib.engines.meetings import Direction, Stretches, cut, divisions, means
from distrib.errors import UnevenReplicasError
from distrib.reduce_op import ReduceOp

_MORE_REPLICAS = 97
"""No real number of replicas plus this is a divisor that a step would have by chance as well."""


def find_means(cuts: Stretches, group: Group, lift: Lift) -> dict[tuple[int, int], Direction]:
    """Return the sums that are means over the replicas, in which each example is to count once.

    With unequal batches a replica counts in such a mean as often as it has examples, so that
    synchronised batch normalisation has the statistics of the whole batch. The gradient of the
    mean is weighted by what the user's losses are: if they are means over the examples of a
    replica, in the same way; if they are shares of one sum over all examples, each replica gets
    its own share of the sum of the gradients.

    A division by the number of replicas looks like one by an equal number, of outputs for
    instance, so the step is traced once more as if there were more replicas: where the divisor
    follows, it is theirs.
    """
    size = group.weights.num_replicas
    places = divisions(cuts, size)
    if not means(cuts, places):
        return {}
    more = size + _MORE_REPLICAS
    probed = cut(lift(group.forms, group.weights, more).jaxpr, more)
    followed = set(divisions(probed, more))
    found = means(cuts, [place for place in places if place in followed])
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
