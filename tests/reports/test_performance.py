"""Faults that users reported of other systems: performance, with the right values.

Each must not exist here. The number is the row in the table of reports that the project keeps.
"""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import mirrored, on_every_strategy, on_two_replicas
from tests.support.training import linear, run_epoch


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
def test_a_padded_last_batch_costs_no_program(make_strategy):
    """Row 75: with padding there is one trace."""
    strategy = make_strategy()
    traces = []

    def step(batch, mask):
        traces.append(batch.shape)
        return distrib.nn.masked_mean(batch, mask)

    batches = strategy.experimental_distribute_dataset(
        np.arange(10, dtype=np.float32), distrib.InputOptions(last_batch="pad"), batch_size=4
    )
    means = [strategy.run(step, args=element) for element in batches]
    assert [float(strategy.reduce("MEAN", m, axis=None)) for m in means] == [1.5, 5.5, 8.5]
    assert len(traces) == 1


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
