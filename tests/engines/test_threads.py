"""The threads engine: replicas that run eagerly, and what only they can do."""

import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distrib
from distrib.errors import (
    AggregationError,
    ContextError,
    MeetingError,
    NestedTraceError,
    OutputError,
    VariableError,
)
from tests.support.strategies import mirrored, on_every_strategy, on_two_replicas

MEAN = distrib.VariableAggregation.MEAN
SUM = distrib.VariableAggregation.SUM


@pytest.fixture(autouse=True)
def in_threads(eagerly):
    """Every test here runs eagerly, and leaves no thread of a replica."""
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("distrib-replica-")]


def context():
    return distrib.get_replica_context()


def replica():
    return int(context().replica_id_in_sync_group)


def of_replicas(strategy, fn):
    return strategy.experimental_distribute_values_from_function(
        lambda c: fn(c.replica_id_in_sync_group)
    )


def local(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


# Gradients through collectives.


@on_two_replicas
def test_the_gradient_of_an_all_reduce_is_an_all_reduce(make_strategy):
    """The loss (sum over replicas of w x)^2 at w=2, x=(1, 3): d/dw = 2*(2*4) * 2 * x."""
    strategy = make_strategy()
    x = of_replicas(strategy, lambda i: jnp.float32([1, 3][i]))

    def step(x):
        return jax.grad(lambda w: context().all_reduce("SUM", w * x) ** 2)(jnp.float32(2))

    assert local(strategy, strategy.run(step, args=(x,))) == [32, 96]


@pytest.mark.parametrize(("op", "expected"), [("SUM", [6, 6]), ("MEAN", [3, 3])])
def test_the_gradient_of_a_product_with_an_all_reduce(op, expected):
    strategy = mirrored(2)

    def step():
        i = jnp.float32(replica() + 1)
        return jax.grad(lambda x: context().all_reduce(op, x) * x)(i)

    assert local(strategy, strategy.run(step)) == expected


def test_the_gradient_through_a_tree_with_integers():
    strategy = mirrored(2)

    def step():
        def loss(w):
            sums = context().all_reduce("SUM", {"w": w, "n": jnp.int32(replica() + 1)})
            return sums["w"] * sums["n"]

        return jax.value_and_grad(loss)(jnp.float32(2))

    value, gradient = strategy.run(step)
    assert local(strategy, value) == [12, 12]
    assert local(strategy, gradient) == [6, 6]


def test_the_gradient_of_an_all_gather_goes_back_to_each_part():
    strategy = mirrored(2)

    def step():
        x = jnp.ones(replica() + 1)
        weights = jnp.array([1.0, 2.0, 4.0])
        return jax.grad(lambda x: (context().all_gather(x, 0) * weights).sum())(x)

    assert local(strategy, strategy.run(step)) == [[2], [4, 8]]


def test_the_gradient_of_an_all_gather_of_a_tree_along_the_last_axis():
    strategy = mirrored(2)

    def step():
        i = replica()
        tree = {"a": jnp.ones((2, i + 1)), "b": jnp.ones((1, 2 - i))}

        def loss(tree):
            whole = context().all_gather(tree, -1)
            return (whole["a"] * jnp.arange(3.0)[None]).sum() + (
                whole["b"] * jnp.array([[1.0, 10.0, 100.0]])
            ).sum() * (i + 1)

        return jax.grad(loss)(tree)

    gradient = strategy.run(step)
    assert local(strategy, gradient["a"]) == [[[0], [0]], [[2, 4], [2, 4]]]
    assert local(strategy, gradient["b"]) == [[[3, 30]], [[300]]]


def test_a_gradient_that_only_one_replica_takes_is_named():
    def step():
        reduced = lambda x: context().all_reduce("SUM", x)  # noqa: E731
        return jax.grad(reduced)(1.0) if replica() == 0 else reduced(jnp.float32(1))

    with pytest.raises(MeetingError, match=r"Replica 0 waits in the gradient of all_reduce\(SUM\)"):
        mirrored(2).run(step)


# Python code of each replica.


def test_branches_shapes_and_numbers_of_each_replica():
    strategy = mirrored(3)

    def step(x):
        i = replica()
        if i == 1:
            return {"x": x[:2], "n": i, "same": 7}
        return {"x": jnp.float32(x.sum()), "n": 2.5, "same": 7}

    result = strategy.run(step, args=(jnp.arange(4.0),))
    assert local(strategy, result["x"]) == [6, [0, 1], 6]
    assert result["n"].values == (2.5, 1, 2.5)
    assert result["same"] == 7


def test_none_of_some_replicas():
    result = mirrored(2).run(lambda: jnp.float32(1) if replica() == 1 else None)
    assert result.values[0] is None
    assert float(result.values[1]) == 1


def test_python_may_branch_on_values():
    strategy = mirrored(2)
    x = of_replicas(strategy, lambda i: jnp.float32([5, 40][i]))

    def step(x, limit):
        count = 0
        while x > limit:
            x, count = x / 2, count + 1
        return count

    assert strategy.run(step, args=(x, 3.0)).values == (1, 4)


def test_structures_that_differ_are_refused():
    with pytest.raises(OutputError, match="Replica 0 returns .* and replica 1 returns"):
        mirrored(2).run(lambda: {"a": 1} if replica() == 0 else {"b": 1})


def test_order_of_python_code():
    strategy = mirrored(2)
    log = []

    def merge(current, x):
        log.append("m")
        return current.reduce("SUM", x, axis=None)

    def step():
        log.append(f"a{replica()}")
        total = context().merge_call(merge, args=(jnp.float32(replica() + 1),))
        log.append(f"b{replica()}")
        return total

    assert local(strategy, strategy.run(step)) == [3, 3]
    assert log == ["a0", "a1", "m", "b0", "b1"]


def test_merge_call_sees_the_values_and_changes_variables():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0)
        own = distrib.Variable(
            0.0, synchronization=distrib.VariableSynchronization.ON_READ, aggregation=SUM
        )

    def merge(current, x, k):
        assert current is strategy
        assert [float(part) for part in x.values] == [1, 2]
        assert k == "same"
        v.assign(v + x.values[0] + x.values[1])
        return v.value(), own.value(), x

    def step():
        own.assign(jnp.float32(replica() + 10))
        x = jnp.float32(replica() + 1)
        return context().merge_call(merge, args=(x,), kwargs={"k": "same"})

    new, total, x = strategy.run(step)
    assert [local(strategy, part) for part in (new, total, x)] == [[4, 4], [21, 21], [1, 2]]
    assert [float(part) for part in v.values] == [4, 4]


def test_results_and_copies_are_on_the_devices_of_the_replicas():
    strategy = mirrored(3)
    with strategy.scope():
        v = distrib.Variable(jnp.zeros(2), aggregation=MEAN)

    def step(x):
        v.assign(jnp.ones(2))  # On the default device.
        total = context().all_reduce("SUM", v.value())
        return x * 2, v + x, total, jnp.zeros(2)

    results = strategy.run(step, args=(np.ones(2, np.float32),))
    for values in (*(result.values for result in results), v.values):
        assert [next(iter(x.devices())).id for x in values] == [0, 1, 2]


def test_a_jitted_function_inside_is_traced_once_for_all_replicas_and_steps():
    strategy = mirrored(4)
    with strategy.scope():
        w = distrib.Variable(jnp.ones(3), aggregation=MEAN)
    traces = []

    @jax.jit
    def loss_and_gradient(w, x):
        traces.append(x.shape)
        return jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)

    def step(x):
        loss, gradient = loss_and_gradient(w.value(), x)
        w.assign_sub(0.1 * gradient)
        return loss

    x = of_replicas(strategy, lambda i: jnp.full((2, 3), i, jnp.float32))
    for _ in range(3):
        strategy.run(step, args=(x,))
    assert traces == [(2, 3)]


def test_settings_of_jax_hold_in_replicas():
    def step():
        return str(jax.config.jax_default_matmul_precision), bool(jax.config.jax_debug_nans)

    with jax.default_matmul_precision("highest"), jax.debug_nans(True):
        assert mirrored(2).run(step) == ("highest", True)
    assert mirrored(2).run(step) == ("None", False)


# Errors.


def test_a_mismatch_names_both_replicas_and_both_calls():
    def step():
        if replica() == 0:
            return context().all_reduce("SUM", jnp.ones(2))
        return context().all_gather(jnp.ones((1, 2), jnp.int32), 0)

    with pytest.raises(
        MeetingError,
        match=r"Replica 0 calls all_reduce\(SUM\) of float32\[2\], and replica 1 calls "
        r"all_gather\(axis=0\) of int32\[1,2\]",
    ):
        mirrored(2).run(step)


@pytest.mark.parametrize(
    "call",
    [
        lambda i: context().all_reduce(["SUM", "MEAN"][i], jnp.ones(1)),
        lambda i: context().all_reduce("SUM", [{"a": jnp.ones(1)}, {"b": jnp.ones(1)}][i]),
        lambda i: context().all_reduce("SUM", [jnp.ones(1)] * (i + 1)),
        lambda i: context().all_gather(jnp.ones((1, 1)), i),
        lambda i: context().all_reduce("SUM", jnp.ones(1)) if i else context().merge_call(print),
    ],
    ids=["op", "structure", "count", "axis", "merge"],
)
def test_calls_that_differ_do_not_meet(call):
    with pytest.raises(MeetingError, match="Replica 0 calls .*, and replica 1 calls "):
        mirrored(2).run(lambda: call(replica()))


@pytest.mark.parametrize("early", [0, 1])
def test_a_replica_that_returns_early_is_named(early):
    def step():
        return None if replica() == early else context().all_reduce("MEAN", jnp.ones(1))

    with pytest.raises(
        MeetingError,
        match=rf"Replica {1 - early} waits in all_reduce\(MEAN\).*replica {early} has returned",
    ):
        mirrored(2).run(step)


def test_assignments_to_different_variables_do_not_meet():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(0.0, name="v", aggregation=MEAN)
        w = distrib.Variable(0.0, name="w", aggregation=MEAN)
    with pytest.raises(MeetingError, match="assign of variable 'v'.*assign_add of variable 'w'"):
        strategy.run(lambda: v.assign(1.0) if replica() == 0 else w.assign_add(1.0))


@on_two_replicas
def test_an_exception_comes_out_and_nothing_has_changed(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=MEAN)
        own = distrib.Variable(
            1.0, synchronization=distrib.VariableSynchronization.ON_READ, aggregation=MEAN
        )
        state = distrib.TrainState.create(apply_fn=None, params={"w": 1.0}, tx=optax.sgd(1.0))

    def step(fails):
        v.assign(5.0)
        own.assign_add(1.0)
        state.apply_gradients(grads={"w": jnp.float32(1)})
        if fails and replica() == 1:
            raise ValueError("boom 1")
        return context().all_reduce("SUM", jnp.float32(1))

    with pytest.raises(ValueError, match="^boom 1$"):
        strategy.run(step, args=(True,))
    assert (float(v.numpy()), float(own.numpy()), float(state.params["w"])) == (1, 1, 1)
    assert int(state.step) == 0
    assert not distrib.has_strategy()
    assert local(strategy, strategy.run(step, args=(False,))) == [2, 2]
    assert (float(v.numpy()), float(own.numpy()), float(state.params["w"])) == (5, 2, 0)


def test_the_error_of_the_first_replica_comes_out():
    def step():
        raise ValueError(f"boom {replica()}")

    with pytest.raises(ValueError, match="^boom 0$"):
        mirrored(2).run(step)


def test_an_error_in_a_merge_function_comes_out():
    def merge(strategy):
        raise ZeroDivisionError("in the merge function")

    strategy = mirrored(2)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: context().merge_call(merge))
    assert not distrib.has_strategy()
    assert local(strategy, strategy.run(lambda: jnp.float32(1))) == [1, 1]


def test_an_interrupt_while_a_replica_runs():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0)
    free = threading.Event()

    def step():
        v.assign(2.0)
        if replica() == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            free.wait()
        return context().all_reduce("SUM", v.value())

    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step)
    finally:
        free.set()
        for thread in threading.enumerate():
            if thread.name.startswith("distrib-replica-"):
                thread.join()
    assert [float(x) for x in v.values] == [1, 1]
    assert not distrib.has_strategy()
    assert local(strategy, strategy.run(lambda: v + 1.0)) == [2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: context().all_reduce("SUM", x),
        lambda x: context().all_gather(x, 0),
        lambda x: context().all_reduce("SUM", jnp.ones(2)),
        lambda x: context().merge_call(lambda strategy, y: y, args=(x,)),
        lambda x: context().merge_call(lambda strategy: 1.0),
    ],
    ids=["all_reduce", "all_gather", "of-a-constant", "merge_call", "merge-nothing"],
)
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_a_collective_inside_of_a_transformation_is_refused(call, transform):
    with pytest.raises(NestedTraceError, match="inside a JAX transformation"):
        mirrored(2).run(lambda: transform(call)(jnp.ones((2, 3))))


def test_collectives_of_jax_are_refused_with_the_way_out():
    with pytest.raises(ContextError, match="collectives of jax.lax.*run_functions_eagerly.False"):
        mirrored(2).run(lambda: jax.lax.psum(jnp.ones(2), distrib.REPLICA_AXIS))


def test_an_error_of_a_name_stays_what_it_is():
    with pytest.raises(NameError, match="undefined_name"):
        mirrored(2).run(lambda: undefined_name)  # noqa: F821


@on_every_strategy
def test_reading_a_variable_inside_of_jit_would_freeze_it(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(2.0, name="v")
    jitted = jax.jit(lambda x: v * x)
    with pytest.raises(NestedTraceError, match="'v' was read inside jax.jit"):
        strategy.run(lambda: jitted(jnp.float32(3)))
    grad = strategy.run(lambda: jax.grad(lambda x: v * x)(jnp.float32(3)))
    assert set(local(strategy, grad)) == {2.0}
    # The function that is given to run itself may be jitted.
    assert set(local(strategy, strategy.run(jitted, args=(3.0,)))) == {6.0}
    v.assign(5.0)
    assert set(local(strategy, strategy.run(jitted, args=(3.0,)))) == {15.0}


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.checkpoint])
def test_changing_a_variable_inside_of_a_transformation_is_refused(transform):
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(2.0)

    def change(x):
        v.assign(1.0)
        return x

    with pytest.raises(NestedTraceError, match="inside a JAX transformation"):
        strategy.run(lambda: transform(change)(jnp.float32(1)))
    assert float(v.numpy()) == 2


def test_run_inside_of_a_transformation_is_refused():
    strategy = mirrored(2)
    with pytest.raises(NestedTraceError, match="strategy.run was called inside"):
        jax.jit(lambda: strategy.run(lambda: jnp.ones(1)))()


def test_run_inside_of_a_merge_function_is_refused():
    with pytest.raises(ContextError, match="inside a merge function"):
        mirrored(2).run(lambda: context().merge_call(lambda s: s.run(lambda: 1)))


def test_a_value_of_another_number_of_replicas_is_refused():
    three = of_replicas(mirrored(3), lambda i: jnp.float32(i))
    with pytest.raises(ValueError, match="3 components, and the strategy has 2 replicas"):
        mirrored(2).run(lambda x: x, args=(three,))


def test_booleans_and_unequal_shapes_cannot_be_reduced():
    strategy = mirrored(2)
    with pytest.raises(AggregationError, match="cannot add values of dtype bool"):
        strategy.run(lambda: context().all_reduce("SUM", jnp.array([True])))
    with pytest.raises(AggregationError, match=r"float32\[1\], float32\[2\]"):
        strategy.run(lambda: context().all_reduce("SUM", jnp.ones(replica() + 1)))
    with pytest.raises(AggregationError, match=r"float32\[\], int32\[\]"):
        strategy.run(lambda: context().all_reduce("SUM", [jnp.float32(1), jnp.int32(1)][replica()]))


# Arguments, variables of others, NNX.


def test_numbers_come_as_arrays_and_constants_as_they_are():
    strategy = mirrored(2)

    def step(n, x, name, flag, numbers):
        assert name == "text"
        assert flag is True
        return context().all_reduce("SUM", (n, x)), numbers

    (n, x), numbers = strategy.run(
        step, args=(2, np.ones(1)), kwargs={"name": "text", "flag": True, "numbers": (1.5, None)}
    )
    assert (local(strategy, n), local(strategy, x)) == ([4, 4], [[2], [2]])
    assert local(strategy, numbers[0]) == [1.5, 1.5]


def test_variables_of_another_strategy_are_read_and_not_written():
    strategy, other = mirrored(2), distrib.MirroredStrategy(["CPU:2", "CPU:3"])
    with other.scope():
        w = distrib.Variable(3.0, name="w")
    x = of_replicas(strategy, lambda i: jnp.float32(i))
    assert local(strategy, strategy.run(lambda x: w * x, args=(x,))) == [0, 3]
    with pytest.raises(ContextError, match="Mixing different .* variable 'w'"):
        strategy.run(lambda: w.assign(1.0))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


def test_nnx_modules_are_changed_in_place_and_equal_those_of_a_compiled_step():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def step(model, optimizer, x):
        def loss_of(model):
            return (model(x) ** 2).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        gradients = context().all_reduce("MEAN", gradients)
        optimizer.update(model, gradients)
        return loss

    states = []
    for eager in (True, False):
        distrib.config.run_functions_eagerly(eager)
        strategy = mirrored(2)
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        for batch in strategy.experimental_distribute_dataset([x, x[:7]]):
            strategy.run(step, args=(model, optimizer, batch))
        states.append(jax.tree.leaves(nnx.state((model, optimizer))))
    for eager, compiled in zip(*states, strict=True):
        np.testing.assert_allclose(eager, compiled, rtol=1e-4, atol=1e-5)


def test_copies_of_an_nnx_module_that_would_differ_are_refused():
    strategy = mirrored(2)
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel.get_value())

    def step(model, only):
        if only is None or replica() == only:
            model.kernel.set_value(model.kernel.get_value() + replica() + 1.0)

    for only in (None, 0, 1):
        with pytest.raises(VariableError, match="'kernel' of an NNX object .* differs by replica"):
            strategy.run(step, args=(model, only))
    np.testing.assert_array_equal(model.kernel.get_value(), before)


# Uneven batches.


def test_a_replica_without_examples_adds_nothing():
    strategy = mirrored(4)
    with strategy.scope():
        seen = distrib.metrics.Mean()
        state = distrib.TrainState.create(apply_fn=None, params={"w": 2.0}, tx=optax.sgd(0.1))

    def step(x):
        seen.update_state(x)
        state.apply_gradients(grads=jax.grad(lambda p: (p["w"] * x).mean())(state.params))
        return x.shape[0]

    (batch,) = strategy.experimental_distribute_dataset([np.array([5.0], np.float32)])
    assert strategy.run(step, args=(batch,)).values == (1, 0, 0, 0)
    np.testing.assert_allclose(state.params["w"], 1.5)  # 2 - 0.1 * 5
    assert float(seen.result()) == 5
    strategy.extended.assert_mirrored(state)


def test_a_gradient_weights_each_replica_by_its_examples():
    strategy = mirrored(2)
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params={"w": 0.0}, tx=optax.sgd(1.0))

    def step(x):
        state.apply_gradients(grads=jax.grad(lambda p: (p["w"] * x).mean())(state.params))

    (batch,) = strategy.experimental_distribute_dataset([np.array([1, 2, 3, 10, 20], np.float32)])
    strategy.run(step, args=(batch,))
    np.testing.assert_allclose(state.params["w"], -7.2, rtol=1e-6)  # The mean of all five.


def test_accumulated_gradients():
    strategy = mirrored(2)
    with strategy.scope():
        tx = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
        state = distrib.TrainState.create(apply_fn=None, params={"w": 0.0}, tx=tx)

    def step(x):
        state.apply_gradients(grads=jax.grad(lambda p: (p["w"] * x).mean())(state.params))

    seen = []
    data = np.array([1, 3, 5, 7, 9], np.float32)
    for batch in strategy.experimental_distribute_dataset(data, batch_size=4):
        strategy.run(step, args=(batch,))
        seen.append(float(state.params["w"]))
    assert seen == [0.0, -6.5]  # The mean of 4, the mean of the first batch, and of 9, the second.
