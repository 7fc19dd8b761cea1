"""Flax NNX modules and optimizers as arguments of a step."""

import functools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distrib
from distrib import errors
from tests.support.strategies import mirrored, on_every_strategy, on_two_replicas


class Model(nnx.Module):
    """A layer, normalisation, a layer."""

    def __init__(self, rngs, axis_name=None):
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, axis_name=axis_name, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def squared_error(model, x, y):
    return ((model(x)[:, 0] - y) ** 2).mean()


def training_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(squared_error)(model, x, y)
    optimizer.update(model, distrib.nn.mean_over_examples(grads))
    return loss


DATA = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
TARGETS = DATA.sum(1)


def values(module):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(module))]


def epoch(strategy, step, objects, batch_size, data=(DATA, TARGETS)):
    batches = strategy.experimental_distribute_dataset(data, batch_size=batch_size)
    return [strategy.run(step, args=(*objects, *batch)) for batch in batches]


@on_every_strategy
def test_training_is_that_of_one_device(make_strategy):
    reference = Model(nnx.Rngs(0))
    tx = optax.adam(1e-2)
    optimizer = nnx.Optimizer(reference, tx, wrt=nnx.Param)
    for _ in range(3):
        for start in (0, 4, 8):
            x, y = DATA[start : start + 4], TARGETS[start : start + 4]
            _, grads = nnx.value_and_grad(squared_error)(reference, x, y)
            optimizer.update(reference, grads)

    strategy = make_strategy()
    model = Model(nnx.Rngs(0), axis_name=distrib.REPLICA_AXIS)
    mine = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        epoch(strategy, training_step, (model, mine), 4)
    for a, b in zip(values(model), values(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(values(mine), values(optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert int(mine.step[...]) == 9
    strategy.extended.assert_mirrored(jax.tree.leaves(nnx.state((model, mine))))


@on_two_replicas
def test_batch_statistics_are_averaged(make_strategy):
    norm = nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
    strategy = make_strategy()
    data = np.array([[0], [2], [4], [6]], np.float32)
    epoch(strategy, lambda norm, x: norm(x), (norm,), 4, (data,))
    # Means 1 and 5, variances 1 and 1, as the moving average of 0 and 1 takes them up.
    assert float(norm.mean[...][0]) == pytest.approx(0.3)
    assert float(norm.var[...][0]) == pytest.approx(1.0)


@on_two_replicas
def test_dropout_differs_by_replica_and_step(make_strategy):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    strategy = make_strategy()

    def masks():
        result = strategy.run(lambda dropout: dropout(jnp.ones(1000)) == 0, args=(dropout,))
        return [np.asarray(part) for part in result.values]

    first, second = masks(), masks()
    for a, b in ((first[0], first[1]), (first[0], second[0]), (first[1], second[1])):
        assert 420 <= (a != b).sum() <= 580
    assert int(dropout.rngs.count[...]) == 2  # Once for a step.

    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(masks(), first)


@on_two_replicas
def test_a_forgotten_all_reduce_names_the_parameter(make_strategy):
    strategy = make_strategy()
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = values(model)

    def step(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(squared_error)(model, x, y))

    with pytest.raises(errors.VariableError) as raised:
        epoch(strategy, step, (model, optimizer), 12)
    message = str(raised.value)
    assert "differs by replica" in message
    assert any(name in message for name in ("first.kernel", "last.kernel", "norm.scale"))
    assert "distrib.nn.mean_over_examples(grads)" in message
    for a, b in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_on_one_replica_nothing_is_forgotten():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = values(model)

    def step(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(squared_error)(model, x, y))

    epoch(distrib.OneDeviceStrategy("CPU:0"), step, (model, optimizer), 12)
    assert any((a != b).any() for a, b in zip(values(model), before, strict=True))


@on_two_replicas
def test_one_program_for_all_steps_and_for_modules_alike(make_strategy):
    strategy = make_strategy()
    traces = []

    def step(model, optimizer, x, y):
        traces.append(model)
        return training_step(model, optimizer, x, y)

    models = [Model(nnx.Rngs(seed)) for seed in (0, 1)]
    optimizers = [nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            epoch(strategy, step, (model, optimizer), 4)
    # The transformation of an optimizer is part of its structure, and each has its own.
    assert len(traces) <= 2
    assert [int(optimizer.step[...]) for optimizer in optimizers] == [6, 6]


@on_two_replicas
def test_evaluation_changes_nothing(make_strategy):
    strategy = make_strategy()
    model = Model(nnx.Rngs(0))
    expected = nnx.view(model, use_running_average=True)(DATA)
    before = values(model)

    def predict(model, x, y):
        return nnx.view(model, use_running_average=True)(x)

    (result,) = epoch(strategy, predict, (model,), 12)
    np.testing.assert_allclose(strategy.gather(result, axis=0), expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


@on_two_replicas
def test_shared_modules_stay_shared(make_strategy):
    strategy = make_strategy()
    shared = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    pair = nnx.List([shared, shared])
    kernel = np.asarray(shared.kernel[...])

    def step(pair):
        pair[0].kernel[...] += 1.0
        return pair[1].kernel[...]

    result = strategy.run(step, args=(pair,))
    np.testing.assert_allclose(result.values[1], kernel + 1)
    np.testing.assert_allclose(shared.kernel[...], kernel + 1)


@on_two_replicas
def test_a_step_may_not_change_the_structure(make_strategy):
    strategy = make_strategy()
    model = Model(nnx.Rngs(0))

    def step(model):
        model.extra = nnx.Param(jnp.zeros(3))

    with pytest.raises(errors.OutputError, match="added or removed variables of an NNX module"):
        strategy.run(step, args=(model,))
    assert not hasattr(model, "extra")


@on_two_replicas
def test_the_last_uneven_batch(make_strategy):
    strategy = make_strategy()
    model = Model(nnx.Rngs(0), axis_name=distrib.REPLICA_AXIS)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    epoch(strategy, training_step, (model, optimizer), 8, (DATA[:11], TARGETS[:11]))
    assert int(optimizer.step[...]) == 2
    assert all(np.isfinite(leaf).all() for leaf in values(model))
    strategy.extended.assert_mirrored(jax.tree.leaves(nnx.state((model, optimizer))))


def test_a_module_in_a_tree_of_arguments():
    strategy = mirrored(2)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    arguments = {"model": model, "scale": 2.0}
    result = strategy.run(
        lambda inputs, x: inputs["model"](x) * inputs["scale"], args=(arguments, jnp.ones((1, 3)))
    )
    np.testing.assert_allclose(result.values[0], 2 * model(jnp.ones((1, 3))), rtol=1e-6)


def test_an_object_that_is_found_by_name_is_refused():
    """Its values would be constants of the program, stale after the next change."""
    strategy = mirrored(2)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    table = {"model": model}

    class Trainer:
        def __init__(self):
            self.model = model

        def step(self, x):
            return self.model(x).sum()

    def helper(x):
        return (lambda: table["model"](x))().sum()

    def default(x, m=model):
        return m(x).sum()

    partial = functools.partial(lambda m, x: m(x).sum(), model)
    trainer = Trainer()
    for step in (lambda x: model(x).sum(), trainer.step, helper, default, partial):
        with pytest.raises(errors.VariableError, match=r"NNX Linear.*args=\(model, ...\)"):
            strategy.run(step, args=(jnp.ones((1, 2)),))


def test_an_object_that_is_found_by_name_cannot_be_changed():
    strategy = mirrored(2)
    count = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    with pytest.raises(flax.errors.TraceContextError) as caught:
        strategy.run(lambda x: count(x), args=(jnp.ones((3, 2)),))
    assert any("args=(model, optimizer, ...)" in note for note in caught.value.__notes__)


def test_gradients_weighted_by_examples_on_an_uneven_batch():
    """Y = w * x, x = 1, 2, 6 on two replicas: the gradient of the mean is 3."""
    strategy = mirrored(2)
    (batch,) = strategy.experimental_distribute_dataset([np.array([[1.0], [2.0], [6.0]])])
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.zeros((1, 1))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: model(x).mean())(model)
        optimizer.update(model, distrib.nn.mean_over_examples(grads))

    strategy.run(step, args=(model, optimizer, batch))
    np.testing.assert_allclose(model.kernel[...], [[-3.0]])
