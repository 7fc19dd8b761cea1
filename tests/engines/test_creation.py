"""Variables that are created inside ``run``; numbers of tf.distribute 2.21."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.errors import ContextError, MeetingError, NestedTraceError, VariableError
from distrib.variables import live_variables
from tests.support.strategies import mirrored, on_every_strategy

NONE, MEAN, SUM = (distrib.VariableAggregation[name] for name in ("NONE", "MEAN", "SUM"))
ON_READ = distrib.VariableSynchronization.ON_READ
ON_WRITE = distrib.VariableSynchronization.ON_WRITE


class Lazy:
    """A model that creates its variable at the first call."""

    def __init__(self, **kwargs):
        self.kwargs = {"name": "lazy", **kwargs}
        self.v = None
        self.traces = 0

    def step(self, x):
        self.traces += 1
        if self.v is None:
            self.v = distrib.Variable(x * 10.0, **self.kwargs)
        self.v.assign_add(x)
        return self.v.value()


def numbers(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(c.replica_id_in_sync_group + 1)
    )


def local(strategy, value):
    return [float(x) for x in strategy.experimental_local_results(value)]


@pytest.mark.parametrize(
    ("synchronization", "aggregation", "first", "second"),
    [
        (ON_WRITE, NONE, [11, 12], [12, 14]),
        (ON_WRITE, MEAN, [11.5, 11.5], [13, 13]),
        (ON_READ, SUM, [11, 12], [12, 14]),
    ],
    ids=["NONE", "MEAN", "ON_READ"],
)
def test_one_variable_from_the_value_of_replica_0(
    engine, synchronization, aggregation, first, second
):
    strategy = mirrored(2)
    model = Lazy(synchronization=synchronization, aggregation=aggregation)
    for expected in (first, second):
        result = strategy.run(model.step, args=(numbers(strategy),))
        assert local(strategy, result) == expected
        assert [float(c) for c in model.v.values] == expected
    assert model.v.distribute_strategy is strategy
    assert live_variables(strategy) == [model.v]


@on_every_strategy
def test_under_every_strategy(make_strategy, engine):
    strategy = make_strategy()
    n = strategy.num_replicas_in_sync
    model = Lazy(aggregation=MEAN)
    mean = (n + 1) / 2
    for i in range(1, 4):
        result = strategy.run(model.step, args=(numbers(strategy),))
        assert local(strategy, result) == [10 + i * mean] * n
    strategy.extended.assert_mirrored(model.v)
    if engine == "compiled":
        assert model.traces == 2  # The step that creates, and the one that all others are.


def test_whole_layers_and_train_states(engine):
    strategy = mirrored(2)
    box = []

    def step(x):
        if not box:
            box.append(
                distrib.TrainState.create(
                    apply_fn=None,
                    params={"w": jnp.ones(3)},
                    tx=optax.sgd(0.5, momentum=0.9),
                )
            )
        (state,) = box
        grads = jax.grad(lambda p: (p["w"] * x).sum())({"w": state.params["w"]})
        state.apply_gradients(grads=grads)
        return state.step

    for _ in range(3):
        strategy.run(step, args=(numbers(strategy),))
    # The mean gradient is 1.5, with momentum 1, 1.9, 2.71 times.
    np.testing.assert_allclose(box[0].params["w"], 1 - 0.5 * 1.5 * 5.61 * np.ones(3), rtol=1e-6)
    assert int(box[0].step) == 3


def test_a_variable_of_a_merge_function(engine):
    strategy = mirrored(2)
    box = []

    def merge(current, x):
        if not box:
            box.append(distrib.Variable(current.reduce("SUM", x, axis=None)))
        return box[0].assign_add(1.0)

    def step(x):
        return distrib.get_replica_context().merge_call(merge, args=(x,))

    assert local(strategy, strategy.run(step, args=(numbers(strategy),))) == [4, 4]
    assert local(strategy, strategy.run(step, args=(numbers(strategy),))) == [5, 5]


def test_what_is_not_an_array(engine):
    strategy = mirrored(2)
    with strategy.scope():
        other = distrib.Variable([1.0, 2.0])
    box = []

    def step():
        if not box:
            box.append(distrib.Variable(lambda: jnp.arange(2)))
            box.append(distrib.Variable(other))
            box.append(distrib.Variable(True))

    strategy.run(step)
    assert [v.numpy().tolist() for v in box] == [[0, 1], [1, 2], True]
    assert [str(v.dtype) for v in box] == ["int32", "float32", "bool"]


def test_a_function_that_creates_at_every_trace_is_told_how():
    strategy = mirrored(2)
    made = []

    def step(x):
        made.append(distrib.Variable(x, name="late"))
        return made[-1].value()

    strategy.run(step, args=(1.0,))
    message = "'late' was created inside strategy.run by a function that has .*if self.v is None"
    with pytest.raises(ContextError, match=message):
        strategy.run(step, args=(1.0,))
    assert live_variables(strategy) == made[:1]
    assert float(made[0].numpy()) == 1.0


def test_a_step_that_fails_leaves_a_variable_that_says_so():
    strategy = mirrored(2)
    model = Lazy(aggregation=MEAN)

    def step(x):
        model.step(x)
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        strategy.run(step, args=(1.0,))
    assert live_variables(strategy) == []
    for use in (model.v.numpy, lambda: model.v.assign(1.0), lambda: strategy.run(model.v.value)):
        with pytest.raises(VariableError, match="'lazy' was created .* by a step that failed"):
            use()
    model.v = None
    strategy.run(model.step, args=(numbers(strategy),))
    assert float(model.v.numpy()) == 11.5


def test_a_step_whose_program_fails_leaves_a_variable_that_says_so():
    strategy = mirrored(1)
    box = []

    def fail(x):
        raise RuntimeError("in a callback")

    def step(x):
        box.append(distrib.Variable(x, name="late"))
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(Exception, match="in a callback"):
        strategy.run(step, args=(1.0,))
    with pytest.raises(VariableError, match="'late' was created .* by a step that failed"):
        box[0].numpy()


def test_eagerly_a_step_that_fails_leaves_the_first_value(eagerly):
    strategy = mirrored(2)
    model = Lazy(aggregation=MEAN)

    def step(x):
        model.step(x)
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        strategy.run(step, args=(numbers(strategy),))
    assert [float(c) for c in model.v.values] == [10, 10]


def test_eager_replicas_create_the_same_variables(eagerly):
    strategy = mirrored(2)

    def names_differ():
        i = int(distrib.get_replica_context().replica_id_in_sync_group)
        return distrib.Variable(1.0, name=f"v{i}").value()

    def second_only():
        if int(distrib.get_replica_context().replica_id_in_sync_group) == 1:
            return distrib.Variable(1.0).value()
        return jnp.float32(0)

    with pytest.raises(MeetingError, match="variable 'v1' where replica 0 created 'v0'"):
        strategy.run(names_differ)
    with pytest.raises(MeetingError, match="Replica 1 creates a variable that replica 0 does not"):
        strategy.run(second_only)


def test_where_no_variable_can_be_created(engine):
    strategy = mirrored(2)

    def inside(x):
        return distrib.Variable(x, name="late") + 1.0

    with pytest.raises(NestedTraceError, match="'late' was created inside a JAX transformation"):
        strategy.run(lambda x: jax.jit(inside)(x), args=(numbers(strategy),))
    with strategy.scope():
        v = distrib.Variable(1.0, name="v")
    with pytest.raises(ContextError, match="'v' was copied inside strategy.run"):
        strategy.run(lambda: copy.deepcopy(v).value())


def test_where_no_compiled_step_can_create_one():
    strategy = mirrored(2)
    uneven = distrib.PerReplica([jnp.ones(2), jnp.ones(1)])
    with pytest.raises(ContextError, match="'late' was created .* batches of unequal sizes"):
        strategy.run(lambda x: distrib.Variable(0.0, name="late") + x, args=(uneven,))
    with pytest.raises(ContextError, match="looked at before it was run for the first time"):
        strategy.extended.compiled_text(lambda: distrib.Variable(0.0, name="late").value())
    foreign = distrib.Variable(1.0, name="foreign")
    with pytest.raises(ContextError, match="'late' .* use 'foreign' of another strategy"):
        strategy.run(lambda: distrib.Variable(0.0, name="late") + foreign)
    assert live_variables(strategy) == []


def test_a_created_variable_dies_with_its_model():
    strategy = mirrored(2)
    model = Lazy(aggregation=MEAN)
    for _ in range(2):
        strategy.run(model.step, args=(numbers(strategy),))
    gone = weakref.ref(model.v)
    del model
    gc.collect()
    assert gone() is None


def test_the_error_of_a_step_that_created_an_array_comes_out(engine):
    """To forget the variable, it used to be compared with the others, element by element."""
    strategy = mirrored(2)
    holder = {}

    def step():
        holder["v"] = distrib.Variable(jnp.zeros(3), name="v")
        distrib.Variable(jnp.zeros(3), name="w")
        return jnp.ones(2) @ jnp.ones(5)

    with pytest.raises(TypeError, match="dot_general"):
        strategy.run(step)
    if engine == "compiled":
        assert "without a value" in repr(holder["v"])
