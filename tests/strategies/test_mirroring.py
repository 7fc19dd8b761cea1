import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.errors import NotMirroredError
from distrib.platform import mesh as meshes
from tests.conformance.table import central, mirrored, rid, variable


@pytest.fixture
def strategy():
    return mirrored(3)


def test_copies_that_agree(strategy):
    v = variable(strategy, [1.0, jnp.nan], aggregation=distrib.VariableAggregation.MEAN)
    check = strategy.extended.assert_mirrored
    check(v)
    strategy.run(lambda: v.assign_add(jnp.ones(2) * rid()))
    check({"v": [v, v.value()], "constant": 3, "text": "x", "none": None})
    check(v.assign([1.0, 2.0]))
    check(v.storage.whole())


def test_a_variable_without_aggregation_breaks_when_replicas_assign_their_own(strategy):
    v = variable(strategy, [1.0, 2.0], name="w")
    strategy.run(lambda: v.assign(jnp.array([1.0, 2.0 + rid()])))
    with pytest.raises(
        NotMirroredError, match=r"copies of .* on CPU:0 and CPU:1 differ, by up to 1.0"
    ):
        strategy.extended.assert_mirrored({"kernel": v})
    with pytest.raises(NotMirroredError, match="kernel"):
        strategy.extended.assert_mirrored({"kernel": v})
    v.assign([1.0, 2.0])
    strategy.extended.assert_mirrored(v)


def test_one_bit_is_enough(strategy):
    v = variable(strategy, 0.0)
    strategy.run(lambda: v.assign(jnp.where(rid() == 2, -0.0, 0.0)))
    with pytest.raises(NotMirroredError, match="on CPU:0 and CPU:2 differ"):
        strategy.extended.assert_mirrored(v)


def test_booleans_that_differ(strategy):
    v = variable(strategy, [True, True])
    strategy.run(lambda: v.assign(jnp.array([True, False]) | (rid() == 0)))
    with pytest.raises(NotMirroredError, match="by up to 1 elements"):
        strategy.extended.assert_mirrored(v)


def test_what_replicas_keep_for_themselves_in_a_state_is_passed_over(strategy):
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None, params={"w": 1.0}, tx=optax.sgd(0.1), gradient_accumulation_steps=2
        )
    strategy.run(lambda: state.apply_gradients(grads={"w": jnp.float32(rid())}))
    strategy.extended.assert_mirrored(state)
    with pytest.raises(NotMirroredError, match="ON_READ"):
        strategy.extended.assert_mirrored(state.distributed_variables())


def test_on_read_copies_need_not_agree(strategy):
    v = variable(
        strategy,
        0.0,
        name="seen",
        synchronization=distrib.VariableSynchronization.ON_READ,
        aggregation=distrib.VariableAggregation.SUM,
    )
    with pytest.raises(NotMirroredError, match="'seen' is ON_READ"):
        strategy.extended.assert_mirrored(v)


def test_per_replica_values_and_split_arrays(strategy):
    result = strategy.run(rid)
    with pytest.raises(NotMirroredError, match="is a PerReplica"):
        strategy.extended.assert_mirrored([result])
    with pytest.raises(NotMirroredError, match="loss is .*|.*split over devices"):
        strategy.extended.assert_mirrored({"loss": result.whole})


def test_mirrored_values(strategy):
    strategy.extended.assert_mirrored(distrib.Mirrored([np.ones(2), np.ones(2)]))
    copies = [jax.device_put(float(i), d) for i, d in enumerate(jax.devices("cpu")[:2])]
    with pytest.raises(NotMirroredError, match="differ, by up to 1.0"):
        strategy.extended.assert_mirrored(distrib.Mirrored(copies))


def test_one_copy_agrees_with_itself():
    strategy = central()
    strategy.extended.assert_mirrored([variable(strategy), jnp.ones(2), np.ones(2)])


def test_arrays_on_the_mesh(strategy):
    mesh = strategy.extended.mesh
    strategy.extended.assert_mirrored(jax.device_put(jnp.ones(3), meshes.replicated(mesh)))


def test_a_train_state(strategy):
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=lambda p, x: x @ p["w"],
            params={"w": jnp.ones((3, 2))},
            tx=optax.adam(0.1),
        )
    x = np.arange(18, dtype=np.float32).reshape(6, 3)
    (batch,) = strategy.experimental_distribute_dataset(x, batch_size=6)

    def step(state, x):
        grads = jax.grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(state.params)
        state.apply_gradients(grads=grads)

    for _ in range(5):
        strategy.run(step, args=(state, batch))
    strategy.extended.assert_mirrored(state)
