"""Replicas without an example, eagerly as compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.engines.no_examples import brought, stand_ins, without_stand_ins
from tests.support.strategies import central, mirrored

MEAN = distrib.VariableAggregation.MEAN
SUM = distrib.VariableAggregation.SUM
ON_READ = distrib.VariableSynchronization.ON_READ

MAKE = {"Mirrored-4": lambda: mirrored(4), "CentralStorage-4": lambda: central(4)}


def batch_of(strategy, values):
    (batch,) = strategy.experimental_distribute_dataset([np.float32(values)])
    return batch


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_what_is_nan_of_nothing_adds_zero(make, engine):
    """Five examples over four replicas: 2, 2, 1 and none."""
    strategy = make()
    with strategy.scope():
        v = distrib.Variable(0.0, aggregation=SUM)

    def step(x):
        context = distrib.get_replica_context()
        v.assign(x.mean())
        return context.all_reduce("SUM", x.mean()), context.all_reduce("SUM", x.sum())

    means, total = strategy.run(step, args=(batch_of(strategy, [1, 3, 5, 7, 9]),))
    assert [float(m) for m in means.values] == [2 + 6 + 9] * 4
    assert [float(t) for t in total.values] == [25] * 4
    assert float(v) == 17


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_code_that_cannot_run_for_no_examples(make, engine):
    """The reshape divides by the number of examples; the parameters are those of one device."""
    data = np.arange(20, dtype=np.float32).reshape(5, 2, 2) / 10
    states, returned = [], []
    for strategy in (distrib.OneDeviceStrategy("CPU:0"), make()):
        with strategy.scope():
            state = distrib.TrainState.create(
                apply_fn=None, params={"w": jnp.ones(4)}, tx=optax.sgd(0.1)
            )
            seen = distrib.Variable(0, aggregation=SUM, synchronization=ON_READ)
            mean = distrib.Variable(0.0, aggregation=MEAN)

        def step(x, state=state, seen=seen, mean=mean):
            flat = x.reshape(x.shape[0], -1)
            loss = lambda p: ((flat @ p["w"] - 1) ** 2).mean()  # noqa: E731
            state.apply_gradients(grads=jax.grad(loss)(state.params))
            seen.assign_add(x.shape[0])
            mean.assign(flat.mean())
            total = distrib.get_replica_context().all_reduce("SUM", flat.sum())
            return flat @ state.params["w"], flat.mean(), total, x.shape[0]

        (batch,) = strategy.experimental_distribute_dataset([data])
        returned.append(strategy.run(step, args=(batch,)))
        states.append(state)
        assert int(seen) == 5
    np.testing.assert_allclose(states[1].params["w"], states[0].params["w"], rtol=1e-5)
    predictions, means, total, counts = returned[1]
    assert [len(p) for p in predictions.values] == [2, 2, 1, 0]
    assert np.isnan([float(m) for m in means.values]).tolist() == [False, False, False, True]
    np.testing.assert_allclose([float(t) for t in total.values], [data.sum()] * 4, rtol=1e-5)
    assert counts.values == (2, 2, 1, 0)


def test_an_error_of_the_step_itself_comes_out(engine):
    strategy = mirrored(4)

    def step(x):
        return x @ jnp.ones(7)

    with pytest.raises(TypeError, match="dot_general"):
        strategy.run(step, args=(batch_of(strategy, [1, 3, 5, 7, 9]),))


def test_what_it_brings():
    nothing = jnp.array([jnp.nan, 2.0])
    assert brought(("all_reduce", "SUM"), [nothing], takes_part=True)[0].tolist() == [0, 2]
    assert brought(("all_reduce", "SUM"), [nothing], takes_part=False)[0].tolist() == [0, 0]
    (rows,) = brought(("all_gather", -1, None), [jnp.ones((2, 3))], takes_part=False)
    assert rows.shape == (2, 0)
    v = distrib.Variable(0.0)
    assert brought(("assign", "add", 1), (v, "add", 2), takes_part=False) == (v, "add", 2)
    assert brought("merge_call", "anything", takes_part=False) == "anything"


def test_stand_ins_are_for_empty_arguments_only():
    value = distrib.PerReplica([jnp.ones((2, 3)), jnp.ones((0, 3))])
    assert [x.shape for x in stand_ins(value, 1, 2).values] == [(2, 3), (2, 3)]
    assert stand_ins(value, 0, 2) is value
    assert stand_ins(7, 0, 2) == 7


def test_what_is_left_without_stand_ins():
    one = (jnp.ones((1, 3)), jnp.float32(4), jnp.float32(5), 1, "text")
    two = (jnp.ones((2, 3)), jnp.float32(4), jnp.float32(5), 2, "text")
    other = (jnp.ones((7, 3)), jnp.float32(4), jnp.float32(6), 7, "text")
    rows, same, own, count, text = without_stand_ins(one, two, other)
    assert rows.shape == (0, 3)
    assert (float(same), count, text) == (4, 0, "text")
    assert np.isnan(own)
