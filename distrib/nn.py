"""Losses that mean the same on one replica and on many."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distrib.context import current_program, get_strategy, in_cross_replica_context
from distrib.platform import leaves_with_paths
from distrib.reduce_op import ReduceOp


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Return this replica's part of the mean loss over the global batch.

    Sum it over the replicas (``strategy.reduce("SUM", ...)``,
    ``apply_gradients(aggregation="SUM")``) and the result is the mean over all examples.

    Args:
      per_example_loss: ``[batch, ...]``, a loss for each example of this replica.
      sample_weight: weights that broadcast against the loss, or None.
      global_batch_size: what to divide by; by default the number of examples of all replicas, which
        is exact for a last, uneven batch too. Of a padded batch it is the number of its own:
        ``get_replica_context().all_reduce("SUM", mask.sum())``, with ``sample_weight=mask``.

    Returns:
      A scalar: the sum of the losses divided by the global batch size.

    Raises:
      ValueError: if the loss is a scalar, from which no number of examples can be told.

    >>> print(compute_average_loss(jnp.array([1.0, 3.0]), global_batch_size=4))
    1.0
    """
    loss = jnp.asarray(per_example_loss)
    if loss.ndim == 0 and global_batch_size is None:
        raise ValueError(
            "per_example_loss is a scalar, so the number of examples is unknown: keep the loss of "
            "each example (reduction='none'), or pass global_batch_size."
        )
    if not jnp.issubdtype(loss.dtype, jnp.inexact):
        loss = loss.astype(jnp.result_type(float))
    if sample_weight is not None:
        loss = loss * _per_example(sample_weight, loss)
    if global_batch_size is None:
        program = current_program()
        local = loss.shape[0]
        if program is None:
            global_batch_size = local * get_strategy().num_replicas_in_sync
        else:
            global_batch_size = program.by_examples.global_examples(local)
    return loss.sum() / jnp.asarray(global_batch_size, loss.dtype)


def masked_mean(values: Any, mask: Any) -> Any:
    """Return this replica's part of the mean over the values that count.

    In a step it takes the place of ``losses.mean()`` where batches are padded
    (``InputOptions(last_batch="pad")``), or examples have unequally many tokens: the mean of the
    result over the replicas, which is what ``apply_gradients()`` takes of its gradient, is the mean
    over all values of all replicas that the mask lets count, as on one device. In a replica,
    collective: the sums of the masks meet in one all-reduce.

    Args:
      values: ``[batch, ...]``, losses for one.
      mask: booleans, or weights, that broadcast against ``values`` from the first axis.

    Returns:
      A scalar: this replica's sum of the values that count, over the mean of such numbers of all
      replicas; 0 if nothing counts anywhere. What does not count may be NaN.

    >>> import distrib
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> options = distrib.InputOptions(last_batch="pad")
    >>> data = [jnp.array([1.0, 2.0, 6.0])]
    >>> ((x, mask),) = strategy.experimental_distribute_dataset(data, options)
    >>> print(strategy.reduce("MEAN", strategy.run(masked_mean, args=(x, mask)), axis=None))
    3.0
    """
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        values = values.astype(jnp.result_type(float))
    weights = _per_example(mask, values)
    total, count = jnp.where(weights != 0, values * weights, 0).sum(), weights.sum()
    program = current_program()
    if program is not None and not in_cross_replica_context():
        # What a mean over the replicas will multiply this one's value by is divided out.
        count = program.all_reduce(ReduceOp.SUM, count, None) * program.by_examples.share_of_mean
    return total / jnp.where(count == 0, 1, count)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return this replica's share of a loss that does not depend on the data.

    Every replica computes the same regularisation loss; divided by their number, the sum over the
    replicas counts it once.

    Args:
      regularization_loss: a scalar, or a tree of scalars that are added.

    Returns:
      A scalar.

    >>> print(scale_regularization_loss(jnp.asarray(0.4)))
    0.4
    """
    total = sum(jnp.sum(jnp.asarray(leaf)) for _, leaf in leaves_with_paths(regularization_loss))
    return total / get_strategy().num_replicas_in_sync


def mean_over_examples(tree: Any) -> Any:
    """Return the mean of ``tree`` over the replicas, each counting as often as it has examples.

    For gradients of a loss that is a mean over the examples of a replica: the result is the
    gradient of the mean over the whole batch, the last, uneven one too.
    ``TrainState.apply_gradients`` does this by itself; an NNX optimizer is to be given the result.
    In a replica, collective; elsewhere there is one value, which is returned as it is.

    Args:
      tree: a pytree of arrays, of equal shapes on all replicas.

    Returns:
      A pytree of those shapes.

    >>> import distrib, jax
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> (batch,) = strategy.experimental_distribute_dataset([jnp.array([1.0, 2.0, 6.0])])
    >>> print(strategy.run(lambda x: mean_over_examples(x.mean()), args=(batch,)).values[0])
    3.0
    """
    program = current_program()
    if program is None or in_cross_replica_context():
        return tree
    return program.by_examples.combine(tree, "MEAN")


def _per_example(weights: Any, values: jax.Array) -> jax.Array:
    """Return weights in the shape of values; of shape [batch] they count for every further axis."""
    weights = jnp.asarray(weights, values.dtype)
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    return jnp.broadcast_to(weights, jnp.broadcast_shapes(weights.shape, values.shape))
