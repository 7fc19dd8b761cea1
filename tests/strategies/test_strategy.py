"""What every strategy does: run, reduce, gather, scope, and what it refuses."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import ContextError, NestedTraceError, OutputError, TracedValueError
from tests.conformance.table import central, context, mirrored, rid, values, variable

on_each = pytest.mark.parametrize(
    "make",
    [mirrored, central, lambda: distrib.OneDeviceStrategy("CPU:1")],
    ids=["Mirrored", "CentralStorage", "OneDevice"],
)
on_two = pytest.mark.parametrize("make", [mirrored, central], ids=["Mirrored", "CentralStorage"])


@on_each
def test_run_compiles_once_for_one_function_and_set_of_shapes(make):
    strategy = make()
    v = variable(strategy, 0.0, aggregation=distrib.VariableAggregation.MEAN)
    traced = []

    def step(x, k, scale=1.0):
        traced.append(1)
        v.assign_add(x.sum() * k * scale)

    for i in range(4):
        strategy.run(step, args=(jnp.full(3, float(i)), i), kwargs={"scale": 0.5})
    assert len(traced) == 1
    # 3 * (0 + 1 + 4 + 9) * 0.5
    assert float(v.numpy()) == 21.0
    strategy.run(step, args=(jnp.ones(4), 1), kwargs={"scale": 0.5})
    assert len(traced) == 2


@on_each
def test_run_of_a_jitted_function(make):
    strategy = make()
    v = variable(strategy, 1.0, aggregation=distrib.VariableAggregation.MEAN)

    @jax.jit
    def step(x):
        v.assign_add(x)
        return v.value()

    result = strategy.run(step, args=(jnp.float32(2),))
    assert float(strategy.experimental_local_results(result)[0]) == 3.0
    assert float(v.numpy()) == 3.0


@on_each
def test_constants_among_the_arguments(make):
    strategy = make()

    def step(x, mode, flag, nothing):
        assert nothing is None
        return x * 2 if mode == "double" and flag else x

    def first(*args):
        return float(strategy.experimental_local_results(strategy.run(step, args=args))[0])

    assert first(jnp.float32(3), "double", True, None) == 6.0
    assert first(jnp.float32(3), "double", False, None) == 3.0
    assert first(jnp.float32(3), "single", True, None) == 3.0


@on_two
def test_constants_and_variables_come_back_as_they_are(make):
    strategy = make()
    v = variable(strategy, 1.0)
    result = strategy.run(lambda: {"v": v, "text": "x", "n": 3, "none": None, "a": jnp.ones(2)})
    assert result["v"] is v
    assert (result["text"], result["n"], result["none"]) == ("x", 3, None)
    assert isinstance(result["a"], distrib.PerReplica)


@on_two
def test_per_replica_mirrored_and_plain_arguments(make):
    strategy = make()
    v = variable(mirrored(), 100.0)
    copies = v.assign(200.0)
    x = values(strategy, lambda i: jnp.float32(i))

    def step(x, copies, y):
        return x + copies + y["z"][0]

    result = strategy.run(step, args=(x, copies, {"z": [np.float32(5)]}))
    assert [float(part) for part in result.values] == [205.0, 206.0]


@on_two
def test_what_run_returned_is_an_argument_of_the_next_run(make):
    strategy = make()
    x = strategy.run(lambda: rid() * jnp.ones(2))
    y = strategy.run(lambda x: x + 1, args=(x,))
    assert [part.tolist() for part in y.values] == [[1.0, 1.0], [2.0, 2.0]]


@on_two
def test_a_branch_on_the_replica_id(make):
    def step():
        return 1.0 if context().replica_id_in_sync_group == 0 else 2.0

    with pytest.raises(TracedValueError, match="Choose with jnp.where or jax.lax.cond"):
        make().run(step)


@on_each
def test_a_step_that_raises(make):
    strategy = make()
    v = variable(strategy, 1.0, aggregation=distrib.VariableAggregation.MEAN)

    def step(fail):
        v.assign_add(jnp.float32(1))
        if fail:
            raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        strategy.run(step, args=(True,))
    assert float(v.numpy()) == 1.0
    strategy.run(step, args=(False,))
    assert float(v.numpy()) == 2.0


@on_each
def test_an_output_that_is_not_an_array(make):
    with pytest.raises(OutputError, match=r"returned .*object.* at .*bad.* which is not an array"):
        make().run(lambda: {"good": jnp.ones(1), "bad": object()})


@on_each
def test_an_argument_that_is_neither_array_nor_hashable(make):
    class Unhashable:
        __hash__ = None

    with pytest.raises(TypeError, match="got an argument of type Unhashable"):
        make().run(lambda x: 1.0, args=(Unhashable(),))


@on_each
def test_run_inside_a_transformation(make):
    strategy = make()
    with pytest.raises(NestedTraceError, match="put jax.jit or jax.grad inside the function"):
        jax.jit(lambda x: strategy.run(lambda y: y, args=(x,)))(1.0)


@on_each
def test_a_dead_function_is_not_kept(make):
    strategy = make()

    def step():
        return jnp.float32(1)

    strategy.run(step)
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


@on_each
def test_a_bound_method(make):
    strategy = make()

    class Trainer:
        def __init__(self):
            self.v = variable(strategy, 1.0, aggregation=distrib.VariableAggregation.MEAN)
            self.traced = 0

        def step(self, x):
            self.traced += 1
            self.v.assign_add(x)

    trainer = Trainer()
    for _ in range(3):
        strategy.run(trainer.step, args=(jnp.float32(2),))
    assert (float(trainer.v.numpy()), trainer.traced) == (7.0, 1)


@on_each
def test_a_method_of_a_variable(make):
    strategy = make()
    for initial in ([1.0, 2.0], [1.0, 2.0], [3.0, 4.0]):
        v = variable(strategy, initial)
        for _ in range(2):
            result = strategy.experimental_local_results(strategy.run(v.value))[-1]
            np.testing.assert_array_equal(result, initial)


@on_each
def test_a_constant_that_a_step_returns_or_assigns(make):
    """A Python number becomes a literal of the program, which is no array while it is lowered."""
    strategy = make()
    v = variable(strategy, 3.0, aggregation=distrib.VariableAggregation.MEAN)
    w = variable(
        strategy,
        3.0,
        synchronization=distrib.VariableSynchronization.ON_READ,
        aggregation=distrib.VariableAggregation.MEAN,
    )

    def step():
        w.assign(2.0)
        return v.assign(1.0)

    result = strategy.run(step)
    assert [float(x) for x in strategy.experimental_local_results(result)][-1] == 1.0
    assert (float(v.numpy()), float(w.numpy())) == (1.0, 2.0)


@on_two
def test_merge_call_updates_variables(make):
    strategy = make()
    v = variable(strategy, 1.0)

    def merge(current, gradient):
        total = current.reduce("SUM", gradient, axis=None)
        current.extended.update(v, lambda w, g: w.assign_sub(0.1 * g), args=(total,))

    strategy.run(lambda: context().merge_call(merge, args=(rid() + 1,)))
    assert float(v.numpy()) == pytest.approx(0.7)
    strategy.extended.assert_mirrored(v)


def test_scopes_of_two_strategies_do_not_mix():
    with mirrored().scope(), pytest.raises(ContextError, match="Mixing different"):
        with mirrored().scope():
            pass


def test_no_scope_in_a_step():
    strategy = mirrored()

    def step():
        with strategy.scope():
            pass

    with pytest.raises(ContextError, match="enter the scope outside of strategy.run"):
        strategy.run(step)


@on_each
def test_another_strategy_in_a_step(make):
    strategy, other = make(), mirrored()
    with pytest.raises(ContextError, match="Mixing different"):
        strategy.run(lambda: other.reduce("SUM", jnp.ones(1), axis=0))


@on_two
def test_experimental_local_results_of_trees(make):
    strategy = make()
    x = values(strategy, lambda i: i)
    assert strategy.experimental_local_results({"a": x, "b": 5}) == (
        {"a": 0, "b": 5},
        {"a": 1, "b": 5},
    )
    assert strategy.experimental_local_results(x) == (0, 1)
    assert strategy.experimental_local_results("text") == ("text",)


@on_each
def test_compiled_text(make):
    strategy = make()
    text = strategy.extended.compiled_text(lambda x: jnp.sin(x), (jnp.ones(3),))
    assert "sine(" in text or "sin" in text
    assert "HloModule" in text


@on_each
def test_extended_refuses_foreign_variables(make):
    ours, other = make(), variable(mirrored())
    assert not ours.extended.variable_created_in_scope(other)
    with pytest.raises(ContextError, match="belongs to"):
        ours.extended.update(other, lambda v: v.assign(1.0))


@on_each
def test_colocation(make):
    strategy = make()
    v = variable(strategy)
    with strategy.extended.colocate_vars_with(v):
        w = distrib.Variable(1.0)
    assert w.distribute_strategy is strategy
    assert w.device == v.device


@on_each
def test_there_is_no_cluster(make):
    assert make().cluster_resolver is None


def test_cross_replica_verbs_say_what_a_replica_calls_instead():
    strategy = mirrored()
    for verb, instead in (
        (lambda: strategy.reduce("SUM", jnp.ones(1), None), "merge_call"),
        (lambda: strategy.gather(jnp.ones(1), 0), "all_gather"),
        (lambda: strategy.run(lambda: 1.0), "merge_call"),
        (lambda: strategy.extended.reduce_to("SUM", jnp.ones(1), None), "merge_call"),
    ):
        with pytest.raises(ContextError, match=rf"cross-replica context.*{instead}"):
            strategy.run(verb)


def test_repr():
    assert repr(mirrored(3)) == "<distrib.MirroredStrategy of 3 on CPU:0, CPU:1, CPU:2>"
    assert repr(distrib.OneDeviceStrategy("CPU:4")) == "<distrib.OneDeviceStrategy of 1 on CPU:4>"
    assert repr(distrib.get_strategy()) == "<distrib.DefaultStrategy of 1 on any device>"


@on_two
def test_a_constant_that_a_step_with_uneven_replicas_returns_or_assigns(make):
    strategy = make()
    v = variable(strategy, 3.0, aggregation=distrib.VariableAggregation.MEAN)
    w = variable(
        strategy,
        3.0,
        synchronization=distrib.VariableSynchronization.ON_READ,
        aggregation=distrib.VariableAggregation.MEAN,
    )

    def step(x):
        w.assign(2.0)
        return v.assign(1.0), jnp.float32(7), x.sum()

    x = values(strategy, lambda i: jnp.ones(3 - i))
    result = [[float(part) for part in y.values] for y in strategy.run(step, args=(x,))]
    assert result == [[1.0, 1.0], [7.0, 7.0], [3.0, 2.0]]
    assert (float(v.numpy()), float(w.numpy())) == (1.0, 2.0)
