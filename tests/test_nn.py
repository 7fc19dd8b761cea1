"""Losses whose sum over the replicas is the loss of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.nn import compute_average_loss, scale_regularization_loss
from tests.support.strategies import central, mirrored, on_every_strategy


def total(strategy, fn, data, batch_size):
    """Return the sum over the replicas of ``fn``, for each batch."""
    batches = strategy.experimental_distribute_dataset(data, batch_size=batch_size)
    return [
        float(strategy.reduce("SUM", strategy.run(fn, args=(batch,)), axis=None))
        for batch in batches
    ]


@on_every_strategy
def test_the_sum_of_the_average_losses_is_the_mean(make_strategy):
    data = np.array([1, 2, 3, 10], np.float32)
    assert total(make_strategy(), compute_average_loss, data, 4) == [4.0]


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_the_divisor_is_the_true_number_of_examples(make_strategy, replicas):
    data = np.array([1, 2, 3, 10, 4, 8], np.float32)
    means = total(make_strategy(replicas), compute_average_loss, data, 5)
    assert means == pytest.approx([4.0, 8.0])  # Twenty over five, eight over one.


@on_every_strategy
def test_a_given_global_batch_size(make_strategy):
    def loss(x):
        return compute_average_loss(x, global_batch_size=8)

    data = np.array([1, 2, 3, 10], np.float32)
    assert total(make_strategy(), loss, data, 4) == [2.0]


@on_every_strategy
def test_sample_weights(make_strategy):
    def loss(batch):
        return compute_average_loss(*batch)

    data = (np.array([1, 2, 3, 10], np.float32), np.array([1, 0, 2, 0.5], np.float32))
    assert total(make_strategy(), loss, data, 4) == [3.0]  # 1 + 6 + 5, over four examples.


def test_weights_for_each_example_count_for_every_further_axis():
    loss = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    assert float(compute_average_loss(loss, jnp.array([1.0, 10.0]))) == (3 + 70) / 2
    assert float(compute_average_loss(loss, 2.0)) == 10.0
    assert float(compute_average_loss(loss, jnp.ones((2, 2)), global_batch_size=5)) == 2.0


def test_integer_losses_become_floating():
    loss = compute_average_loss(jnp.array([1, 2]))
    assert loss.dtype == jnp.float32
    assert float(loss) == 1.5
    assert compute_average_loss(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_scalar_loss_needs_a_global_batch_size():
    with pytest.raises(ValueError, match="number of examples is unknown.*global_batch_size"):
        compute_average_loss(jnp.ones(()))
    assert float(compute_average_loss(jnp.asarray(6.0), global_batch_size=4)) == 1.5


@on_every_strategy
def test_in_cross_replica_context_the_loss_is_of_one_replica(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        loss = compute_average_loss(jnp.array([2.0, 4.0]))
    assert float(loss) == 3.0 / strategy.num_replicas_in_sync


@on_every_strategy
def test_regularization_counts_once(make_strategy):
    strategy = make_strategy()
    shares = strategy.run(lambda x: scale_regularization_loss({"a": x, "b": [2 * x]}), args=(0.5,))
    assert float(strategy.reduce("SUM", shares, axis=None)) == pytest.approx(1.5)


def test_regularization_of_a_vector_is_summed():
    with mirrored(2).scope():
        assert float(scale_regularization_loss(jnp.array([1.0, 3.0]))) == 2.0
        assert float(scale_regularization_loss([1.0, jnp.ones(3)])) == 2.0


@on_every_strategy
def test_gradients(make_strategy):
    strategy = make_strategy()

    def gradient(x):
        def loss(w):
            data_loss = compute_average_loss((w * x) ** 2)
            return data_loss + scale_regularization_loss(0.5 * w**2)

        return jax.grad(loss)(jnp.asarray(2.0))

    # 2 w mean(x^2) + w, at w = 2.
    assert total(strategy, gradient, np.array([1, 2, 3, 4], np.float32), 4) == pytest.approx([32.0])
    assert distrib.get_strategy().num_replicas_in_sync == 1


def padded(strategy, *data, batch_size):
    options = distrib.InputOptions(last_batch="pad")
    return strategy.experimental_distribute_dataset(data, options, batch_size=batch_size)


@on_every_strategy
def test_the_masked_mean_of_padded_batches(make_strategy):
    strategy = make_strategy()

    def step(batch, mask):
        (x,) = batch
        slope = jax.grad(lambda w: distrib.nn.masked_mean(w * x, mask))(1.0)
        return distrib.nn.masked_mean(x, mask), distrib.nn.mean_over_examples(slope)

    batches = padded(strategy, np.array([1, 2, 3, 10, 4, 8], np.float32), batch_size=5)
    results = [strategy.run(step, args=element) for element in batches]
    means = [float(strategy.reduce("MEAN", mean, axis=None)) for mean, _ in results]
    assert means == pytest.approx([4.0, 8.0])
    for (_, slope), expected in zip(results, [4.0, 8.0], strict=True):
        parts = strategy.experimental_local_results(slope)
        np.testing.assert_allclose(parts, [expected] * len(parts), rtol=1e-6)


@on_every_strategy
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "threads"])
def test_the_masked_mean_where_replicas_have_unequally_many_examples(make_strategy, eager):
    """Row lengths [3, 1, 2, 0, 1] of all ones, twos and so on: 3 + 2 + 6 + 0 + 5 over 7 tokens."""
    strategy = make_strategy()
    tokens = np.repeat(np.arange(1, 6, dtype=np.float32)[:, None], 3, axis=1)
    mask = np.arange(3) < np.array([3, 1, 2, 0, 1])[:, None]

    def step(batch):
        return distrib.nn.mean_over_examples(distrib.nn.masked_mean(*batch))

    distrib.config.run_functions_eagerly(eager)
    try:
        (batch,) = strategy.experimental_distribute_dataset([(tokens, mask)])
        parts = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
    finally:
        distrib.config.run_functions_eagerly(False)
    np.testing.assert_allclose(parts, [16 / 7] * len(parts), rtol=1e-6)


@on_every_strategy
def test_the_average_loss_of_padded_batches(make_strategy):
    strategy = make_strategy()

    def loss(batch, mask):
        count = distrib.get_replica_context().all_reduce("SUM", mask.sum())
        return compute_average_loss(batch[0], sample_weight=mask, global_batch_size=count)

    batches = padded(strategy, np.array([1, 2, 3, 10, 4, 8], np.float32), batch_size=5)
    results = [strategy.run(loss, args=element) for element in batches]
    sums = [float(strategy.reduce("SUM", r, axis=None)) for r in results]
    assert sums == pytest.approx([4.0, 8.0])


def test_the_masked_mean_outside_of_a_step():
    values = jnp.array([[1.0, 2.0], [np.nan, np.inf], [6.0, 7.0]])
    assert float(distrib.nn.masked_mean(values, jnp.array([True, False, True]))) == 4.0
    assert float(distrib.nn.masked_mean(values, jnp.array([4.0, 0.0, 4.0]))) == 4.0
    assert float(distrib.nn.masked_mean(jnp.array([1, 2]), jnp.array([False, True]))) == 2.0
    assert float(distrib.nn.masked_mean(values, jnp.zeros(3, bool))) == 0.0
    with pytest.raises(ValueError, match="broadcast"):
        distrib.nn.masked_mean(values, jnp.ones(2))
