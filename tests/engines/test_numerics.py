"""Checks that the numbers of a step are finite: what they name, and that nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distrib
from distrib import config
from distrib.errors import DistribError, NonFiniteError
from tests.support.strategies import mirrored, on_every_strategy

SUM, MEAN = distrib.VariableAggregation.SUM, distrib.VariableAggregation.MEAN
ON_READ = distrib.VariableSynchronization.ON_READ
FIRST_LINE = "A step gave values that are not finite, and no variable was changed. "
CAME_IN = FIRST_LINE + "They came in with the first of these:"
AROSE = FIRST_LINE + "They arose in the step, at or before the first of these:"


@pytest.fixture(autouse=True)
def checked():
    config.enable_check_numerics()
    yield
    config.disable_check_numerics()


pytestmark = pytest.mark.usefixtures("engine")


def central():
    return distrib.CentralStorageStrategy(compute_devices=["CPU:0", "CPU:1", "CPU:2"])


on_three_replicas = pytest.mark.parametrize("make_strategy", [lambda: mirrored(3), central])


def lines_of(strategy, step, *args):
    """Run a step that must fail, and return the lines of its message, without lines of code."""
    with pytest.raises(NonFiniteError) as caught:
        strategy.run(step, args=args)
    message = str(caught.value)
    assert len(message.splitlines()) < 13
    return [line.strip() for line in message.splitlines()]


def without_place(line):
    """Remove the place in a file from a line of a message."""
    before, place, after = line.partition(" (test_numerics.py:")
    return before + after.partition(")")[2] if place else line


def per_replica(strategy, value_of):
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(value_of(context.replica_id_in_sync_group))
    )


def linear_state(strategy, tx=None):
    with strategy.scope():
        return distrib.TrainState.create(
            apply_fn=None,
            params={"dense": {"kernel": jnp.ones(3)}},
            tx=optax.sgd(0.1) if tx is None else tx,
        )


def training_step(state):
    def step(x):
        loss, grads = jax.value_and_grad(lambda p: jnp.sqrt(x @ p["dense"]["kernel"]).mean())(
            state.params
        )
        state.apply_gradients(grads=grads)
        return {"loss": loss}

    return step


def batch_of(strategy, rows):
    return next(iter(strategy.experimental_distribute_dataset([np.float32(rows)])))


@on_three_replicas
def test_the_argument_is_named_first_then_the_gradient_of_its_replica(make_strategy):
    strategy = make_strategy()
    state = linear_state(strategy)
    rows = np.ones((6, 3))
    rows[4, 1] = np.nan
    lines = lines_of(strategy, training_step(state), batch_of(strategy, rows))
    assert list(map(without_place, lines)) == [
        CAME_IN,
        "argument args[0] on replica 2: 1 NaN of 6",
        "gradients['dense']['kernel'] on replica 2: 3 NaN of 3",
        "the new value of variable params['dense']['kernel'] on replicas 0, 1, 2: 3 NaN of 3",
        "output['loss'] on replica 2: 1 NaN of 1",
    ]
    assert "(test_numerics.py:" in lines[2]
    np.testing.assert_array_equal(state.params["dense"]["kernel"], np.ones(3))
    assert int(state.step) == 0


@on_three_replicas
def test_the_gradient_is_named_where_the_arguments_are_finite(make_strategy):
    strategy = make_strategy()
    state = linear_state(strategy)
    # The root of zero is zero, and its gradient infinite times zero: NaN.
    rows = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    lines = lines_of(strategy, training_step(state), batch_of(strategy, rows))
    assert list(map(without_place, lines)) == [
        AROSE,
        "gradients['dense']['kernel'] on replica 1: 3 NaN of 3",
        "the new value of variable params['dense']['kernel'] on replicas 0, 1, 2: 3 NaN of 3",
    ]


@on_three_replicas
def test_a_sound_step_gives_what_it_gives_unchecked(make_strategy):
    strategy = make_strategy()
    rows = np.linspace(1.0, 2.0, 24).reshape(8, 3)
    results = []
    for on in (True, False):
        (config.enable_check_numerics if on else config.disable_check_numerics)()
        state = linear_state(strategy, optax.adam(0.1))
        step, losses = training_step(state), []
        for count in (8, 5):
            result = strategy.run(step, args=(batch_of(strategy, rows[:count]),))
            parts = strategy.experimental_local_results(result["loss"])
            losses.append([float(part) for part in parts])
        results.append((losses, np.asarray(state.params["dense"]["kernel"])))
    for with_checks, without in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(with_checks, without, rtol=1e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)


@on_every_strategy
def test_an_infinite_output_is_named_by_its_path(make_strategy):
    strategy = make_strategy()

    def step(x):
        return {"count": jnp.arange(3), "deep": [x, (1.0 / (x - 1.0), "text")]}

    count = strategy.num_replicas_in_sync
    named = "replica 0" if count == 1 else f"replicas {', '.join(map(str, range(count)))}"
    assert lines_of(strategy, step, jnp.ones((2, 2))) == [
        AROSE,
        f"output['deep'][1][0] on {named}: 4 infinite of 4",
    ]


def test_nan_and_infinity_are_counted_for_each_replica():
    strategy = mirrored(3)
    value = per_replica(strategy, lambda i: [[1.0, 1.0], [np.inf, np.nan], [0.0, np.inf]][i])
    assert lines_of(strategy, lambda x: x, value) == [
        CAME_IN,
        "argument args[0] on replica 1: 1 NaN and 1 infinite of 2; on replica 2: 1 infinite of 2",
        "output on replica 1: 1 NaN and 1 infinite of 2; on replica 2: 1 infinite of 2",
    ]


def test_arguments_that_are_not_finite_are_no_fault():
    strategy = mirrored(2)
    mask = jnp.array([0.0, -jnp.inf])
    result = strategy.run(lambda x, mask: jax.nn.softmax(x + mask), (jnp.ones(2),), {"mask": mask})
    np.testing.assert_array_equal(result.values[1], [1.0, 0.0])


def test_keyword_arguments_are_named():
    strategy = mirrored(2)
    with pytest.raises(
        NonFiniteError, match=r"argument kwargs\['x'\]\['a'\] on replicas 0, 1: 1 NaN of 1"
    ):
        strategy.run(lambda x: x["a"] + 1, kwargs={"x": {"a": jnp.nan}})


def test_the_operand_of_an_all_reduce_is_named():
    strategy = mirrored(3)

    def step(x):
        return distrib.get_replica_context().all_reduce("SUM", {"a": 1.0 / x, "b": x})["a"] * 0 + 1

    value = per_replica(strategy, lambda i: [2.0, 1.0, 0.0][i])
    lines = lines_of(strategy, step, value)
    assert without_place(lines[1]) == (
        "the operand of all_reduce(SUM) at a on replica 2: 1 infinite of 1"
    )
    assert lines[2] == "output on replicas 0, 1, 2: 1 NaN of 1"


def test_what_is_gathered_is_named_as_a_cause_only():
    strategy = mirrored(2)

    def step(x):
        rows = distrib.get_replica_context().all_gather(x[None], axis=0)
        return jnp.where(jnp.isfinite(rows), rows, 0.0), rows.sum()

    value = per_replica(strategy, lambda i: [1.0, -np.inf][i])
    with pytest.raises(NonFiniteError) as caught:
        strategy.run(step, args=(value,))
    assert "the operand of all_gather" in str(caught.value)
    strategy.run(lambda x: step(x)[0], args=(value,))


@on_three_replicas
def test_what_replicas_assign_is_named(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, name="v", aggregation=MEAN)
    lines = lines_of(
        strategy, lambda x: v.assign_add(1.0 / x), per_replica(strategy, lambda i: float(i))
    )
    assert list(map(without_place, lines)) == [
        AROSE,
        "what is assigned to variable v on replica 0: 1 infinite of 1",
        "the new value of variable v on replicas 0, 1, 2: 1 infinite of 1",
        "output on replicas 0, 1, 2: 1 infinite of 1",
    ]
    assert float(v.numpy()) == 1.0


@on_three_replicas
def test_a_variable_that_was_not_finite_before_is_named_as_the_cause(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable([1.0, jnp.nan], name="v", aggregation=MEAN)
        w = distrib.Variable([1.0, 1.0], name="w", aggregation=MEAN)

    def step():
        w.assign(w.value() * v.value())

    lines = lines_of(strategy, step)
    assert lines[:2] == [CAME_IN, "variable v, before the step, on replicas 0, 1, 2: 1 NaN of 2"]
    assert "the new value of variable w on replicas 0, 1, 2: 1 NaN of 2" in lines
    np.testing.assert_array_equal(w.numpy(), [1.0, 1.0])


def test_a_variable_that_is_passed_and_returned_is_looked_at_where_it_changes():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(jnp.nan, name="v", aggregation=MEAN)
        w = distrib.Variable(1.0, name="w", aggregation=MEAN)

    def step(v, x):
        w.assign(x)
        return v, w

    assert strategy.run(step, args=(v, 2.0)) == (v, w)
    assert list(map(without_place, lines_of(strategy, step, v, jnp.inf)[1:])) == [
        "argument args[1] on replicas 0, 1: 1 infinite of 1",
        "what is assigned to variable w on replicas 0, 1: 1 infinite of 1",
        "the new value of variable w on replicas 0, 1: 1 infinite of 1",
    ]


def test_a_variable_of_each_replica_names_the_replica():
    strategy = mirrored(3)
    with strategy.scope():
        v = distrib.Variable(0.0, name="total", synchronization=ON_READ, aggregation=SUM)

    def step(x):
        v.assign_add(jnp.log(x))

    assert lines_of(strategy, step, per_replica(strategy, lambda i: float(i))) == [
        AROSE,
        "the new value of variable total on replica 0: 1 infinite of 1",
    ]
    assert float(v.numpy()) == 0.0


def test_an_infinity_that_a_variable_keeps_is_no_fault():
    strategy = mirrored(2)
    with strategy.scope():
        best = distrib.Variable([jnp.inf, jnp.inf], name="best", aggregation=MEAN)

    def step(x):
        best.assign(jnp.minimum(best, x))

    strategy.run(step, args=(jnp.array([3.0, jnp.inf]),))
    np.testing.assert_array_equal(best.numpy(), [3.0, np.inf])
    lines = lines_of(strategy, step, jnp.array([-jnp.inf, 1.0]))
    assert lines[-1] == "the new value of variable best on replicas 0, 1: 1 infinite of 2"


def test_integers_booleans_and_keys_are_left_out():
    strategy = mirrored(2)
    key = jax.random.key(0)
    result = strategy.run(lambda k: (jnp.arange(2), jnp.array(True), k), args=(key,))
    np.testing.assert_array_equal(result[0].values[0], [0, 1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_other_floating_dtypes(dtype):
    strategy = mirrored(2)
    lines = lines_of(strategy, lambda x: x / 0, jnp.zeros(2, dtype))
    assert lines[1] == "output on replicas 0, 1: 2 NaN of 2"


@on_three_replicas
def test_uneven_batches(make_strategy):
    strategy = make_strategy()
    state = linear_state(strategy)
    step = training_step(state)
    rows = np.ones((5, 3))
    rows[4, 0] = np.nan
    lines = lines_of(strategy, step, batch_of(strategy, rows))
    assert list(map(without_place, lines)) == [
        CAME_IN,
        "argument args[0] on replica 2: 1 NaN of 3",
        "gradients['dense']['kernel'] on replica 2: 3 NaN of 3",
        "the new value of variable params['dense']['kernel'] on replicas 0, 1, 2: 3 NaN of 3",
        "output['loss'] on replica 2: 1 NaN of 1",
    ]
    # A replica without examples is at no fault, whatever the mean over nothing is.
    strategy.run(step, args=(batch_of(strategy, rows[:1]),))
    assert int(state.step) == 1


def test_the_state_of_nnx_objects():
    strategy = mirrored(2)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])

    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.sqrt(m(x) * 0).mean())(model)
        optimizer.update(model, distrib.nn.mean_over_examples(grads))

    lines = lines_of(strategy, step, model, optimizer, jnp.ones((4, 2)))
    assert lines[0] == AROSE
    assert list(map(without_place, lines[1:3])) == [
        "what is combined (MEAN) at bias.value on replicas 0, 1: 1 NaN of 1",
        "what is combined (MEAN) at kernel.value on replicas 0, 1: 2 NaN of 2",
    ]
    changed = [line for line in lines if line.startswith("the new value of NNX variable")]
    assert changed == [
        "the new value of NNX variable bias on replicas 0, 1: 1 NaN of 1",
        "the new value of NNX variable kernel on replicas 0, 1: 2 NaN of 2",
    ]
    np.testing.assert_array_equal(model.kernel[...], before)
    model.kernel[...] = jnp.full((2, 1), jnp.nan)
    lines = lines_of(strategy, lambda model, x: model(x), model, jnp.ones((4, 2)))
    assert lines[:2] == [
        CAME_IN,
        "variable kernel, before the step, on replicas 0, 1: 2 NaN of 2",
    ]


def test_values_in_a_loop_are_seen_when_they_leave_it():
    strategy = mirrored(2)

    def step(x):
        context = distrib.get_replica_context()
        return jax.grad(lambda y: context.all_reduce("SUM", jnp.log(y)))(x)

    assert lines_of(strategy, step, jnp.zeros(())) == [
        AROSE,
        "output on replicas 0, 1: 1 infinite of 1",
    ]


def test_many_values_are_cut_short():
    strategy = mirrored(2)
    lines = lines_of(strategy, lambda x: [x + i for i in range(30)], jnp.nan)
    assert len(lines) == 12
    assert lines[-1] == "and 21 more"


def test_the_error_is_of_both_kinds_and_ends_with_the_users_line():
    strategy = mirrored(2)
    with pytest.raises(FloatingPointError) as caught:
        strategy.run(lambda x: x, args=(jnp.nan,))
    assert isinstance(caught.value, DistribError)
    assert caught.traceback[-1].path.name == "test_numerics.py"


def test_the_switch_takes_effect_at_once_and_leaves_no_trace(engine):
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0, name="v", aggregation=SUM)

    def step(x):
        return v.assign_add(x)

    config.disable_check_numerics()
    assert not config.check_numerics_enabled()
    text = strategy.extended.compiled_text(step, (1.0,))
    strategy.run(step, args=(per_replica(strategy, lambda i: 1.0),))
    config.enable_check_numerics()
    assert config.check_numerics_enabled()
    with pytest.raises(NonFiniteError):
        strategy.run(step, args=(per_replica(strategy, lambda i: jnp.nan),))
    assert float(v.numpy()) == 3.0
    assert strategy.extended.compiled_text(step, (1.0,)) != text
    config.disable_check_numerics()
    assert strategy.extended.compiled_text(step, (1.0,)) == text
    assert "is-finite" not in text and "input_output_alias" in text
    strategy.run(step, args=(per_replica(strategy, lambda i: 1.0),))
    if engine == "compiled":
        old = v.storage.cell.array
        strategy.run(step, args=(per_replica(strategy, lambda i: 1.0),))
        assert old.is_deleted()
    strategy.run(step, args=(per_replica(strategy, lambda i: jnp.nan),))
    assert np.isnan(v.numpy())


def test_replicas_that_look_at_different_values(engine):
    if engine == "compiled":
        return
    strategy = mirrored(2)

    def step(x):
        context = distrib.get_replica_context()
        if int(context.replica_id_in_sync_group) == 1:
            return context.all_reduce("SUM", {"a": x})["a"] * jnp.nan
        return context.all_reduce("SUM", {"a": x})["a"]

    assert lines_of(strategy, step, 1.0) == [AROSE, "output on replica 1: 1 NaN of 1"]
