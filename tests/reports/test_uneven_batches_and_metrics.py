"""Faults that users reported of other systems: uneven batches and metrics, with the right values.

Each must not exist here. The number is the row in the table of reports that the project keeps.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy, on_two_replicas
from tests.support.training import linear, run_epoch


@on_every_strategy
def test_epoch_loss_with_a_last_batch_of_one(make_strategy):
    """Row 11: the last batch left replicas empty: NaN, or data had to be dropped."""
    strategy = make_strategy()
    with strategy.scope():
        epoch_loss = distrib.metrics.Mean()

    def step(y):
        losses = (0.0 - y) ** 2
        epoch_loss.update_state(losses)
        return distrib.nn.compute_average_loss(losses)

    results = run_epoch(strategy, step, np.array([1, 2, 3, 4, 5], np.float32), 4)
    batch_means = [float(strategy.reduce("SUM", result, axis=None)) for result in results]
    assert batch_means == pytest.approx([7.5, 25.0])
    assert float(epoch_loss.result()) == pytest.approx(11.0)  # Not 16.25, the mean of the means.


@on_every_strategy
@pytest.mark.parametrize("aggregation", ["MEAN", "SUM"])
def test_gradient_of_a_last_batch_of_one(make_strategy, aggregation):
    """Row 11: by default the divisor is the true number of examples."""
    strategy = make_strategy()
    state = linear(strategy, optax.sgd(1.0))

    def step(y):
        def loss(params):
            losses = (params["w"] - y) ** 2
            return (
                losses.mean() if aggregation == "MEAN" else distrib.nn.compute_average_loss(losses)
            )

        state.apply_gradients(grads=jax.grad(loss)(state.params), aggregation=aggregation)

    run_epoch(strategy, step, np.array([5], np.float32), 4)
    assert float(state.params["w"]) == pytest.approx(10.0)  # The gradient was -10.
    strategy.extended.assert_mirrored(state)


class Noisy(nn.Module):
    """Batch normalisation and dropout."""

    axis_name: str | None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=False)(x))


@on_every_strategy
@pytest.mark.parametrize("axis_name", [None, distrib.REPLICA_AXIS], ids=["local", "synchronised"])
def test_batch_norm_and_dropout_stay_finite_with_empty_replicas(make_strategy, axis_name):
    """Row 11: a replica without examples made everything NaN."""
    strategy = make_strategy()
    key = jax.random.key(0)
    variables = Noisy(None).init({"params": key, "dropout": key}, jnp.ones((2, 3)))
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=Noisy(axis_name).apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            keys={"dropout": jax.random.key(1)},
            tx=optax.adam(0.1),
        )

    def step(x):
        def loss(params):
            y, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                rngs=state.keys,
                mutable=["batch_stats"],
            )
            return (y**2).mean(), updates["batch_stats"]

        (_, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state.apply_gradients(grads=grads, batch_stats=statistics)

    data = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    run_epoch(strategy, step, data, 4)
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.batch_stats)):
        assert np.isfinite(leaf).all()
    assert int(state.step) == 2
    strategy.extended.assert_mirrored(state)


@on_every_strategy
def test_flattening_with_an_unknown_length_on_empty_replicas(make_strategy):
    """Row 11: ``x.reshape(len(x), -1)``, as tutorials write, has no answer for no examples."""
    strategy = make_strategy()
    state = linear(strategy, optax.sgd(1.0), w=jnp.zeros(4))

    def step(x):
        def loss(params):
            return (x.reshape(x.shape[0], -1) @ params["w"]).mean()

        state.apply_gradients(grads=jax.grad(loss)(state.params))

    run_epoch(strategy, step, np.ones((1, 2, 2), np.float32), 4)
    np.testing.assert_allclose(state.params["w"], [-1, -1, -1, -1])


@on_every_strategy
def test_accuracy_counts_each_example_once(make_strategy):
    """Row 12: the remainder was dropped, or weighted as a whole batch."""
    strategy = make_strategy()
    with strategy.scope():
        accuracy = distrib.metrics.Accuracy()
    labels, predictions = np.ones(10, np.int32), np.array([1] * 8 + [0] * 2, np.int32)
    run_epoch(strategy, lambda batch: accuracy.update_state(*batch), (labels, predictions), 4)
    assert float(accuracy.result()) == pytest.approx(0.8)


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_confusion_counts_miss_no_example(make_strategy, replicas):
    """Row 15: 1,000 examples became 992 on two GPUs, and 984 on four."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        counts = {name: distrib.metrics.Sum(name) for name in ("TP", "FP", "TN", "FN")}
    labels = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 1], np.int32)
    predictions = np.array([1, 1, 0, 1, 0, 1, 0, 0, 1, 1], np.int32)

    def step(batch):
        label, prediction = batch
        counts["TP"].update_state((label == 1) & (prediction == 1))
        counts["FP"].update_state((label == 0) & (prediction == 1))
        counts["TN"].update_state((label == 0) & (prediction == 0))
        counts["FN"].update_state((label == 1) & (prediction == 0))

    run_epoch(strategy, step, (labels, predictions), 10)
    assert {k: int(v.result()) for k, v in counts.items()} == {"TP": 4, "FP": 2, "TN": 3, "FN": 1}


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_what_is_gathered_is_each_example_once(make_strategy, replicas):
    """Row 14: too many came back, too few, or an even last batch was dropped."""
    strategy = make_strategy(replicas)

    def gathered(examples, batch_size, last_batch):
        dataset = strategy.experimental_distribute_dataset(
            np.arange(examples), distrib.InputOptions(last_batch=last_batch), batch_size=batch_size
        )
        results = [strategy.run(lambda x: x, args=(batch,)) for batch in dataset]
        return np.concatenate([strategy.gather(r, axis=0) for r in results]).tolist()

    assert gathered(10, 10, "split") == list(range(10))
    assert gathered(10, 4, "split") == list(range(10))
    assert gathered(8, 4, "drop") == list(range(8))
    assert gathered(9, 5, "drop") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_states_of_all_metrics_miss_no_example(make_strategy, replicas):
    """Rows 15 and 16: counts went missing with the number of devices, and F1 was above 1."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        counts = distrib.metrics.ConfusionCounts()
        precision, recall = distrib.metrics.Precision(), distrib.metrics.Recall()
        auc = distrib.metrics.AUC(num_thresholds=3)
    labels = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 1], np.int32)
    predictions = np.array([1, 1, 0, 1, 0, 1, 0, 0, 1, 1], np.float32)

    def step(batch):
        for metric in (counts, precision, recall, auc):
            metric.update_state(*batch)

    run_epoch(strategy, step, (labels, predictions), 4)
    states = {name: int(count) for name, count in counts.result().items()}
    assert states == {
        "true_positives": 4,
        "false_positives": 2,
        "true_negatives": 3,
        "false_negatives": 1,
    }
    assert float(precision.result()) == pytest.approx(4 / 6)
    assert float(recall.result()) == pytest.approx(4 / 5)
    assert float(auc.result()) == pytest.approx((4 / 5 + 3 / 5) / 2)  # One point of the curve.


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_f1_is_made_of_states_and_not_summed(make_strategy, replicas):
    """Row 16: one true positive, one false positive and one false negative make 0.5."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        counts = distrib.metrics.ConfusionCounts()
    data = (np.array([1, 0, 1, 0], np.int32), np.array([1, 1, 0, 0], np.float32))
    run_epoch(strategy, lambda batch: counts.update_state(*batch), data, 4)
    tp, fp, tn, fn = (float(count) for count in counts.result().values())
    assert (tp, fp, tn, fn) == (1, 1, 1, 1)
    assert 2 * tp / (2 * tp + fp + fn) == 0.5


@on_two_replicas
def test_metrics_of_replicas_with_unequally_many_valid_examples(make_strategy):
    """Row 18: the means of the replicas were averaged, whatever the number behind each."""
    strategy = make_strategy()
    with strategy.scope():
        accuracy, loss = distrib.metrics.Accuracy(), distrib.metrics.Mean()

    def step(batch):
        labels, predictions, valid, losses, real = batch
        accuracy.update_state(labels, predictions, sample_weight=valid)
        loss.update_state(losses, sample_weight=real)

    valid = np.repeat([True, False, True, False], [3, 97, 1, 99])
    right = np.repeat([1, 0, 0], [3, 97, 100]).astype(np.int32)
    real = np.repeat([1, 1, 0], [100, 10, 90])
    losses = np.repeat([1.0, 2.0, 9.0], [100, 10, 90]).astype(np.float32)
    data = (np.ones(200, np.int32), right, valid, losses, real)
    run_epoch(strategy, step, data, 200)
    assert float(accuracy.result()) == pytest.approx(0.75)  # Not 0.5.
    assert float(loss.result()) == pytest.approx(1.0909, abs=5e-5)


@on_every_strategy
@pytest.mark.parametrize("examples", [3, 1])
def test_predictions_come_back_for_each_input_in_order(make_strategy, examples):
    """Row 19: a batch that is no multiple of the devices divided by zero."""
    strategy = make_strategy()
    state = linear(strategy, w=2.0)
    inputs = np.arange(1, examples + 1, dtype=np.float32)
    (result,) = run_epoch(strategy, lambda x: state.params["w"] * x, inputs, examples)
    np.testing.assert_array_equal(strategy.gather(result, axis=0), 2 * inputs)


@on_every_strategy
def test_what_is_gathered_has_one_rank_for_any_number_of_replicas(make_strategy):
    """Row 21: with one replica the rank was another than with many."""
    strategy = make_strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full(2, context.replica_id_in_sync_group)
    )
    expected = np.repeat(np.arange(strategy.num_replicas_in_sync), 2)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), expected)

    def step():
        context = distrib.get_replica_context()
        return context.all_gather(jnp.full(2, context.replica_id_in_sync_group), 0)

    for part in strategy.experimental_local_results(strategy.run(step)):
        np.testing.assert_array_equal(part, expected)
