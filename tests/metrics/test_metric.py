"""The base of metrics: states summed over the replicas, and results made of the sums."""

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.metrics import Metric
from distrib.metrics.metric import weighted
from tests.support.strategies import on_every_strategy


class Histogram(Metric):
    """A metric of a user's own: the part of the values that is in each of three classes."""

    def __init__(self, name="histogram"):
        super().__init__(name)
        self.counts = self.add_state("counts", (3,))
        self.total = self.add_state("total")
        self.note = "not a state"

    def update_state(self, classes):
        self.counts.assign_add(jnp.bincount(classes, length=3).astype(jnp.float32))
        self.total.assign_add(jnp.float32(classes.shape[0]))

    def result(self):
        return self.counts.value() / self.total.value()


@on_every_strategy
def test_states_are_summed_and_results_made_of_the_sums(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        metric = Histogram()
    classes = np.array([0, 1, 1, 1, 2, 1, 0, 1, 1, 2], np.int32)
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(classes, batch_size=7):
            strategy.run(metric.update_state, args=(batch,))
        np.testing.assert_allclose(metric.result(), [0.2, 0.6, 0.2], rtol=1e-6)
        assert float(metric.total.numpy()) == 10
        metric.reset_state()
        assert metric.counts.numpy().tolist() == [0, 0, 0]


def test_what_a_state_is():
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        metric = Histogram("seen")
    state = metric.counts
    assert (state.name, state.shape, state.dtype) == ("seen/counts", (3,), jnp.float32)
    assert state.synchronization is distrib.VariableSynchronization.ON_READ
    assert state.aggregation is distrib.VariableAggregation.SUM
    assert not state.trainable
    assert [v.name for v in metric.distributed_variables()] == ["seen/counts", "seen/total"]


def test_a_metric_must_say_what_it_does():
    metric = Metric("plain")
    with pytest.raises(TypeError, match="Metric does not say what a batch adds"):
        metric.update_state(1)
    with pytest.raises(TypeError, match="Metric does not say what its result is"):
        metric.result()
    metric.reset_state()  # of no states


@pytest.mark.parametrize(
    ("values", "weight", "products", "weights"),
    [
        (3, None, 3, 1),
        ([True, False], None, [1, 0], [1, 1]),
        ([[1, 2], [3, 4]], [10, 0], [[10, 20], [0, 0]], [[10, 10], [0, 0]]),
        ([[1, 2], [3, 4]], [[1, 0], [0, 1]], [[1, 0], [0, 4]], [[1, 0], [0, 1]]),
        ([1, 2], 3, [3, 6], [3, 3]),
        ([], [], [], []),
    ],
)
def test_weighted(values, weight, products, weights):
    found = weighted(jnp.asarray(values), weight if weight is None else jnp.asarray(weight))
    assert [part.tolist() for part in found] == [products, weights]
    assert {str(part.dtype) for part in found} == {"float32"}
    assert found[0].shape == found[1].shape == jnp.shape(jnp.asarray(values))


def test_weights_that_do_not_fit():
    with pytest.raises(ValueError, match="broadcast"):
        weighted(jnp.ones((2, 3)), jnp.ones(3))
