"""Faults that users reported of other systems, as small inputs with the right values.

Each must not exist here. The number is the row in the table of reports that the project keeps.
"""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy, on_two_replicas


def linear(strategy, tx=None, w=0.0, **fields):
    """Return a state with the one parameter ``w``."""
    with strategy.scope():
        return distrib.TrainState.create(
            apply_fn=None, params={"w": w}, tx=tx or optax.sgd(0.1), **fields
        )


def run_epoch(strategy, step, data, batch_size):
    batches = strategy.experimental_distribute_dataset(data, batch_size=batch_size)
    return [strategy.run(step, args=(batch,)) for batch in batches]


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


@on_every_strategy
def test_epoch_loss_with_a_last_batch_of_one(make_strategy):
    """Row 11: the last batch left replicas empty: NaN, or data had to be dropped."""
    strategy = make_strategy()
    with strategy.scope():
        epoch_loss = distrib.metrics.Mean()

    def step(y):
        losses = (0.0 - y) ** 2
        epoch_loss.update_state(losses)
        return distrib.nn.compute_average_loss(losses)

    results = run_epoch(strategy, step, np.array([1, 2, 3, 4, 5], np.float32), 4)
    batch_means = [float(strategy.reduce("SUM", result, axis=None)) for result in results]
    assert batch_means == pytest.approx([7.5, 25.0])
    assert float(epoch_loss.result()) == pytest.approx(11.0)  # Not 16.25, the mean of the means.


@on_every_strategy
@pytest.mark.parametrize("aggregation", ["MEAN", "SUM"])
def test_gradient_of_a_last_batch_of_one(make_strategy, aggregation):
    """Row 11: by default the divisor is the true number of examples."""
    strategy = make_strategy()
    state = linear(strategy, optax.sgd(1.0))

    def step(y):
        def loss(params):
            losses = (params["w"] - y) ** 2
            return (
                losses.mean() if aggregation == "MEAN" else distrib.nn.compute_average_loss(losses)
            )

        state.apply_gradients(grads=jax.grad(loss)(state.params), aggregation=aggregation)

    run_epoch(strategy, step, np.array([5], np.float32), 4)
    assert float(state.params["w"]) == pytest.approx(10.0)  # The gradient was -10.
    strategy.extended.assert_mirrored(state)


class Noisy(nn.Module):
    """Batch normalisation and dropout."""

    axis_name: str | None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=False)(x))


@on_every_strategy
@pytest.mark.parametrize("axis_name", [None, distrib.REPLICA_AXIS], ids=["local", "synchronised"])
def test_batch_norm_and_dropout_stay_finite_with_empty_replicas(make_strategy, axis_name):
    """Row 11: a replica without examples made everything NaN."""
    strategy = make_strategy()
    key = jax.random.key(0)
    variables = Noisy(None).init({"params": key, "dropout": key}, jnp.ones((2, 3)))
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=Noisy(axis_name).apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            keys={"dropout": jax.random.key(1)},
            tx=optax.adam(0.1),
        )

    def step(x):
        def loss(params):
            y, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                rngs=state.keys,
                mutable=["batch_stats"],
            )
            return (y**2).mean(), updates["batch_stats"]

        (_, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state.apply_gradients(grads=grads, batch_stats=statistics)

    data = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    run_epoch(strategy, step, data, 4)
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.batch_stats)):
        assert np.isfinite(leaf).all()
    assert int(state.step) == 2
    strategy.extended.assert_mirrored(state)


@on_every_strategy
def test_flattening_with_an_unknown_length_on_empty_replicas(make_strategy):
    """Row 11: ``x.reshape(len(x), -1)``, as tutorials write, has no answer for no examples."""
    strategy = make_strategy()
    state = linear(strategy, optax.sgd(1.0), w=jnp.zeros(4))

    def step(x):
        def loss(params):
            return (x.reshape(x.shape[0], -1) @ params["w"]).mean()

        state.apply_gradients(grads=jax.grad(loss)(state.params))

    run_epoch(strategy, step, np.ones((1, 2, 2), np.float32), 4)
    np.testing.assert_allclose(state.params["w"], [-1, -1, -1, -1])


@on_every_strategy
def test_accuracy_counts_each_example_once(make_strategy):
    """Row 12: the remainder was dropped, or weighted as a whole batch."""
    strategy = make_strategy()
    with strategy.scope():
        accuracy = distrib.metrics.Accuracy()
    labels, predictions = np.ones(10, np.int32), np.array([1] * 8 + [0] * 2, np.int32)
    run_epoch(strategy, lambda batch: accuracy.update_state(*batch), (labels, predictions), 4)
    assert float(accuracy.result()) == pytest.approx(0.8)


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_confusion_counts_miss_no_example(make_strategy, replicas):
    """Row 15: 1,000 examples became 992 on two GPUs, and 984 on four."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        counts = {name: distrib.metrics.Sum(name) for name in ("TP", "FP", "TN", "FN")}
    labels = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 1], np.int32)
    predictions = np.array([1, 1, 0, 1, 0, 1, 0, 0, 1, 1], np.int32)

    def step(batch):
        label, prediction = batch
        counts["TP"].update_state((label == 1) & (prediction == 1))
        counts["FP"].update_state((label == 0) & (prediction == 1))
        counts["TN"].update_state((label == 0) & (prediction == 0))
        counts["FN"].update_state((label == 1) & (prediction == 0))

    run_epoch(strategy, step, (labels, predictions), 10)
    assert {k: int(v.result()) for k, v in counts.items()} == {"TP": 4, "FP": 2, "TN": 3, "FN": 1}


def normalizing(strategy, axis_name):
    """Return a state with batch statistics 0 and 1, and a step that updates them."""
    model = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=axis_name)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply,
            params={"scale": jnp.ones(1), "bias": jnp.zeros(1)},
            batch_stats={"mean": jnp.zeros(1), "var": jnp.ones(1)},
            tx=optax.sgd(0.1),
        )

    def step(x):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        y, updates = state.apply_fn(variables, x, mutable=["batch_stats"])
        state.replace(batch_stats=updates["batch_stats"])
        return y

    return state, step


FOUR = np.array([[0], [2], [4], [6]], np.float32)


def moving(state):
    return [float(state.batch_stats[name][0]) for name in ("mean", "var")]


@on_every_strategy
def test_synchronised_batch_statistics(make_strategy):
    """Row 22: mean 3 and variance 5 of all examples, however they are split."""
    strategy = make_strategy()
    state, step = normalizing(strategy, distrib.REPLICA_AXIS)
    (y,) = run_epoch(strategy, step, FOUR, 4)
    expected = (FOUR - 3) / np.sqrt(5 + 1e-5)
    np.testing.assert_allclose(strategy.gather(y, axis=0), expected, rtol=1e-5)
    assert moving(state) == pytest.approx([0.3, 1.4])


@on_two_replicas
def test_local_batch_statistics_are_averaged(make_strategy):
    """Row 22: local means 1 and 5, variances 1 and 1."""
    strategy = make_strategy()
    state, step = normalizing(strategy, None)
    (y,) = run_epoch(strategy, step, FOUR, 4)
    np.testing.assert_allclose(strategy.gather(y, axis=0).ravel(), [-1, 1, -1, 1], rtol=1e-4)
    assert moving(state) == pytest.approx([0.3, 1.0])


@on_two_replicas
def test_saved_batch_statistics_are_the_aggregate(make_strategy):
    """Row 23: it was unclear whose moving statistics were saved; never replica 0's 0.1."""
    strategy = make_strategy()
    state, step = normalizing(strategy, None)
    run_epoch(strategy, step, FOUR, 4)
    strategy.extended.assert_mirrored(state)
    strategy.extended.assert_mirrored(state.batch_stats)
    saved = flax.serialization.to_bytes(state)

    one = distrib.OneDeviceStrategy("CPU:0")
    restored, _ = normalizing(one, None)
    flax.serialization.from_bytes(restored, saved)
    assert moving(restored) == pytest.approx([0.3, 1.0])


def dropping(strategy):
    """Return a state with a dropout key, and a step that returns which of 1,000 ones it dropped."""
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=nn.Dropout(0.5, deterministic=False).apply,
            params={"w": 0.0},
            keys={"dropout": jax.random.key(7)},
            tx=optax.sgd(0.1),
        )

    def step():
        y = state.apply_fn({}, jnp.ones(1000), rngs=state.keys)
        state.apply_gradients(grads={"w": jnp.ones(())})
        return y == 0

    return state, step


def masks(strategy, step, count):
    """Return the masks of ``count`` steps, ``[step, replica, 1000]``."""
    results = [strategy.run(step) for _ in range(count)]
    return np.array(
        [[np.asarray(m) for m in strategy.experimental_local_results(r)] for r in results]
    )


@on_two_replicas
def test_dropout_masks_differ_by_replica_and_step_and_are_reproducible(make_strategy):
    """Row 26: one seed gave one mask everywhere."""
    strategy = make_strategy()
    _, step = dropping(strategy)
    three = masks(strategy, step, 3)
    assert 420 <= (three[0, 0] != three[0, 1]).sum() <= 580
    assert 420 <= (three[0, 0] != three[1, 0]).sum() <= 580
    assert 420 <= three[0, 0].sum() <= 580
    again, step_again = dropping(strategy)
    np.testing.assert_array_equal(masks(strategy, step_again, 1), three[:1])
    saved = flax.serialization.to_bytes(again)

    resumed, resumed_step = dropping(make_strategy())
    flax.serialization.from_bytes(resumed, saved)
    np.testing.assert_array_equal(
        masks(resumed.distributed_variables()[0].distribute_strategy, resumed_step, 2), three[1:]
    )


@on_every_strategy
def test_a_model_with_dropout_trains_and_its_counter_advances_once(make_strategy):
    """Row 27: the state of the seed had no aggregation rule."""
    strategy = make_strategy()
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=False)]).apply,
            params={"layers_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}},
            keys={"dropout": jax.random.key(7)},
            tx=optax.adam(0.1),
        )

    def step(x):
        def loss(params):
            return state.apply_fn({"params": params}, x, rngs=state.keys).mean()

        state.apply_gradients(grads=jax.grad(loss)(state.params))

    run_epoch(strategy, step, np.ones((4, 2), np.float32), 4)
    assert int(state.step) == 1
    assert np.isfinite(state.params["layers_0"]["kernel"]).all()
    for variable in state.distributed_variables():
        if not jnp.issubdtype(variable.dtype, jnp.inexact):
            assert variable.aggregation is distrib.VariableAggregation.ONLY_FIRST_REPLICA


@on_every_strategy
def test_a_python_number_among_the_arguments_does_not_retrace(make_strategy):
    """Row 75: each step was traced anew because its number is an argument."""
    strategy = make_strategy()
    traces = []

    def step(x, i):
        traces.append(i)
        return x.sum() + i

    batches = strategy.experimental_distribute_dataset(np.ones(40, np.float32), batch_size=4)
    for i, batch in enumerate(batches):
        result = strategy.run(step, args=(batch, i))
        expected = 4 + i * strategy.num_replicas_in_sync
        assert float(strategy.reduce("SUM", result, axis=None)) == expected
    assert len(traces) == 1


@on_every_strategy
def test_a_short_last_batch_costs_one_more_program(make_strategy):
    """Row 75: with one short last batch there are two programs, however many epochs."""
    strategy = make_strategy()
    traces = []

    def step(x):
        traces.append(x.shape)
        return x.sum()

    for epoch in range(3):
        results = run_epoch(strategy, step, np.ones(10, np.float32), 4)
        sums = [float(strategy.reduce("SUM", result, axis=None)) for result in results]
        assert sums == [4.0, 4.0, 2.0]
        if epoch == 0:
            after_first = len(traces)
    # Two programs; the one for the short batch traces the step for each shape that a replica sees.
    assert len(traces) == after_first <= 3


@on_every_strategy
def test_one_program_for_arrays_of_every_origin(make_strategy):
    """Row 76: NumPy, committed and uncommitted inputs, and a restored state, were compiled anew."""
    strategy = make_strategy()
    state = linear(strategy)
    traces = []

    def step(x):
        traces.append(x.shape)
        grads = jax.grad(lambda params: (params["w"] * x).mean())(state.params)
        state.apply_gradients(grads=grads)

    x = np.ones(3, np.float32)
    strategy.run(step, args=(x,))
    strategy.run(step, args=(jnp.asarray(x),))
    strategy.run(step, args=(jax.device_put(x, jax.devices()[5]),))
    saved = flax.serialization.to_bytes(state)
    flax.serialization.from_bytes(state, saved)
    strategy.run(step, args=(x,))
    state.replace(params=jax.tree.map(jnp.asarray, jax.device_get(state.params)))
    strategy.run(step, args=(x,))
    assert len(traces) == 1
    assert float(state.params["w"]) == pytest.approx(-0.5)


@on_every_strategy
@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.float32])
def test_one_program_for_numpy_doubles_and_jax_arrays(make_strategy, dtype):
    """Row 76: NumPy's default dtypes are JAX's 32 bits, and need no program of their own."""
    strategy = make_strategy()
    traces = []

    def step(x):
        traces.append(x.dtype)
        return x + 1

    x = np.ones(3, dtype)
    results = [strategy.run(step, args=(array,)) for array in (x, jnp.asarray(x))]
    for result in results:
        for part in strategy.experimental_local_results(result):
            np.testing.assert_array_equal(part, [2, 2, 2])
    assert len(traces) == 1


@on_every_strategy
def test_one_program_for_datasets_of_numpy_and_of_jax_arrays(make_strategy):
    """Row 76: the same for what comes out of a distributed dataset."""
    strategy = make_strategy()
    traces = []

    def step(x):
        traces.append(x.shape)
        return x.sum()

    for data in (np.ones(4), np.ones(4, np.float32), jnp.ones(4)):
        (result,) = run_epoch(strategy, step, data, 4)
        assert float(strategy.reduce("SUM", result, axis=None)) == 4.0
    assert len(traces) == 1


@on_two_replicas
def test_many_small_gradients_travel_together(make_strategy):
    """Row 78: an all-reduce for each of many small tensors made two devices slower than one."""
    strategy = make_strategy()
    rng = np.random.default_rng(0)
    initial = {f"w{i}": rng.normal(size=10).astype(np.float32) for i in range(200)}
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params=initial, tx=optax.sgd(0.1))

    def step(x):
        def loss(params):
            return sum((x.sum() * w).sum() ** 2 for w in params.values()) / 200

        state.apply_gradients(grads=jax.grad(loss)(state.params))

    def unpacked(x):
        def loss(params):
            return sum((x.sum() * w).sum() ** 2 for w in params.values()) / 200

        grads = jax.grad(loss)(initial)
        options = distrib.experimental.CommunicationOptions(bytes_per_pack=1)
        return distrib.get_replica_context().all_reduce("MEAN", grads, options)

    data = rng.normal(size=(2, 1)).astype(np.float32)
    (batch,) = strategy.experimental_distribute_dataset(data, batch_size=2)
    text = strategy.extended.compiled_text(step, (batch,))
    assert 1 <= count_all_reduces(text) <= 2
    separate = strategy.experimental_local_results(strategy.run(unpacked, args=(batch,)))[0]
    strategy.run(step, args=(batch,))
    for name, w in state.params.items():
        expected = initial[name] - 0.1 * np.asarray(separate[name])
        np.testing.assert_allclose(w, expected, rtol=1e-7, atol=1e-7)


def slices_of(ids, shape=(4, 1)):
    """Return what an embedding's gradient of 1 a looked-up row is."""
    return distrib.IndexedSlices(jnp.ones((len(ids), 1)), ids, shape)


def test_rows_of_equal_id_are_merged_before_they_are_sent(eagerly):
    """Row 80: sparse embedding gradients were gathered unmerged."""
    strategy = mirrored(2)
    ids = distrib.PerReplica([jnp.array([1, 1, 3]), jnp.array([1])])

    def step(ids):
        return distrib.get_replica_context().all_reduce("SUM", slices_of(ids))

    total = strategy.experimental_local_results((strategy.run(step, args=(ids,)),))[0][0]
    assert total.indices.tolist() == [1, 3, 1]  # Two rows of replica 0, and one of replica 1.
    assert total.to_dense().ravel().tolist() == [0, 3, 0, 1]


@pytest.mark.parametrize("second", [[1], [1, 1, 1]], ids=["uneven", "even"])
def test_compiled_rows_of_equal_id_give_the_dense_result(second):
    """Row 80, compiled: merged rows are filled up, and uneven replicas exchange the table."""
    strategy = mirrored(2)
    ids = distrib.PerReplica([jnp.array([1, 1, 3]), jnp.array(second)])

    def step(ids):
        context = distrib.get_replica_context()
        slices = slices_of(ids)
        total = context.all_reduce("SUM", slices)
        return (
            slices.merged().indices[:1],
            total.to_dense(),
            context.all_reduce("SUM", slices.to_dense()),
        )

    merged, sparse, dense = strategy.run(step, args=(ids,))
    assert merged.values[0].tolist() == [1]
    for table in (sparse, dense):
        assert table.values[0].ravel().tolist() == [0, 2 + len(second), 0, 1]


@pytest.mark.parametrize("aggregation", ["MEAN", "SUM"])
@on_every_strategy
def test_gradients_of_rows_train_as_those_of_the_table(make_strategy, engine, aggregation):
    """Row 80: an IndexedSlices in apply_gradients, with an uneven last batch."""
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    ids = np.array([0, 3, 3, 1, 0, 4], np.int32)
    states = []
    for sparse in (False, True):
        strategy = make_strategy()
        with strategy.scope():
            state = distrib.TrainState.create(
                apply_fn=None,
                params={"table": table, "w": jnp.float32(2)},
                tx=optax.chain(optax.clip_by_global_norm(5.0), optax.adam(0.1)),
            )

        def step(ids, state=state, sparse=sparse):
            params = state.params

            def loss(rows, w):
                losses = ((rows * w) ** 2).sum(-1)
                return losses.mean() if aggregation == "MEAN" else losses.sum() / 4

            rows = params["table"][ids]
            of_rows, of_w = jax.grad(loss, argnums=(0, 1))(rows, params["w"])
            gradient = distrib.IndexedSlices(of_rows, ids, params["table"].shape)
            grads = {"table": gradient if sparse else gradient.to_dense(), "w": of_w}
            state.apply_gradients(grads=grads, aggregation=aggregation)

        run_epoch(strategy, step, ids, 4)
        strategy.extended.assert_mirrored(state)
        states.append(state.params)
    for name in ("table", "w"):
        np.testing.assert_allclose(states[1][name], states[0][name], rtol=1e-5, atol=1e-6)


def count_all_reduces(text):
    """Return how many all-reduce instructions a compiled program has."""
    return text.count("all-reduce(") + text.count("all-reduce-start(")
