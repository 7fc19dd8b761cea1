"""Several threads and one strategy."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib


def in_threads(*bodies):
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    "make",
    [
        lambda: distrib.MirroredStrategy(["CPU:0", "CPU:1"]),
        lambda: distrib.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    ],
    ids=["Mirrored", "CentralStorage"],
)
def test_steps_in_two_threads_all_count(make):
    strategy = make()
    with strategy.scope():
        v = distrib.Variable(0.0, aggregation=distrib.VariableAggregation.MEAN)

    def step():
        v.assign_add(jnp.asarray(1.0))

    def work():
        for _ in range(100):
            strategy.run(step)

    strategy.run(step)
    in_threads(work, work)
    assert float(v) == 201.0


def test_a_thread_may_read_while_another_trains():
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None, params={"w": np.zeros(1000, np.float32)}, tx=optax.sgd(1.0)
        )

    def step():
        state.apply_gradients(grads={"w": jnp.ones(1000)})

    def train():
        for _ in range(200):
            strategy.run(step)

    def read():
        for _ in range(200):
            snapshot = np.asarray(state.params["w"])
            assert (snapshot == snapshot[0]).all()

    in_threads(train, read)
    assert float(state.params["w"][0]) == -200.0


def test_a_step_that_fails_while_it_runs_leaves_the_variables_as_they_were():
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = distrib.Variable(1.0)

    def fail(x):
        raise ValueError("on purpose")

    def step():
        form = jax.ShapeDtypeStruct((), jnp.float32)
        v.assign(jax.pure_callback(fail, form, v.value()))

    with pytest.raises(Exception, match="on purpose"):
        strategy.run(step)
    assert float(v) == 1.0
    strategy.run(lambda: v.assign_add(1.0))
    assert float(v) == 2.0


def test_a_callback_of_a_step_may_read_a_variable():
    """It sees the values before the step."""
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = distrib.Variable(1.0)
    seen = []

    def step():
        jax.debug.callback(lambda: seen.append(float(v.values[0])))
        v.assign_add(1.0)

    strategy.run(step)
    assert set(seen) == {1.0}
    assert float(v) == 2.0
