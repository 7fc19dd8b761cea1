"""Counts, precision, recall and areas: the values of tf.keras.metrics (TensorFlow 2.21)."""

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib import metrics
from tests.support.strategies import on_every_strategy

LABELS = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 0], np.int32)
PREDICTIONS = np.array([0.9, 0.8, 0.7, 0.35, 0.6, 0.1, 0.5, 0.0, 1.0, 0.25], np.float32)
WEIGHTS = np.array([1, 2, 0.5, 1, 1, 3, 0, 1, 1, 1], np.float32)

# What tf.keras.metrics gives for these, without and with the weights.
MEASURED = {
    "TruePositives": (metrics.TruePositives, {}, 3.0, 2.5),
    "FalsePositives": (metrics.FalsePositives, {}, 2.0, 3.0),
    "TrueNegatives": (metrics.TrueNegatives, {}, 3.0, 5.0),
    "FalseNegatives": (metrics.FalseNegatives, {}, 2.0, 1.0),
    "Precision": (metrics.Precision, {}, 0.6, 0.4545454680919647),
    "Recall": (metrics.Recall, {}, 0.6, 0.7142857313156128),
    "Precision at two": (
        metrics.Precision,
        {"thresholds": [0.3, 0.75]},
        [0.7142857313156128, 0.6666666865348816],
        [0.5384615659713745, 0.5],
    ),
    "Recall at two": (
        metrics.Recall,
        {"thresholds": [0.3, 0.75]},
        [1.0, 0.4],
        [1.0, 0.5714285969734192],
    ),
    "AUC": (metrics.AUC, {}, 0.8, 0.8571428656578064),
    "AUC of 7": (metrics.AUC, {"num_thresholds": 7}, 0.82, 0.875),
    "AUC of PR": (metrics.AUC, {"curve": "PR"}, 0.8078746795654297, 0.7895063161849976),
    "AUC of PR of 7": (
        metrics.AUC,
        {"num_thresholds": 7, "curve": "PR"},
        0.8347258567810059,
        0.8166673183441162,
    ),
}


@on_every_strategy
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_the_values_of_keras(make_strategy, weights):
    strategy = make_strategy()
    with strategy.scope():
        made = {name: kind(**arguments) for name, (kind, arguments, _, _) in MEASURED.items()}

    def step(*batch):
        for metric in made.values():
            metric.update_state(*batch)

    data = (LABELS, PREDICTIONS) if weights is None else (LABELS, PREDICTIONS, weights)
    for batch in strategy.experimental_distribute_dataset(data, batch_size=6):
        strategy.run(step, args=batch)
    for name, (_, _, plain, weighted) in MEASURED.items():
        expected = plain if weights is None else weighted
        np.testing.assert_allclose(made[name].result(), expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", MEASURED)
def test_before_there_is_anything_it_is_zero_as_in_keras(name):
    kind, arguments, plain, _ = MEASURED[name]
    metric = kind(**arguments)
    np.testing.assert_array_equal(metric.result(), np.zeros_like(plain))
    metric.update_state(jnp.asarray(LABELS), jnp.asarray(PREDICTIONS))
    np.testing.assert_allclose(metric.result(), plain, rtol=1e-6)
    metric.reset_state()
    np.testing.assert_array_equal(metric.result(), np.zeros_like(plain))


@on_every_strategy
def test_the_mask_of_padded_batches_is_a_weight(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        counts = metrics.ConfusionCounts()

    def step(batch, mask):
        counts.update_state(*batch, sample_weight=mask)

    options = distrib.InputOptions(last_batch="pad")
    data = (LABELS, PREDICTIONS)
    for element in strategy.experimental_distribute_dataset(data, options, batch_size=4):
        strategy.run(step, args=element)
    assert {name: float(count) for name, count in counts.result().items()} == {
        "true_positives": 3.0,
        "false_positives": 2.0,
        "true_negatives": 3.0,
        "false_negatives": 2.0,
    }


def test_weights_of_examples_count_for_every_further_axis():
    recall = metrics.Recall()
    labels = jnp.ones((2, 2), bool)
    recall.update_state(labels, jnp.array([[0.9, 0.1], [0.9, 0.9]]), jnp.array([2.0, 1.0]))
    assert float(recall.result()) == pytest.approx(4 / 6)


def test_shapes_that_differ_are_refused_with_both():
    with pytest.raises(ValueError, match=r"Recall got labels of shape \(3,\).*shape \(3, 2\)"):
        metrics.Recall().update_state(jnp.zeros(3), jnp.zeros((3, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metrics.Precision(1.5), "Precision got thresholds 1.5; each must be a number"),
        (lambda: metrics.Recall([]), r"Recall got thresholds \[\]"),
        (lambda: metrics.AUC(num_thresholds=1), "num_thresholds 1; it must be at least 2"),
        (lambda: metrics.AUC(curve="roc"), 'curve \'roc\'; it must be "ROC" or "PR"'),
    ],
)
def test_what_has_no_meaning_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_logits_do_not_pass_for_probabilities():
    auc = distrib.metrics.AUC(num_thresholds=3)
    auc.update_state(jnp.array([0, 1, 1]), jnp.array([0.2, 0.7, 3.0]))
    assert np.isnan(auc.result())
    masked = distrib.metrics.Recall()
    masked.update_state(jnp.array([0, 1, 1]), jnp.array([0.2, 0.7, 3.0]), jnp.array([1, 1, 0]))
    assert float(masked.result()) == 1
