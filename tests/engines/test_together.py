"""Programs that were traced for different shapes, run as one."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.errors import UnevenReplicasError
from tests.support.strategies import central, mirrored

SUM, MEAN = distrib.VariableAggregation.SUM, distrib.VariableAggregation.MEAN


def only(strategy, *arrays):
    """Return one batch of all examples, cut over the replicas."""
    (batch,) = strategy.experimental_distribute_dataset(arrays, batch_size=len(arrays[0]))
    return batch


def local(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def replica_id():
    return distrib.get_replica_context().replica_id_in_sync_group


# Convolutions, whose stretches every CPU replica runs for all groups.


def convolution(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def network(params, x, mean):
    hidden = convolution(x, params["first"])
    centre = mean(hidden)
    hidden = jax.nn.relu(hidden - centre) / jnp.sqrt(mean((hidden - centre) ** 2) + 1e-3)
    return convolution(hidden, params["second"]).mean((1, 2)) + params["bias"][None]


def images(count):
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(count, 6, 6, 2)).astype(np.float32),
        rng.integers(0, 3, count).astype(np.int32),
    )


def trained(strategy, synchronised, examples):
    """Return parameters and losses after three steps on one batch."""
    rng = np.random.default_rng(1)
    params = {
        "first": rng.normal(size=(3, 3, 2, 4)).astype(np.float32) / 4,
        "second": rng.normal(size=(3, 3, 4, 3)).astype(np.float32) / 6,
        "bias": np.zeros(3, np.float32),
    }
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None, params=params, tx=optax.sgd(0.1, momentum=0.9)
        )
        seen = distrib.metrics.Mean()

    def mean(hidden):
        local_mean = hidden.mean((0, 1, 2), keepdims=True)
        return jax.lax.pmean(local_mean, distrib.REPLICA_AXIS) if synchronised else 0.0 * local_mean

    def step(batch):
        x, y = batch

        def loss(params):
            scores = network(params, x, mean)
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, y)
            return losses.mean(), losses

        grads, losses = jax.grad(loss, has_aux=True)(state.params)
        state.apply_gradients(grads=grads)
        seen.update_state(losses)
        return losses

    batch = only(strategy, *images(examples))
    for _ in range(3):
        losses = strategy.run(step, args=(batch,))
    strategy.extended.assert_mirrored(state)
    return (
        jax.device_get(state.params),
        np.asarray(strategy.gather(losses, 0)),
        float(seen.result()),
    )


@pytest.mark.parametrize(
    ("make", "replicas", "examples"),
    [(mirrored, 2, 5), (mirrored, 3, 4), (mirrored, 4, 5), (central, 2, 5)],
)
@pytest.mark.parametrize("synchronised", [False, True])
def test_convolutions_on_uneven_batches_are_those_of_one_device(
    make, replicas, examples, synchronised
):
    expected = trained(mirrored(1), synchronised, examples)
    found = trained(make(replicas), synchronised, examples)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(close, found[0], expected[0])
    close(found[1], expected[1])
    close(found[2], expected[2])


# Effects.


def record_of(seen):
    def record(replica, x):
        seen[int(replica)].append(np.asarray(x).tolist())

    return record


@pytest.mark.parametrize("with_convolution", [False, True])
@pytest.mark.parametrize("position", ["before", "after", "only"])
def test_effects_are_those_of_the_replicas_own_group(with_convolution, position):
    """5 examples over 4 replicas: groups of 2, 1 and no examples."""
    strategy = mirrored(4)
    seen = collections.defaultdict(list)
    record = record_of(seen)

    def step(batch):
        (x,) = batch
        if with_convolution:
            image = jnp.broadcast_to(x[:, None, None, None], (x.shape[0], 2, 2, 1))
            x = convolution(image, jnp.ones((1, 1, 1, 1)))[:, 0, 0, 0]
        if position != "after":
            jax.debug.callback(record, replica_id(), x)
        if position == "only":
            return None
        total = jax.lax.psum(x.sum(), distrib.REPLICA_AXIS)
        if position == "after":
            jax.debug.callback(record, replica_id(), x * total)
        return total

    batch = only(strategy, np.arange(1, 6, dtype=np.float32))
    for _ in range(2):
        seen.clear()
        result = strategy.run(step, args=(batch,))
        if result is not None:
            assert local(strategy, result) == [15] * 4
        jax.effects_barrier()
        scale = 15 if position == "after" else 1
        mine = [[1, 2], [3, 4], [5], []]
        assert dict(seen) == {i: [[x * scale for x in mine[i]]] for i in range(4)}


def test_a_replica_that_is_left_out_has_no_effects():
    """Of no examples ``x.reshape(len(x), -1)`` cannot be traced: there is nothing to print."""
    strategy = mirrored(4)
    seen = collections.defaultdict(list)
    record = record_of(seen)

    def step(batch):
        (x,) = batch
        x = x.reshape(x.shape[0], -1)
        jax.debug.callback(record, replica_id(), x)
        return x.sum()

    strategy.run(step, args=(only(strategy, np.arange(1, 6, dtype=np.float32)),))
    jax.effects_barrier()
    assert dict(seen) == {0: [[[1], [2]]], 1: [[[3], [4]]], 2: [[[5]]]}


def test_callbacks_with_results():
    strategy = mirrored(2)

    def double(x):
        return 2 * np.asarray(x)

    def step(batch):
        (x,) = batch
        y = jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y, distrib.get_replica_context().all_reduce("SUM", y.sum())

    mine, total = strategy.run(step, args=(only(strategy, np.arange(3, dtype=np.float32)),))
    assert local(strategy, mine) == [[0, 2], [4]]
    assert local(strategy, total) == [6, 6]


# Collectives.


def test_all_kinds_of_meetings():
    strategy = mirrored(3)
    axis = distrib.REPLICA_AXIS

    def step(batch):
        (x,) = batch
        top = x.max()
        return {
            "sum": jax.lax.psum(top, axis),
            "max": jax.lax.pmax(top, axis),
            "min": jax.lax.pmin(top, axis),
            "gathered": jax.lax.all_gather(top, axis),
            "next": jax.lax.ppermute(top, axis, [(0, 1), (1, 2), (2, 0)]),
            "count": jax.lax.psum(x.size, axis),
            "own": x * jax.lax.axis_index(axis),
        }

    result = strategy.run(step, args=(only(strategy, np.float32([1, 2, 3, 4, 7])),))
    found = {name: local(strategy, value) for name, value in result.items() if name != "count"}
    assert found == {
        "sum": [13] * 3,
        "max": [7] * 3,
        "min": [2] * 3,
        "gathered": [[2, 4, 7]] * 3,
        "next": [7, 2, 4],
        "own": [[0, 0], [3, 4], [14]],
    }


def test_chains_of_meetings_feed_one_another():
    strategy = mirrored(2)
    axis = distrib.REPLICA_AXIS

    def step(batch):
        (x,) = batch
        total = jax.lax.psum(x.sum(), axis)
        spread = jax.lax.psum(((x - total) ** 2).sum(), axis)
        return jax.lax.pmax(jnp.abs(x).max() + spread, axis) - total

    result = strategy.run(step, args=(only(strategy, np.float32([1, 2, 3])),))
    # total 6, spread 25 + 16 + 9 = 50, largest 3 + 50, less 6
    assert local(strategy, result) == [47, 47]


def test_copies_of_variables_stay_equal_bit_by_bit():
    strategy = mirrored(3)
    with strategy.scope():
        v = distrib.Variable(jnp.full(5, 0.1), aggregation=MEAN)

    def step(batch):
        (x,) = batch
        v.assign(jnp.tanh(v * 1.1 + x.mean(0)) / 3)

    batch = only(strategy, np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32))
    for _ in range(20):
        strategy.run(step, args=(batch,))
    strategy.extended.assert_mirrored(v)


def test_integers_and_booleans():
    strategy = mirrored(2)
    with strategy.scope():
        count = distrib.Variable(0, aggregation=SUM)

    def step(batch):
        (x,) = batch
        count.assign_add(jnp.asarray(x.shape[0]))
        return (x > 1).any(), x.sum()

    any_large, total = strategy.run(step, args=(only(strategy, np.int32([0, 1, 2])),))
    assert int(count.numpy()) == 3
    assert local(strategy, any_large) == [False, True]
    assert local(strategy, total) == [1, 2]


def test_shapes_that_differ_in_another_axis_and_are_named():
    strategy = mirrored(2)
    value = distrib.PerReplica([jnp.ones((2, 3)), jnp.ones((2, 5))])
    result = strategy.run(lambda x: (x.sum(1), x.T), args=(value,))
    assert local(strategy, result[0]) == [[3, 3], [5, 5]]
    assert [part.shape for part in result[1].values] == [(3, 2), (5, 2)]
    with pytest.raises(UnevenReplicasError, match=r"float32\[2, 3\].*float32\[2, 5\].*meet at"):
        strategy.run(lambda x: jax.lax.psum(x, distrib.REPLICA_AXIS), args=(value,))
