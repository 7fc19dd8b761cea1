"""A sum of several collectives is one equation, and linear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.collectives import one_sum
from tests.support.algorithms import every_algorithm, mirrored, per_replica, summed


def run(make, step, values=(1.0, 2.0, 4.0), **kwargs):
    strategy = mirrored(3, make(**kwargs))
    return strategy.run(step, args=(per_replica(strategy, np.float32(values)),))


@every_algorithm
def test_forward_mode(make):
    """The tangent of a sum is the sum of the tangents."""

    def step(x):
        value, tangent = jax.jvp(lambda y: summed(y * y), (x,), (jnp.float32(1),))
        same, linear = jax.linearize(lambda y: summed(y * y), x)
        return value, tangent, same, linear(jnp.float32(1)), linear(jnp.float32(3))

    for results, expected in zip(run(make, step), (21, 14, 21, 14, 42), strict=True):
        assert [float(x) for x in results.values] == [expected] * 3


@every_algorithm
def test_second_derivatives(make):
    """The loss is the square of the sum of w x over all replicas; its gradient on one is summed."""

    def step(x):
        def loss(w):
            return (summed(w @ jnp.array([x, 1.0]))) ** 2

        return jax.hessian(loss)(jnp.ones(2)), jax.jacfwd(jax.grad(loss))(jnp.ones(2))

    for hessians in run(make, step):
        # d/dw of sum_s (2 sum_r w x_r) x_s: three losses, each with the tangents of all replicas.
        for x, hessian in zip((1.0, 2.0, 4.0), hessians.values, strict=True):
            np.testing.assert_allclose(hessian, 6 * np.outer([x, 1], [7, 3]), rtol=1e-6)


@every_algorithm
def test_a_mapped_sum_is_the_sum_of_the_rows(make):
    def step(x):
        rows = jnp.stack([x, 2 * x, 3 * x])
        return jax.vmap(summed)(rows), jax.vmap(jax.grad(lambda y: summed(y) * 2))(rows)

    sums, gradients = run(make, step)
    assert [x.tolist() for x in sums.values] == [[7, 14, 21]] * 3
    assert [x.tolist() for x in gradients.values] == [[6, 6, 6]] * 3


@every_algorithm
def test_derivatives_of_compressed_sums_are_compressed_sums(make):
    def step(x):
        _, tangent = jax.jvp(lambda y: summed(y * y), (x,), (jnp.float32(1),))
        return tangent, jax.grad(lambda y: summed(y) * 3)(x)

    for results, expected in zip(run(make, step, compression="bfloat16"), (14, 9), strict=True):
        assert [float(x) for x in results.values] == [expected] * 3


def test_the_program_shows_one_equation_for_each_sum():
    ops = distrib.RingAllReduce()

    def step(x):
        jaxpr = jax.make_jaxpr(jax.grad(lambda y: ops.sum_over_replicas(y, 3) ** 2))(x)
        names.append([e.primitive.name for e in jaxpr.jaxpr.eqns])

    names = []
    run(distrib.RingAllReduce, step)
    assert names[0].count("sum_over_replicas") == 2
    assert "ppermute" not in names[0]


def test_rounding_has_no_derivative():
    ops = distrib.RingAllReduce(compression="int8")

    def step(x):
        return jax.grad(lambda y: ops.sum_with_errors(y, 3)[0])(x)

    with pytest.raises(NotImplementedError, match="sum_over_replicas_with_errors"):
        run(distrib.RingAllReduce, step)


def test_outside_of_a_mesh_the_algorithm_is_called_as_it_is():
    assert float(one_sum(lambda x: x * 2, jnp.float32(3))) == 6
