"""Steps whose replicas see different shapes give the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distrib
from distrib.errors import UnevenReplicasError

MEAN = distrib.VariableAggregation.MEAN


def mirrored(count):
    return distrib.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def pieces(strategy, values):
    (batch,) = strategy.experimental_distribute_dataset([np.asarray(values, np.float32)])
    return batch


def local(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def test_outputs_have_the_shapes_of_their_replicas():
    strategy = mirrored(4)

    def step(x):
        return {"twice": x * 2, "sum": x.sum(), "constant": 7}

    result = strategy.run(step, args=(pieces(strategy, range(5)),))
    assert local(strategy, result["twice"]) == [[0, 2], [4, 6], [8], []]
    assert local(strategy, result["sum"]) == [1, 5, 4, 0]
    assert result["constant"] == 7


@settings(max_examples=15)
@given(replicas=st.integers(2, 5), examples=st.integers(1, 13))
def test_any_split_reduces_to_the_numbers_of_the_batch(replicas, examples):
    strategy = mirrored(replicas)
    values = np.arange(1, examples + 1, dtype=np.float32)
    result = strategy.run(_square, args=(pieces(strategy, values),))
    total, mean = (strategy.reduce(op, result, axis=0) for op in ("SUM", "MEAN"))
    np.testing.assert_allclose(total, (values**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(mean, (values**2).mean(), rtol=1e-6)
    np.testing.assert_array_equal(strategy.gather(result, axis=0), values**2)


def _square(x):
    return x * x


def test_all_reduce_counts_each_replica_once():
    strategy = mirrored(2)

    def step(x):
        context = distrib.get_replica_context()
        return context.all_reduce("SUM", x.sum()), context.all_reduce("MEAN", x.mean())

    total, mean = strategy.run(step, args=(pieces(strategy, [1, 2, 3, 10, 20]),))
    assert local(strategy, total) == [36, 36]
    assert local(strategy, mean) == [8.5, 8.5]  # (2 + 15) / 2


def test_pmean_counts_each_example_once_and_so_does_its_gradient():
    """Loss: the mean over examples of (x - mean)^2 * x; single-device gradient by jax.grad."""
    values = jnp.array([1.0, 2.0, 3.0, 10.0, 20.0])
    strategy = mirrored(3)

    def loss_of(w, x, mean):
        return (((w * x - mean(w * x)) ** 2) * x).mean()

    expected = jax.grad(lambda w: loss_of(w, values, jnp.mean))(1.5)
    with strategy.scope():
        w = distrib.Variable(1.5)
        state = distrib.TrainState.create(apply_fn=None, params={"w": 1.5}, tx=optax.sgd(1.0))

    def step(x):
        mean = lambda v: jax.lax.pmean(v.mean(), distrib.REPLICA_AXIS)  # noqa: E731
        grad = jax.grad(lambda p: loss_of(p["w"], x, mean))(state.params)
        state.apply_gradients(grads=grad)
        return mean(w * x)

    seen = strategy.run(step, args=(pieces(strategy, values),))
    np.testing.assert_allclose(local(strategy, seen), [10.8] * 3, rtol=1e-6)
    np.testing.assert_allclose(1.5 - state.params["w"], expected, rtol=1e-5)


def test_a_replica_without_examples_adds_nothing():
    strategy = mirrored(4)
    with strategy.scope():
        seen = distrib.metrics.Mean()
        state = distrib.TrainState.create(apply_fn=None, params={"w": 2.0}, tx=optax.sgd(0.1))

    def step(x):
        seen.update_state(x)
        grads = jax.grad(lambda p: (p["w"] * x).mean())(state.params)
        state.apply_gradients(grads=grads)

    strategy.run(step, args=(pieces(strategy, [5.0]),))
    np.testing.assert_allclose(state.params["w"], 1.5)  # 2 - 0.1 * 5
    assert float(seen.result()) == 5.0
    strategy.extended.assert_mirrored(state)


def test_variables_of_each_kind_are_written():
    strategy = mirrored(2)
    with strategy.scope():
        mean = distrib.Variable(0.0, aggregation=MEAN)
        own = distrib.Variable(
            0.0, synchronization=distrib.VariableSynchronization.ON_READ, aggregation=MEAN
        )
        free = distrib.Variable(0.0)

    def step(x):
        mean.assign(x.sum())
        own.assign_add(x.sum())
        free.assign(x.sum())
        return mean.value()

    result = strategy.run(step, args=(pieces(strategy, [1, 2, 4]),))
    assert local(strategy, result) == [3.5, 3.5]
    assert [float(v) for v in mean.values] == [3.5, 3.5]
    assert [float(v) for v in own.values] == [3.0, 4.0]
    assert [float(v) for v in free.values] == [3.0, 4.0]


def test_collectives_inside_of_calls_are_found():
    strategy = mirrored(2)

    def step(x):
        total = jax.jit(lambda v: jax.lax.psum(v.sum(), distrib.REPLICA_AXIS))(x)
        again = jax.checkpoint(lambda v: jax.lax.psum(v.sum(), distrib.REPLICA_AXIS))(x)
        return total + again

    result = strategy.run(step, args=(pieces(strategy, [1, 2, 4]),))
    assert local(strategy, result) == [14, 14]


def test_what_a_neighbour_sends_is_not_the_same_on_all_replicas():
    """Replicas have 2 and 1 examples, and each is told the other's sum."""
    strategy = mirrored(2)
    with strategy.scope():
        free = distrib.Variable(0.0)

    def step(x):
        other = jax.lax.ppermute(x.sum(), distrib.REPLICA_AXIS, [(0, 1), (1, 0)])
        free.assign(other * len(x))
        return other * len(x)

    result = strategy.run(step, args=(pieces(strategy, [1, 2, 4]),))
    assert local(strategy, result) == [8, 3]
    assert [float(v) for v in free.values] == [8, 3]


def test_a_collective_in_a_loop_is_refused_with_the_way_out():
    strategy = mirrored(2)

    def step(x):
        add = lambda c, _: (c + jax.lax.psum(x.sum(), distrib.REPLICA_AXIS), None)  # noqa: E731
        return jax.lax.scan(add, 0.0, None, length=2)[0]

    with pytest.raises(UnevenReplicasError, match="scan.*drop_remainder"):
        strategy.run(step, args=(pieces(strategy, [1, 2, 4]),))


def test_collectives_of_unequal_shapes_are_refused_with_both_shapes():
    strategy = mirrored(2)

    def step(x):
        return distrib.get_replica_context().all_reduce("SUM", x)

    with pytest.raises(UnevenReplicasError, match=r"float32\[2\].*float32\[1\]"):
        strategy.run(step, args=(pieces(strategy, [1, 2, 4]),))


def test_a_step_that_branches_on_shape_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(0.0, aggregation=MEAN)

    def step(x):
        if x.shape[0] == 2:
            v.assign(x.sum())

    with pytest.raises(UnevenReplicasError, match="branch on the shape"):
        strategy.run(step, args=(pieces(strategy, [1, 2, 4]),))


def test_one_trace_for_each_shape():
    strategy = mirrored(4)
    traces = []

    def step(x):
        traces.append(x.shape)
        return x.sum()

    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(np.zeros(13), batch_size=8):
            strategy.run(step, args=(batch,))
    assert traces == [(2,), (2,), (1,), (0,)]


def test_even_arguments_and_numbers_may_stand_beside_uneven_ones():
    strategy = mirrored(2)
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )
    result = strategy.run(
        lambda x, i, k: (x + i) * k, args=(pieces(strategy, [1, 2, 4]), ids), kwargs={"k": 10}
    )
    assert local(strategy, result) == [[10, 20], [50]]


def test_a_mean_over_as_many_outputs_as_there_are_replicas_is_no_mean_over_replicas():
    strategy = mirrored(2)

    def step(x):
        outputs = jnp.stack([x, 3 * x], axis=-1)  # two outputs, two replicas
        return jax.lax.psum(outputs.mean(-1).sum(), distrib.REPLICA_AXIS)

    result = strategy.run(step, args=(pieces(strategy, [1, 2, 3, 10, 20]),))
    assert local(strategy, result) == [72, 72]


@pytest.mark.parametrize("count", [4, 8])
def test_a_flatten_that_cannot_be_traced_for_no_examples_leaves_the_replica_out(count):
    """``x.reshape(len(x), -1)``, with 5 examples over 4 and over 8 replicas."""
    strategy = mirrored(count)
    values = np.arange(10, dtype=np.float32).reshape(5, 2, 1)
    with strategy.scope():
        seen = distrib.metrics.Mean()
        own = distrib.Variable(
            7.0, synchronization=distrib.VariableSynchronization.ON_READ, aggregation=MEAN
        )
        state = distrib.TrainState.create(
            apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(1.0)
        )

    def step(x):
        context = distrib.get_replica_context()
        flat = x.reshape(x.shape[0], -1)
        grads = jax.grad(lambda p: (flat @ p["w"]).mean())(state.params)
        state.apply_gradients(grads=grads)
        seen.update_state(flat.sum(-1))
        own.assign(flat.sum())
        total = context.all_reduce("SUM", flat.sum())
        largest = jax.lax.pmax(flat.max(), distrib.REPLICA_AXIS)
        return flat.sum(-1), total, largest, flat.mean()

    (batch,) = strategy.experimental_distribute_dataset([values])
    sums, total, largest, mean = strategy.run(step, args=(batch,))
    np.testing.assert_array_equal(strategy.gather(sums, 0), [1, 5, 9, 13, 17])
    assert local(strategy, total) == [45] * count
    assert local(strategy, largest) == [9] * count
    assert np.isnan(local(strategy, mean)[-1])
    assert float(seen.result()) == 9.0
    np.testing.assert_allclose(state.params["w"], [1 - 4, 1 - 5])
    assert float(own.values[-1]) == 7.0
    strategy.extended.assert_mirrored(state)


def test_a_step_that_fails_for_every_shape_fails_with_its_own_error():
    strategy = mirrored(4)
    with pytest.raises(ValueError, match="mine"):
        strategy.run(_fail, args=(pieces(strategy, range(5)),))


def _fail(x):
    raise ValueError("mine")


def test_a_number_may_differ_by_shape():
    strategy = mirrored(3)
    total, count = strategy.run(lambda x: (x.sum(), len(x)), args=(pieces(strategy, range(7)),))
    assert local(strategy, total) == [3, 12, 6]
    assert count.values == (3, 3, 1)

    def flattened(x):
        return x.reshape(x.shape[0], -1), len(x), "text"

    strategy = mirrored(4)
    _, count, text = strategy.run(flattened, args=(pieces(strategy, range(5)),))
    assert count.values == (2, 2, 1, 0)
    assert text == "text"


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
def test_synchronised_statistics_have_the_gradient_of_the_batch_for_losses_that_are_summed(
    replicas,
):
    values = jnp.array([1.0, 2.0, 3.0, 10.0, 20.0])
    strategy = mirrored(replicas)

    def losses(w, x, mean):
        return ((w * x - mean(w * x)) ** 2) * x

    expected = jax.grad(lambda w: losses(w, values, jnp.mean).mean())(1.5)
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params={"w": 1.5}, tx=optax.sgd(1.0))

    def step(x):
        def mean(v):
            return jax.lax.pmean(v.mean(), distrib.REPLICA_AXIS)

        def loss(params):
            return distrib.nn.compute_average_loss(losses(params["w"], x, mean))

        state.apply_gradients(grads=jax.grad(loss)(state.params), aggregation="SUM")

    strategy.run(step, args=(pieces(strategy, values),))
    np.testing.assert_allclose(1.5 - state.params["w"], expected, rtol=1e-5)
    strategy.extended.assert_mirrored(state)


def test_a_returned_variable_is_itself():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(0.0)
    assert strategy.run(lambda x: v, args=(pieces(strategy, range(3)),)) is v


def test_gradients_of_a_pmean_that_are_combined_by_hand_are_refused():
    strategy = mirrored(2)

    def step(x):
        mean = jax.grad(lambda w: jax.lax.pmean((w * x).mean(), distrib.REPLICA_AXIS) ** 2)(1.0)
        return distrib.get_replica_context().all_reduce("SUM", mean)

    with pytest.raises(UnevenReplicasError, match="mean_over_examples.*compute_average_loss"):
        strategy.run(step, args=(pieces(strategy, range(3)),))


def test_what_a_neighbour_sends_differs_by_replica():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(0.0)

    def step(x):
        received = jax.lax.ppermute(x.sum(), distrib.REPLICA_AXIS, [(0, 1), (1, 0)])
        v.assign(received * len(x))

    strategy.run(step, args=(pieces(strategy, [1, 2, 4]),))
    assert [float(copy) for copy in v.values] == [8.0, 3.0]
