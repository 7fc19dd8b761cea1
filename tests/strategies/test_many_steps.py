"""Several steps in one call, by ``RunOptions`` and by ``train_loop``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distrib
from distrib.errors import NonFiniteError, OutOfRangeError, OutputError, VariableError
from tests.support.strategies import central, mirrored, on_every_strategy, on_two_replicas

SUM = distrib.VariableAggregation.SUM
DATA = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)


def trained(strategy, run_epoch):
    """Train for two epochs of 4, 4, 4, 4, 4, 2 examples and return losses and state."""
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None,
            params={"w": jnp.ones(3), "b": 0.0},
            tx=optax.adam(0.1),
            keys={"noise": jax.random.key(0)},
        )

    def step(x):
        noise = jax.random.normal(state.keys["noise"]) * 0.0  # Drawn, so that the step counts.
        loss = lambda p: ((x @ p["w"] + p["b"] + noise - 1) ** 2).mean()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        state.apply_gradients(grads=grads)
        return value, state.step

    dataset = strategy.experimental_distribute_dataset(DATA, batch_size=4)
    results = [r for _ in range(2) for r in run_epoch(step, dataset)]
    return results, state


def one_by_one(strategy):
    return lambda step, dataset: [strategy.run(step, args=(batch,)) for batch in dataset]


def by_threes(step, dataset):
    iterator = iter(dataset)
    return [distrib.train_loop(step, iterator, 4), distrib.train_loop(step, iterator, 4)]


@on_every_strategy
def test_many_steps_are_the_same_steps(make_strategy, engine):
    strategy = make_strategy()
    single, one = trained(strategy, one_by_one(strategy))
    several, many = trained(strategy, by_threes)
    for name in ("w", "b"):
        np.testing.assert_allclose(many.params[name], one.params[name], rtol=1e-5, atol=1e-6)
    assert int(many.step) == int(one.step) == 12
    strategy.extended.assert_mirrored(many)
    local = strategy.experimental_local_results
    for replica in range(strategy.num_replicas_in_sync):
        losses = np.concatenate([local(r[0])[replica] for r in several])
        expected = [float(local(r[0])[replica]) for r in single]
        assert [len(local(r[0])[replica]) for r in several] == [4, 2, 4, 2]
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)
        counts = np.concatenate([local(r[1])[replica] for r in several])
        assert counts.tolist() == list(range(1, 13))


def test_equal_steps_are_one_program_with_one_loop():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(0.0, aggregation=SUM)
    traced = []

    def step(x):
        traced.append(1)
        v.assign_add(x.sum())
        return v.value()

    dataset = strategy.experimental_distribute_dataset(np.arange(24.0), batch_size=2)
    iterator = iter(dataset)
    for expected in ([1, 6, 15], [28, 45, 66], [91, 120, 153]):
        result = distrib.train_loop(step, iterator, 3)
        assert [p.tolist() for p in result.values] == [expected] * 2
    assert traced == [1]


def test_the_end_of_the_data():
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(np.arange(6.0), batch_size=2)
    iterator = iter(dataset)
    result = distrib.train_loop(lambda x: x.sum(), iterator, 5)
    assert [p.tolist() for p in result.values] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(OutOfRangeError, match=r"is at its end: no step was run.*iter\(dataset\)"):
        distrib.train_loop(lambda x: x.sum(), iterator, 5)
    with pytest.raises(TypeError, match="would begin it anew"):
        strategy.run(lambda x: x, (dataset,), options=distrib.RunOptions(steps_per_call=2))
    with pytest.raises(TypeError, match="was given a DistributedDataset to draw batches from"):
        distrib.train_loop(lambda x: x, dataset, 2)
    with pytest.raises(ValueError, match="steps_per_call is 0"):
        distrib.train_loop(lambda x: x, iter(dataset), 0)


@on_every_strategy
def test_a_single_step_of_an_iterator(make_strategy, engine):
    strategy = make_strategy()
    dataset = strategy.experimental_distribute_dataset(np.arange(8.0), batch_size=4)
    iterator = iter(dataset)
    total = lambda x: distrib.get_replica_context().all_reduce("SUM", x.sum())  # noqa: E731
    one = distrib.RunOptions(steps_per_call=1)
    results = [
        distrib.train_loop(total, iterator, 1),
        strategy.run(total, args=(iterator,), options=one),
    ]
    for result, expected in zip(results, [[6], [22]], strict=True):
        for part in strategy.experimental_local_results(result):
            assert part.tolist() == expected
    with pytest.raises(OutOfRangeError, match="is at its end"):
        distrib.train_loop(total, iterator, 1)


def test_outputs_that_cannot_be_joined_are_refused_before_any_step():
    for strategy in (mirrored(2), central(2), distrib.OneDeviceStrategy("CPU:0")):
        with strategy.scope():
            v = distrib.Variable(0.0, aggregation=SUM)

        def step(x, v=v):
            v.assign_add(jnp.float32(1))
            return x

        dataset = strategy.experimental_distribute_dataset(np.arange(5.0), batch_size=2)
        with pytest.raises(OutputError, match="cannot be joined. No step was run"):
            distrib.train_loop(step, iter(dataset), 3)
        assert float(v) == 0


def test_variables_of_steps_that_are_not_run_are_abandoned():
    strategy = central(2)
    made = []

    def step(x):
        if not made:
            made.append(distrib.Variable(1.0, name="made"))
        return x

    dataset = strategy.experimental_distribute_dataset(np.arange(5.0), batch_size=2)
    with pytest.raises(OutputError, match="No step was run"):
        distrib.train_loop(step, iter(dataset), 3)
    with pytest.raises(VariableError, match="'made' was created inside strategy.run by a step tha"):
        made[0].value()


@on_two_replicas
def test_an_error_says_which_steps_stand(make_strategy, engine):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(0.0, aggregation=SUM)

    def step(x):
        v.assign_add(x.sum())

    def losses(*batches):
        data = [np.float32(batch) for batch in batches]
        dataset = strategy.experimental_distribute_dataset(data)
        with pytest.raises(NonFiniteError, match="no variable was changed") as caught:
            distrib.train_loop(step, iter(dataset), 4)
        return " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    one_program = engine == "compiled" and isinstance(strategy, distrib.MirroredStrategy)
    distrib.config.enable_check_numerics()
    try:
        notes = losses([1, 2], [3, 4], [5, np.nan])
        if one_program:
            assert "Step 2 (from 0) of the 3 of a call" in notes
            assert "stand" not in notes
        else:
            assert "that were run before, and stand: 2" in notes
        assert float(v) == (0 if one_program else 10)
        v.assign(0.0)
        # The last, of another shape, is a program of its own.
        assert "that were run before, and stand: 2" in losses([1, 2], [3, 4], [np.nan])
        assert float(v) == 10
    finally:
        distrib.config.disable_check_numerics()


def test_arguments_that_stay_and_nnx_objects(engine):
    strategy = mirrored(2)
    layer = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((1, 1)))
    optimizer = nnx.Optimizer(layer, optax.sgd(0.5), wrt=nnx.Param)

    def step(layer, optimizer, batch, factor, name):
        assert name == "text"
        grads = nnx.grad(lambda m: m(batch["x"][:, None]).mean())(layer)
        optimizer.update(layer, distrib.nn.mean_over_examples(grads))
        return layer.kernel[...][0, 0] * factor, name

    data = {"x": np.float32([1, 2, 3, 4, 5, 6])}
    iterator = iter(strategy.experimental_distribute_dataset(data, batch_size=2))
    kernels, name = strategy.run(
        step,
        args=(layer, optimizer, iterator),
        kwargs={"factor": 10, "name": "text"},
        options=distrib.RunOptions(steps_per_call=3),
    )
    # Gradients are the means of the batches: 1.5, 3.5, 5.5.
    for part in kernels.values:
        np.testing.assert_allclose(part, [2.5, -15, -42.5], rtol=1e-5)
    assert name == "text"
    assert float(layer.kernel[...][0, 0]) == pytest.approx(-4.25)
    assert int(optimizer.step[...]) == 3


def test_without_an_iterator_each_step_has_the_same_arguments(engine):
    for strategy in (mirrored(2), central(2), distrib.OneDeviceStrategy("CPU:1")):
        with strategy.scope():
            v = distrib.Variable(1.0, aggregation=distrib.VariableAggregation.MEAN)
        options = distrib.RunOptions(steps_per_call=3)
        result = strategy.run(lambda x, v=v: v.assign(v * x), args=(2.0,), options=options)
        for part in strategy.experimental_local_results(result):
            assert part.tolist() == [2, 4, 8]
        assert float(v) == 8


def test_the_default_strategy_and_functions_of_a_dataset():
    strategy = distrib.get_strategy()
    iterator = iter(strategy.experimental_distribute_dataset(np.arange(6.0), batch_size=2))
    assert distrib.train_loop(lambda x: x.sum(), iterator, 3).tolist() == [1, 5, 9]
    strategy = mirrored(2)
    dataset = strategy.distribute_datasets_from_function(lambda _: [np.ones(2), np.ones(2)] * 2)
    result = distrib.train_loop(lambda x: x.sum(), iter(dataset), 2)
    assert [p.tolist() for p in result.values] == [[2, 2]] * 2


def test_what_is_no_options_is_refused():
    strategy = mirrored(2)
    with pytest.raises(TypeError, match=r"options of type dict: pass distrib\.RunOptions"):
        strategy.run(lambda: 1, options={"steps_per_call": 2})
