"""``Accuracy`` on uneven splits."""

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy

LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], np.int32)
SCORES = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2, 0, 0, 0, 1]]  # Seven of ten are right.


def evaluate(strategy, batch_size, *data):
    with strategy.scope():
        accuracy = distrib.metrics.Accuracy()
    for batch in strategy.experimental_distribute_dataset(data, batch_size=batch_size):
        strategy.run(accuracy.update_state, args=batch)
    return float(accuracy.result())


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch_size", [10, 4])
def test_seven_of_ten(make_strategy, replicas, batch_size):
    accuracy = evaluate(make_strategy(replicas), batch_size, LABELS, SCORES)
    assert accuracy == pytest.approx(0.7)


@on_every_strategy
def test_sample_weights(make_strategy):
    weights = np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 2], np.float32)
    accuracy = evaluate(make_strategy(), 4, LABELS, SCORES, weights)
    assert accuracy == pytest.approx(6 / 8)


def test_classes_instead_of_scores():
    accuracy = distrib.metrics.Accuracy()
    accuracy.update_state(jnp.array([1, 2, 3]), jnp.array([1, 2, 4]))
    assert float(accuracy.result()) == pytest.approx(2 / 3)


def test_scores_with_more_axes():
    accuracy = distrib.metrics.Accuracy()
    accuracy.update_state(jnp.array([[1, 0]]), jnp.array([[[0.1, 0.9], [0.1, 0.9]]]))
    assert float(accuracy.result()) == 0.5


@pytest.mark.parametrize(
    ("labels", "predictions"), [((3,), (4,)), ((3,), (4, 2)), ((3, 1), (3, 2)), ((3,), (3, 2, 2))]
)
def test_shapes_that_do_not_belong_together(labels, predictions):
    accuracy = distrib.metrics.Accuracy()
    with pytest.raises(ValueError, match="Predictions are scores .batch, classes."):
        accuracy.update_state(jnp.zeros(labels, jnp.int32), jnp.zeros(predictions))
