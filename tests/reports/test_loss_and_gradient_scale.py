"""Faults that users reported of other systems: loss and gradient scale, with the right values.

Each must not exist here. The number is the row in the table of reports that the project keeps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import on_every_strategy, on_two_replicas
from tests.support.training import linear, run_epoch


@on_every_strategy
@pytest.mark.parametrize("aggregation", ["MEAN", "SUM"])
def test_loss_and_step_do_not_depend_on_the_number_of_replicas(make_strategy, aggregation):
    """Row 1: the shown loss shrank, or the step grew, with the number of devices."""
    strategy = make_strategy()
    state = linear(strategy)

    def step(batch):
        x, y = batch

        def loss(params):
            losses = (params["w"] * x - y) ** 2
            return (
                losses.mean() if aggregation == "MEAN" else distrib.nn.compute_average_loss(losses)
            )

        value, grads = jax.value_and_grad(loss)(state.params)
        state.apply_gradients(grads=grads, aggregation=aggregation)
        return value

    data = (np.ones(4, np.float32), np.array([1, 2, 3, 4], np.float32))
    (value,) = run_epoch(strategy, step, data, 4)
    assert float(strategy.reduce(aggregation, value, axis=None)) == pytest.approx(7.5)
    assert float(state.params["w"]) == pytest.approx(0.5)  # The gradient was -5.
    strategy.extended.assert_mirrored(state)


@on_every_strategy
def test_clipping_sees_the_global_gradient(make_strategy):
    """Row 3: each replica clipped its own gradient before the aggregation."""
    strategy = make_strategy()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    state = linear(strategy, tx, w=jnp.zeros(2))

    def step(x):
        grads = jax.grad(lambda params: (x @ params["w"]).mean())(state.params)
        state.apply_gradients(grads=grads)

    data = np.array([[30, 0], [30, 0], [0, 4], [0, 4]], np.float32)
    run_epoch(strategy, step, data, 4)
    # The mean is [15, 2]. Clipped first, it would be [0.5, 0.5].
    np.testing.assert_allclose(state.params["w"], [-0.9912, -0.1322], atol=5e-5)


@on_every_strategy
@pytest.mark.parametrize("aggregation", ["MEAN", "SUM"])
def test_regularization_counts_once(make_strategy, aggregation):
    """Row 4: the weight decay was added once for each replica."""
    strategy = make_strategy()
    state = linear(strategy, w=2.0)

    def step():
        def loss(params):
            penalty = 0.1 * params["w"] ** 2
            return (
                penalty if aggregation == "MEAN" else distrib.nn.scale_regularization_loss(penalty)
            )

        value, grads = jax.value_and_grad(loss)(state.params)
        state.apply_gradients(grads=grads, aggregation=aggregation)
        return value

    value = strategy.run(step)
    assert float(strategy.reduce(aggregation, value, axis=None)) == pytest.approx(0.4)
    assert float(state.params["w"]) == pytest.approx(1.96)


@on_two_replicas
def test_a_scaled_regularization_loss_is_half_on_two_replicas(make_strategy):
    """Row 4: the share of each of two replicas of 0.4 is 0.2."""
    strategy = make_strategy()
    shares = strategy.run(lambda: distrib.nn.scale_regularization_loss(jnp.asarray(0.4)))
    assert [float(share) for share in shares.values] == pytest.approx([0.2, 0.2])


@on_two_replicas
@pytest.mark.parametrize(
    ("inside", "aggregation"), [(None, "SUM"), ("SUM", "MEAN"), ("MEAN", "SUM")]
)
def test_gradient_of_a_loss_that_lies_on_one_replica(make_strategy, inside, aggregation):
    """Row 5: the gradient of a loss that was reduced already was off by N."""
    strategy = make_strategy()
    state = linear(strategy, w=1.0)

    def step(d):
        context = distrib.get_replica_context()

        def loss(params):
            own = ((params["w"] ** 2 + 1) * d).sum()
            return own if inside is None else context.all_reduce(inside, own)

        value, grads = jax.value_and_grad(loss)(state.params)
        state.apply_gradients(grads=grads, aggregation=aggregation)
        return value, context.all_reduce(aggregation, grads["w"])

    ((value, gradient),) = run_epoch(strategy, step, np.array([0, 1], np.float32), 2)
    assert [float(g) for g in gradient.values] == [2.0, 2.0]
    assert float(state.params["w"]) == pytest.approx(0.8)
    expected = {None: [0.0, 2.0], "SUM": [2.0, 2.0], "MEAN": [1.0, 1.0]}[inside]
    assert [float(part) for part in value.values] == expected


@on_two_replicas
@pytest.mark.parametrize(("op", "value", "gradient"), [("SUM", 3.0, 2.0), ("MEAN", 1.5, 1.0)])
def test_gradient_of_an_all_reduce(make_strategy, op, value, gradient):
    """Row 6: it is the all-reduce of the incoming gradients with the same op."""

    def step(x):
        reduce = distrib.get_replica_context().all_reduce
        return jax.value_and_grad(lambda x: reduce(op, x.sum()))(x)

    strategy = make_strategy()
    ((values, gradients),) = run_epoch(strategy, step, np.array([1, 2], np.float32), 2)
    assert [float(v) for v in values.values] == [value, value]
    assert [float(g[0]) for g in gradients.values] == [gradient, gradient]


@on_every_strategy
def test_gradient_accumulation(make_strategy):
    """Row 8: accumulation failed, because replicas met inside of a condition."""
    strategy = make_strategy()
    state = linear(strategy, optax.MultiSteps(optax.sgd(0.1), 2))

    def step(x):
        grads = jax.grad(lambda params: (params["w"] * x).mean())(state.params)
        state.apply_gradients(grads=grads)

    run_epoch(strategy, step, np.array([0, 0, 2, 2], np.float32), 4)  # The mean gradient is 1.
    assert float(state.params["w"]) == 0.0
    run_epoch(strategy, step, np.array([2, 2, 4, 4], np.float32), 4)  # It is 3.
    assert float(state.params["w"]) == pytest.approx(-0.2)


@on_every_strategy
def test_accumulated_steps_count_once_for_adam(make_strategy):
    """Row 8: Adam's bias correction counts real updates."""
    strategy = make_strategy()
    state = linear(strategy, optax.MultiSteps(optax.adam(0.1), 2))

    def step(x):
        grads = jax.grad(lambda params: (params["w"] * x).mean())(state.params)
        state.apply_gradients(grads=grads)

    run_epoch(strategy, step, np.array([1, 1, 1, 1, 3, 3, 3, 3], np.float32), 4)
    adam = state.opt_state.inner_opt_state[0]
    assert int(adam.count) == 1
    assert float(adam.mu["w"]) == pytest.approx(0.2)  # (1 - 0.9) times the mean of 1 and 3.
    assert float(state.params["w"]) == pytest.approx(-0.1, rel=1e-5)
