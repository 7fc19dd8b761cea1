"""Arrays that a step closes over."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib


@pytest.mark.parametrize(
    "make",
    [
        lambda: distrib.OneDeviceStrategy("CPU:1"),
        lambda: distrib.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
        lambda: distrib.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:3"),
    ],
    ids=["OneDevice", "Mirrored", "CentralStorage"],
)
def test_a_snapshot_of_parameters_is_a_constant_of_the_step(make):
    strategy = make()
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None, params={"w": jnp.array([1.0, 2.0])}, tx=optax.sgd(1.0)
        )
    teacher = state.params

    def step(x):
        state.apply_gradients(grads={"w": jnp.ones(2)})
        return (state.params["w"] * x).sum(), (teacher["w"] * x).sum()

    for _ in range(2):
        student, taught = strategy.run(step, args=(jnp.ones(2),))
    one = lambda value: float(strategy.experimental_local_results(value)[-1])  # noqa: E731
    assert (one(student), one(taught)) == (-1.0, 3.0)


def test_an_array_of_another_device_is_a_constant_of_the_step():
    import jax

    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    elsewhere = jax.device_put(jnp.arange(3.0), jax.devices()[5])
    result = strategy.run(lambda x: elsewhere + x, args=(1.0,))
    np.testing.assert_array_equal(result.values[1], [1, 2, 3])
