"""How often a step is compiled, and how long its program lives."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.engines.cache import what_changed
from distrib.engines.signature import Kind
from tests.support.strategies import mirrored, on_every_strategy, on_two_replicas


@pytest.fixture
def warnings(caplog):
    """The warnings that distrib logs, as text."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == "absl"]


def counted(fn):
    """Return ``fn`` and a list that grows whenever it is traced."""
    traces = []

    def step(*args, **kwargs):
        traces.append(args)
        return fn(*args, **kwargs)

    return step, traces


# Once for one function and set of shapes.


@on_every_strategy
def test_numbers_among_the_arguments(make_strategy):
    strategy = make_strategy()
    step, traces = counted(lambda x, i: x.sum() + i)
    for i in range(10):
        strategy.run(step, args=(jnp.ones(3), i))
    assert len(traces) == 1
    strategy.run(step, args=(jnp.ones(3), 0.5))
    assert len(traces) == 2  # A float where an int was.
    strategy.run(step, args=(jnp.ones(3), 1.5))
    assert len(traces) == 2


@on_two_replicas
def test_shapes_dtypes_and_structures(make_strategy):
    strategy = make_strategy()
    step, traces = counted(lambda x: jax.tree.map(jnp.sum, x))
    arguments = [
        jnp.ones(3),
        jnp.ones(4),
        jnp.ones(3, jnp.int32),
        {"a": jnp.ones(3)},
        {"b": jnp.ones(3)},
        [jnp.ones(3)],
    ]
    for _ in range(2):
        for argument in arguments:
            strategy.run(step, args=(argument,))
    assert len(traces) == len(arguments)


@on_two_replicas
def test_constants_are_part_of_the_program(make_strategy):
    strategy = make_strategy()
    step, traces = counted(lambda x, train, name=None: x * (2 if train else 3))
    results = [
        strategy.run(step, args=(jnp.ones(()), train), kwargs={"name": name})
        for train in (True, False, True)
        for name in ("a", "b")
    ]
    assert len(traces) == 4
    assert [float(result.values[1]) for result in results] == [2, 2, 3, 3, 2, 2]


@on_two_replicas
def test_keywords_in_any_order(make_strategy):
    strategy = make_strategy()
    step, traces = counted(lambda a, b: a - b)
    strategy.run(step, kwargs={"a": 3.0, "b": 1.0})
    result = strategy.run(step, kwargs={"b": 1.0, "a": 3.0})
    assert float(result.values[0]) == 2.0
    assert len(traces) == 1


def test_a_method_is_one_function():
    class Model:
        traces = 0

        def step(self, x):
            self.traces += 1
            return x + 1

    strategy = mirrored(2)
    model, other = Model(), Model()
    for _ in range(3):
        strategy.run(model.step, args=(1.0,))
    assert model.traces == 1
    strategy.run(other.step, args=(1.0,))
    assert (model.traces, other.traces) == (1, 1)


def test_two_strategies_have_their_own_programs():
    step, traces = counted(lambda x: x + distrib.get_replica_context().num_replicas_in_sync)
    values = [mirrored(n).run(step, args=(jnp.ones(2),)) for n in (1, 2)]
    assert float(values[0][0]) == 2.0
    assert float(values[1].values[0][0]) == 3.0
    assert len(traces) == 2


def test_compiled_text_makes_the_program_that_run_uses():
    strategy = mirrored(2)
    step, traces = counted(lambda x: distrib.get_replica_context().all_reduce("SUM", x))
    assert "all-reduce" in strategy.extended.compiled_text(step, (jnp.ones(2),))
    strategy.run(step, args=(jnp.ones(2),))
    assert len(traces) == 1


# What is not kept alive.


def state_of(strategy):
    with strategy.scope():
        return distrib.TrainState.create(apply_fn=None, params={"w": 1.0}, tx=optax.adam(0.1))


def training_step(state):
    def step(x):
        state.apply_gradients(grads=jax.grad(lambda p: (p["w"] * x).mean())(state.params))
        return state.params["w"]

    return step


@on_every_strategy
def test_a_dead_function_is_not_kept_alive(make_strategy):
    strategy = make_strategy()
    state = state_of(strategy)
    step = training_step(state)
    strategy.run(step, args=(jnp.ones(2),))
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None


@on_every_strategy
def test_a_dead_state_is_not_kept_alive(make_strategy):
    strategy = make_strategy()
    state = state_of(strategy)
    step = training_step(state)
    strategy.run(step, args=(jnp.ones(2),))
    variables = [weakref.ref(v) for v in state.distributed_variables()]
    alive = weakref.ref(state)
    del state, step
    gc.collect()
    assert alive() is None
    assert [ref() for ref in variables if ref() is not None] == []


@on_every_strategy
def test_a_state_that_was_an_argument_is_not_kept_alive_by_its_step(make_strategy):
    strategy = make_strategy()

    def step(state, x):
        state.apply_gradients(grads=jax.grad(lambda p: (p["w"] * x).mean())(state.params))

    arrays = []
    for _ in range(2):
        state = state_of(strategy)
        strategy.run(step, args=(state, jnp.ones(2)))
        np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-5)
        arrays.append(weakref.ref(state.distributed_variables()[0].storage.cell.array))
        alive = weakref.ref(state)
        del state
        gc.collect()
        assert alive() is None
    assert [ref() for ref in arrays if ref() is not None] == []


@on_two_replicas
def test_arguments_and_results_are_not_kept_alive(make_strategy):
    strategy = make_strategy()

    def step(x):
        return x + 1

    (batch,) = strategy.experimental_distribute_dataset(np.ones(4, np.float32), batch_size=4)
    result = strategy.run(step, args=(batch,))
    alive = [weakref.ref(batch.whole), weakref.ref(result.whole)]
    del batch, result
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


def test_a_strategy_that_is_dropped_goes():
    strategy = mirrored(2)
    state = state_of(strategy)
    strategy.run(training_step(state), args=(jnp.ones(2),))
    alive = weakref.ref(strategy)
    del strategy, state
    gc.collect()
    assert alive() is None


# The warning.


def test_a_new_lambda_each_time(warnings):
    strategy = mirrored(2)
    for i in range(7):
        result = strategy.run(lambda x: x + 1, args=(float(i),))
        assert float(result.values[0]) == i + 1
    (message,) = warnings()
    assert "has been compiled 5 times" in message
    assert "test_cache.py" in message
    assert "it is a new function object each time" in message
    assert "Define it once" in message


def test_shapes_that_change(warnings):
    strategy = mirrored(2)

    def step(x):
        return x.sum()

    for n in range(1, 5):
        strategy.run(step, args=(jnp.ones(n),))
    assert warnings() == []
    strategy.run(step, args=(jnp.ones(5),))
    (message,) = warnings()
    assert "test_shapes_that_change.<locals>.step" in message
    assert "compiled 5 times. argument leaf 0 was everywhere (4,), float32" in message
    assert "and is everywhere (5,), float32" in message
    assert "pad, or drop the last batch" in message
    for n in range(6, 9):
        strategy.run(step, args=(jnp.ones(n),))
    assert len(warnings()) == 1


def test_a_constant_that_changes(warnings):
    strategy = mirrored(2)

    def step(x, name):
        return x

    for i in range(5):
        strategy.run(step, args=(1.0, f"batch {i}"))
    (message,) = warnings()
    assert "argument leaf 1 was object 'batch 3' and is object 'batch 4'" in message


def test_what_changed_of_structures():
    leaf = ((Kind.EVERYWHERE, float),)
    one, two = jax.tree.structure([0]), jax.tree.structure([0, 0])
    text = what_changed([(one, leaf, None), (two, leaf * 2, None)])
    assert text == f"The structure of its arguments changed from {one} to {two}."


def test_what_changed_of_options():
    structure = jax.tree.structure(1)
    text = what_changed([(structure, (), None, True, None), (structure, (), None, True, 3)])
    assert text.startswith("Its RunOptions changed, checks of its numbers were turned on or off,")


# Functions that cannot be remembered.


def test_a_callable_without_a_hash():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    step, strategy = Unhashable(), mirrored(2)
    for value in (1.0, 2.0):
        assert float(strategy.run(step, args=(value,)).values[0]) == value
