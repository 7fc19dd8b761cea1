"""What compressed gradients lose in a step comes back in the next."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.errors import VariableError
from distrib.train.error_feedback import RESIDUALS
from tests.support.algorithms import every_algorithm, mirrored


@pytest.fixture(autouse=True)
def compiled_afterwards():
    yield
    distrib.config.run_functions_eagerly(False)


def state_under(strategy, params, tx=None):
    with strategy.scope():
        return distrib.TrainState.create(apply_fn=None, params=params, tx=tx or optax.sgd(1.0))


PARAMS = {"b": np.float32(0.5), "w": np.zeros((3, 50), np.float32)}


def gradients(count, seed=0):
    """Return gradients ``[replica, ...]`` of PARAMS."""
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(count, *v.shape)).astype(np.float32) for k, v in PARAMS.items()}


def components(count, grads):
    return [distrib.PerReplica([grads[k][r] for r in range(count)]) for k in ("b", "w")]


@every_algorithm
@pytest.mark.parametrize("eagerly", [False, True])
def test_parameters_and_residuals_together_have_moved_by_the_whole_gradient(make, eagerly):
    count = 3
    distrib.config.run_functions_eagerly(eagerly)
    strategy = mirrored(count, make(compression="int8"))
    state = state_under(strategy, PARAMS)

    def step(b, w):
        state.apply_gradients(grads={"b": b, "w": w}, aggregation="SUM")

    moved = {k: 0.0 for k in PARAMS}
    for seed in range(4):
        grads = gradients(count, seed)
        strategy.run(step, args=components(count, grads))
        moved = {k: moved[k] + grads[k].sum(0) for k in PARAMS}
    strategy.extended.assert_mirrored([state.params, state.opt_state])
    kept = dict(zip(["b", "w"], jax.tree.leaves(state.residuals), strict=True))
    assert np.abs(kept["w"]).max() > 1e-4
    for k, start in PARAMS.items():
        np.testing.assert_allclose(start - state.params[k] + kept[k], moved[k], atol=1e-4)


def test_without_feedback_small_gradients_are_lost_for_ever_and_with_it_they_are_not():
    """A gradient of 0.001 beside one of 1 is less than half a step of int8, 1/254."""
    strategy = mirrored(2, distrib.RingAllReduce(compression="int8"))
    state = state_under(strategy, {"w": np.zeros(4, np.float32)})
    grads = jnp.array([1.0, 0.001, 1.0, 0.001])  # A chunk for each of the two replicas.

    def fed_back():
        state.apply_gradients(grads={"w": grads})

    def bare():
        combined = distrib.get_replica_context().all_reduce("MEAN", {"w": grads})
        state.apply_gradients(grads=combined, aggregation=None)

    for _ in range(100):
        strategy.run(bare)
    np.testing.assert_allclose(state.params["w"], [-100, 0, -100, 0], atol=1e-4)
    state.replace(params={"w": jnp.zeros(4)})
    for _ in range(100):
        strategy.run(fed_back)
    np.testing.assert_allclose(state.params["w"], [-100, -0.1, -100, -0.1], atol=0.01)


def test_who_keeps_residuals():
    for ops in (None, distrib.RingAllReduce(), distrib.NcclAllReduce(compression="bfloat16")):
        assert not hasattr(state_under(mirrored(2, ops), PARAMS), RESIDUALS)
    ops = distrib.NcclAllReduce(compression="int8")
    assert not hasattr(state_under(mirrored(1, ops), PARAMS), RESIDUALS)
    central = distrib.CentralStorageStrategy(["CPU:0", "CPU:1"])
    assert not hasattr(state_under(central, PARAMS), RESIDUALS)
    state = state_under(mirrored(2, ops), {"a": jnp.ones(2, jnp.bfloat16)})
    (residual,) = jax.tree.leaves(state.residuals)
    assert (residual.shape, residual.dtype) == ((2,), jnp.float32)
    with mirrored(2, ops).scope(), pytest.raises(ValueError, match="a field 'residuals' already"):
        distrib.TrainState.create(apply_fn=None, params={}, tx=optax.sgd(1), residuals=jnp.ones(1))


def test_the_compiled_step_sends_bytes_and_donates_the_residuals():
    strategy = mirrored(2, distrib.NcclAllReduce(compression="int8"))
    state = state_under(strategy, {"w": np.zeros(512, np.float32)})

    def step():
        state.apply_gradients(grads={"w": state.params["w"] + 1})

    text = strategy.extended.compiled_text(step)
    assert " all-to-all(" in text
    assert " all-reduce(" not in text
    strategy.run(step)  # The first step spares what create() has lent to the optimizer.
    old = [v.storage.cell.array for v in state.distributed_variables()]
    strategy.run(step)
    assert all(array.is_deleted() for array in old)


@pytest.mark.parametrize("eagerly", [False, True])
def test_gradients_that_are_not_finite_pass_and_leave_no_residual(eagerly):
    distrib.config.run_functions_eagerly(eagerly)
    strategy = mirrored(2, distrib.RingAllReduce(compression="int8"))
    tx = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=9)
    state = state_under(strategy, {"w": np.zeros(3, np.float32)}, tx)

    def step(x):
        state.apply_gradients(grads={"w": jnp.full(3, x)})

    strategy.run(step, args=(distrib.PerReplica([np.float32(np.inf), np.float32(1)]),))
    assert np.asarray(state.params["w"]).tolist() == [0, 0, 0]
    strategy.run(step, args=(np.float32(2),))
    np.testing.assert_allclose(state.params["w"], [-2, -2, -2], rtol=0.3)
    assert np.isfinite(jax.tree.leaves(state.residuals)[0]).all()


@pytest.mark.parametrize("count", [2, 4])
def test_uneven_batches_weigh_each_example_alike(count):
    """With 5 examples the last of 4 replicas has none, and its residual stays as it is."""
    strategy = mirrored(count, distrib.NcclAllReduce(compression="int8"))
    state = state_under(strategy, {"w": np.zeros(2, np.float32)})

    def step(x):
        state.apply_gradients(grads={"w": jnp.stack([x.mean(), 2 * x.mean()])})

    data = np.float32([1, 2, 3, 10, 20])
    for _ in range(20):
        for batch in strategy.experimental_distribute_dataset([data]):
            strategy.run(step, args=(batch,))
    kept = jax.tree.leaves(state.residuals)[0]
    np.testing.assert_allclose(-state.params["w"] + kept, [20 * 7.2, 40 * 7.2], rtol=1e-4)


def test_parameters_that_are_not_floating_are_combined_exactly():
    strategy = mirrored(2, distrib.NcclAllReduce(compression="int8"))
    state = state_under(strategy, {"z": np.complex64(0), "w": np.float32(0)})

    def step():
        state.apply_gradients(grads={"z": jnp.complex64(1 + 2j), "w": jnp.float32(3)})

    strategy.run(step)
    assert complex(state.params["z"]) == -1 - 2j
    assert float(state.params["w"]) == pytest.approx(-3, rel=1e-2)


def test_checkpoints_keep_what_all_replicas_have_not_sent():
    make = distrib.RingAllReduce
    state = state_under(mirrored(2, make(compression="int8")), PARAMS)
    grads = gradients(2)

    def step(b, w):
        state.apply_gradients(grads={"b": b, "w": w}, aggregation="SUM")

    mirrored_state_strategy = state.distributed_variables()[0].distribute_strategy
    mirrored_state_strategy.run(step, args=components(2, grads))
    saved = flax.serialization.to_bytes(state)
    total = jax.tree.leaves(state.residuals)
    other = state_under(mirrored(4, make(compression="int8")), PARAMS)
    flax.serialization.from_bytes(other, saved)
    for mine, theirs in zip(jax.tree.leaves(other.residuals), total, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    exact = state_under(mirrored(2, None), PARAMS)
    flax.serialization.from_bytes(exact, saved)
    np.testing.assert_array_equal(exact.params["w"], state.params["w"])
    flax.serialization.from_bytes(other, flax.serialization.to_bytes(exact))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(other.residuals))


def test_gradients_of_another_structure():
    strategy = mirrored(2, distrib.NcclAllReduce(compression="int8"))
    state = state_under(strategy, PARAMS)
    with pytest.raises(VariableError, match="another structure"):
        strategy.run(lambda: state.apply_gradients(grads={"w": jnp.zeros((3, 50))}))
