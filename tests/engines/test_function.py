"""``distrib.function``: cross-replica code and its steps as one program."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distrib
from distrib.errors import ContextError, NestedTraceError, OutputError, TracedValueError
from tests.support.strategies import central, mirrored, on_every_strategy

SUM = distrib.VariableAggregation.SUM
MEAN = distrib.VariableAggregation.MEAN


def state_of(strategy):
    with strategy.scope():
        return distrib.TrainState.create(apply_fn=None, params={"w": 0.0}, tx=optax.sgd(0.1))


def batch_of(strategy, values):
    (batch,) = strategy.experimental_distribute_dataset([np.float32(values)])
    return batch


def gradient_step(state):
    def step(y):
        loss, grads = jax.value_and_grad(lambda p: ((p["w"] - y) ** 2).mean())(state.params)
        state.apply_gradients(grads=grads)
        return loss

    return step


@on_every_strategy
def test_two_steps_and_a_reduction_between_them(make_strategy, engine):
    """W goes 0 -> 0.5 -> 0.9; the mean loss is 7.5, then that of w=0.5: 4.75."""
    strategy = make_strategy()
    state = state_of(strategy)
    step = gradient_step(state)
    with strategy.scope():
        total = distrib.Variable(0.0)

    @distrib.function
    def two_steps(batch, factor):
        first = strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=None)
        total.assign_add(first * factor)
        second = strategy.run(step, args=(batch,))
        return {"first": first, "second": second, "n": strategy.num_replicas_in_sync}

    result = two_steps(batch_of(strategy, [1, 2, 3, 4]), 2.0)
    assert float(result["first"]) == 7.5
    assert float(strategy.reduce("MEAN", result["second"], axis=None)) == pytest.approx(5.25)
    assert result["n"] == strategy.num_replicas_in_sync
    assert float(state.params["w"]) == pytest.approx(0.9)
    assert int(state.step) == 2
    assert float(total) == 15
    two_steps(batch_of(strategy, [1, 2, 3, 4]), 0.0)
    assert int(state.step) == 4
    assert float(total) == 15


def test_it_is_one_program_that_is_traced_once():
    strategy = mirrored(2)
    state = state_of(strategy)
    step = gradient_step(state)
    traced = []

    @distrib.function
    def both(batch):
        traced.append(1)
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    for values in ([1, 2, 3, 4], [5, 6, 7, 8]):
        both(batch_of(strategy, values))
    assert traced == [1]


@on_every_strategy
def test_a_short_last_batch_is_one_more_shape(make_strategy, engine):
    strategy = make_strategy()

    @distrib.function
    def both(batch):
        sums = strategy.run(lambda x: (x.sum(), x * 2), args=(batch,))
        mean = strategy.reduce("MEAN", sums[1], axis=0)
        return strategy.reduce("SUM", sums[0], axis=None), mean, sums[1]

    total, mean, doubled = both(batch_of(strategy, [1, 2, 3, 4, 5]))
    assert float(total) == 15
    assert float(mean) == 6
    assert strategy.gather(doubled, axis=0).tolist() == [2, 4, 6, 8, 10]


def test_what_cross_replica_code_can_do(engine):
    strategy = mirrored(2)
    with strategy.scope():
        own = distrib.Variable(
            0.0, aggregation=SUM, synchronization=distrib.VariableSynchronization.ON_READ
        )

    @distrib.function
    def work(x):
        assert distrib.in_cross_replica_context()
        assert distrib.get_strategy() is strategy
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: jnp.float32(context.replica_id_in_sync_group)
        )

        def replica(i, x):
            assert not distrib.in_cross_replica_context()
            own.assign_add(i + x)
            context = distrib.get_replica_context()
            return i + context.replica_id_in_sync_group, context.all_reduce("SUM", i)

        doubled, total = strategy.run(replica, args=(ids,), kwargs={"x": x})
        parts = strategy.experimental_local_results(doubled)
        return (
            strategy.gather(doubled * 1 if False else total, axis=0)
            if False
            else (own.value(), parts, strategy.reduce("MEAN", total, axis=None), None, "text")
        )

    read, parts, total, nothing, text = work(10)
    assert float(read) == 21
    assert [float(p) for p in parts] == [0, 2]
    assert float(total) == 1
    assert (nothing, text) == (None, "text")
    assert [float(c) for c in own.values] == [10, 11]


def test_python_around_the_steps_is_traced():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=MEAN)

    @distrib.function
    def loop(batch, times):
        for _ in range(times):
            v.assign(strategy.reduce("SUM", strategy.run(lambda x: x.sum() + v, (batch,)), None))
        return v.value()

    # 3 + 2v each time: 5, 13, 29. The number of times is static: a tuple's length, for one.
    @distrib.function
    def three(batch):
        return loop(batch, 3)

    assert float(three(batch_of(strategy, [1, 2]))) == 29
    with pytest.raises(TracedValueError, match="known only when the step runs"):
        loop(batch_of(strategy, [1, 2]), 3)


def test_nnx_objects_are_changed_in_place():
    strategy = mirrored(2)
    layer = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((1, 1)))
    optimizer = nnx.Optimizer(layer, optax.sgd(0.5), wrt=nnx.Param)

    def step(layer, optimizer, x):
        grads = nnx.grad(lambda m: m(x[:, None]).mean())(layer)
        optimizer.update(layer, distrib.nn.mean_over_examples(grads))

    @distrib.function
    def both(layer, optimizer, batch):
        strategy.run(step, args=(layer, optimizer, batch))
        strategy.run(step, args=(layer, optimizer, batch))

    both(layer, optimizer, batch_of(strategy, [1, 2, 3, 4]))
    assert float(layer.kernel[...][0, 0]) == pytest.approx(1 - 2 * 0.5 * 2.5)


class Trainer:
    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.total = distrib.Variable(0.0)

    @distrib.function
    def add(self, batch):
        """Add up."""
        sums = self.strategy.run(lambda x: x.sum(), args=(batch,))
        self.total.assign_add(self.strategy.reduce("SUM", sums, axis=None))


def test_methods_are_compiled_for_each_instance():
    assert Trainer.add.__doc__ == "Add up."
    for make in (lambda: mirrored(2), lambda: central(2), lambda: mirrored(4)):
        trainer = Trainer(make())
        trainer.add(batch_of(trainer.strategy, [1, 2, 3, 4]))
        trainer.add(batch_of(trainer.strategy, [1, 2, 3, 4]))
        assert float(trainer.total) == 20


def test_the_strategy_is_found_by_name_by_variable_or_by_scope():
    one, two = mirrored(2), mirrored(2)
    with one.scope():
        v = distrib.Variable(1.0)

    @distrib.function
    def reads():
        return v * 2, distrib.get_strategy().num_replicas_in_sync

    @distrib.function
    def of_arguments(w):
        w.assign_add(1.0)
        return distrib.get_strategy().num_replicas_in_sync

    assert tuple(map(float, reads())) == (2, 2)
    assert of_arguments(v) == 2
    assert float(v) == 2

    @distrib.function
    def mixed(which):
        return (one if which == "one" else two).run(lambda: 1)

    with pytest.raises(ContextError, match="uses .* and .*, and one program belongs to one"):
        mixed("one")
    with one.scope():
        assert mixed("one") == 1


def test_a_name_that_means_another_strategy_is_looked_up_again():
    strategy = mirrored(2)

    @distrib.function
    def count():
        return strategy.num_replicas_in_sync, strategy.run(lambda: jnp.ones(()))

    assert len(count()[1].values) == 2
    strategy = mirrored(3)
    assert len(count()[1].values) == 3


def test_without_a_strategy_it_is_called_as_it_is():
    plain = distrib.Variable(1.0)

    @distrib.function
    def add(x):
        plain.assign_add(x)
        return distrib.get_strategy().run(lambda y: y + plain, args=(x,))

    assert float(add(2.0)) == 5
    assert float(plain) == 3


def test_inside_of_a_step_or_another_function_it_is_a_part():
    strategy = mirrored(2)

    @distrib.function
    def inner(x):
        return x + 1

    result = strategy.run(lambda x: inner(x), args=(batch_of(strategy, [1, 2]),))
    assert [x.tolist() for x in result.values] == [[2], [3]]


def test_jit_around_run_says_what_to_use():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0, name="weights")
    with pytest.raises(NestedTraceError, match=r"distrib\.function in place of jax\.jit"):
        jax.jit(lambda x: strategy.run(lambda: x))(1.0)
    with pytest.raises(NestedTraceError, match=r"'weights' was assigned .* distrib\.function"):
        jax.jit(v.assign)(2.0)
    with pytest.raises(NestedTraceError, match=r"'weights' was assigned inside"):
        jax.grad(lambda x: v.assign(x))(2.0)
    with pytest.raises(NestedTraceError, match=r"'weights' was read inside jax\.jit"):
        jax.jit(lambda x: v * x)(2.0)
    state = state_of(strategy)
    with pytest.raises(NestedTraceError, match=r"params was read inside jax\.jit"):
        jax.jit(lambda x: state.params["w"] * x)(2.0)
    assert float(v) == 1
    assert float(jax.jit(lambda w, x: w * x)(v, 2.0)) == 2
    assert float(jax.grad(lambda x: v * x)(2.0)) == 1


def test_run_inside_of_a_transformation_in_a_function():
    strategy = mirrored(2)

    @distrib.function
    def scanned(batch):
        return jax.lax.scan(lambda c, _: (c, strategy.run(lambda: c, args=())), 0.0, None, length=2)

    with pytest.raises(NestedTraceError, match="steps_per_call"):
        with strategy.scope():
            scanned(1.0)


def test_a_batch_that_is_not_an_argument_is_refused():
    strategy = mirrored(2)
    batch = batch_of(strategy, [1, 2, 3, 4])

    @distrib.function
    def closes_over():
        return strategy.run(lambda x: x, args=(batch,))

    with pytest.raises(ContextError, match="no argument of the distrib.function which"):
        closes_over()


def test_what_a_replica_returns_is_checked():
    strategy = mirrored(2)

    @distrib.function
    def bad():
        strategy.run(lambda: {"set": {1, 2}})

    with pytest.raises(OutputError, match=r"returned \{1, 2\} of type set"), strategy.scope():
        bad()


def test_options_are_refused_inside():
    strategy = mirrored(2)

    @distrib.function
    def optioned():
        strategy.run(lambda: 1, options=distrib.RunOptions(steps_per_call=2))

    with pytest.raises(ContextError, match="Leave the options out"):
        optioned()


def test_a_failing_function_changes_nothing():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0)

    @distrib.function
    def fails():
        v.assign(5.0)
        strategy.run(lambda: jnp.ones(2) @ jnp.ones(3))

    with pytest.raises(TypeError, match="dot_general"):
        fails()
    assert float(v) == 1


def test_nothing_is_kept_alive():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0)

    def make(v):
        @distrib.function
        def add(x):
            v.assign_add(x)

        add(1.0)
        return weakref.ref(add.python_function)

    died = make(v)
    gc.collect()
    assert died() is None
    gone = weakref.ref(v)
    del v
    gc.collect()
    assert gone() is None


def test_model_code_in_a_replica_works_unmodified():
    """vmap, checkpoint, scan, cond and jit inside of a replica, reading variables."""
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(2.0, aggregation=MEAN)

    def step(x):
        mapped = jax.vmap(lambda a: a * v)(x)
        again = jax.grad(jax.checkpoint(lambda a: (jnp.sin(a) * v).sum()))(x)
        last, _ = jax.lax.scan(lambda c, a: (c * v + a, None), 0.0, x)
        chosen = jax.lax.cond(x[0] > 2, lambda: v * 10.0, lambda: v * 1.0)
        jitted = jax.jit(lambda a: a + v)(x)
        inside = jax.vmap(lambda a: distrib.get_replica_context().all_reduce("SUM", a))(x)
        return mapped, again, last, chosen, jitted, inside

    x = batch_of(strategy, [1, 2, 3, 4])
    mapped, again, last, chosen, jitted, inside = strategy.run(step, args=(x,))
    gathered = strategy.gather((mapped, again, jitted), axis=0)
    assert gathered[0].tolist() == [2, 4, 6, 8]
    np.testing.assert_allclose(gathered[1], 2 * np.cos([1, 2, 3, 4]), rtol=1e-6)
    assert gathered[2].tolist() == [3, 4, 5, 6]
    assert [float(p) for p in last.values] == [4, 10]
    assert [float(p) for p in chosen.values] == [2, 20]
    assert [p.tolist() for p in inside.values] == [[4, 6]] * 2


def test_errors_end_with_the_users_line():
    strategy = mirrored(2)

    def step(x):
        return x @ jnp.ones(7)

    @distrib.function
    def both(x):
        return strategy.run(step, args=(x,))

    with pytest.raises(TypeError, match="dot_general") as caught:
        both(batch_of(strategy, [1, 2]))
    files = [entry.path for entry in caught.traceback]
    assert all(str(path).endswith("test_function.py") for path in files)
    assert caught.traceback[-1].name == "step"


def test_a_loop_over_a_dataset_and_train_loop_stand_outside():
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(np.arange(8.0), batch_size=4)

    @distrib.function
    def epoch(dataset):
        for batch in dataset:
            strategy.run(lambda x: x.sum(), args=(batch,))

    with pytest.raises(ContextError, match=r"loop over the dataset outside, or use .*train_loop"):
        epoch(dataset)

    @distrib.function
    def loop(iterator):
        distrib.train_loop(lambda x: x, iterator, 2)

    with strategy.scope(), pytest.raises(ContextError, match="train_loop was called inside of a"):
        loop(iter(dataset))


def test_a_function_can_be_explained_and_its_program_read():
    strategy = mirrored(2)

    @distrib.function
    def total(x):
        return strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(x,)), axis=None)

    batch = batch_of(strategy, [1, 2, 3, 4])
    assert "all-reduce" in strategy.extended.compiled_text(total, args=(batch,))
    assert sum(
        sent.kind == "all-reduce" for sent in strategy.extended.explain(total, (batch,)).sends
    )
