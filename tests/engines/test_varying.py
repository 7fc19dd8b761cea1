"""Which outputs of a replica's program may differ by replica."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from distrib.collectives import one_sum
from distrib.engines.varying import varying_outputs

AXIS = "replica"


def varies(fn, inputs, *args):
    """Return the answer for ``fn``, whose arguments vary as ``inputs`` say."""
    args = args or (1.0,) * len(inputs)
    jaxpr = jax.make_jaxpr(fn, axis_env=[(AXIS, 2)])(*args)
    return varying_outputs(jaxpr.jaxpr, inputs, AXIS)


def test_what_is_computed_from_varying_inputs_varies():
    def fn(same, mine):
        return same * 2, mine * 2, same + mine, 3.0, jnp.ones(2), same, mine

    assert varies(fn, [False, True]) == [False, True, True, False, False, False, True]


@pytest.mark.parametrize(
    "meet",
    [
        lambda x: lax.psum(x, AXIS),
        lambda x: lax.pmean(x, AXIS),
        lambda x: lax.pmax(x, AXIS),
        lambda x: lax.pmin(x, (AXIS,)),
        lambda x: lax.all_gather(x, AXIS),
        lambda x: lax.psum(lax.psum(x, AXIS) + x, AXIS) / 2,
        lambda x: jax.tree.map(lambda leaf: lax.psum(leaf, AXIS), (x, x))[1],
    ],
    ids=["psum", "pmean", "pmax", "pmin", "all_gather", "twice", "tree"],
)
def test_what_comes_out_of_a_collective_is_the_same(meet):
    assert varies(meet, [True]) == [False]
    assert varies(lambda x: meet(x) + x, [True]) == [True]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]),
        lambda x: lax.psum(x, AXIS, axis_index_groups=[[0], [1]]),
        lambda x: lax.psum_scatter(x, AXIS, tiled=True),
    ],
    ids=["ppermute", "groups", "scatter"],
)
def test_what_comes_out_of_other_collectives_may_vary(fn):
    assert varies(fn, [True], jnp.ones(2)) == [True]


def test_a_sum_of_several_collectives_is_one_collective():
    def swapped(x):
        return one_sum(lambda y: y + lax.ppermute(y, AXIS, [(0, 1), (1, 0)]), x)

    assert varies(swapped, [True]) == [False]
    assert varies(lambda x: swapped(x) + x, [True]) == [True]
    assert varies(jax.checkpoint(swapped), [True]) == [False]
    assert varies(jax.grad(lambda x: swapped(x) * 3), [True]) == [False]


def test_the_replica_id_varies():
    assert varies(lambda x: x + lax.axis_index(AXIS), [False]) == [True]
    assert varies(lambda x: lax.psum(x * lax.axis_index(AXIS), AXIS), [False]) == [False]


def test_programs_inside_of_the_program_are_followed():
    @jax.jit
    def inner(same, mine):
        return same + 1, mine + 1, lax.psum(mine, AXIS)

    assert varies(inner, [False, True]) == [False, True, False]
    assert varies(jax.jit(lambda x: inner(x, x)), [True]) == [True, True, False]
    assert varies(jax.checkpoint(lambda x: lax.psum(jnp.sin(x), AXIS)), [True]) == [False]


def test_gradients():
    def loss(w, x):
        return (w * x) ** 2

    assert varies(jax.grad(loss), [False, True]) == [True]
    assert varies(lambda w, x: lax.pmean(jax.grad(loss)(w, x), AXIS), [False, True]) == [False]
    # The gradient with respect to the same value through a collective is local all the same.
    assert varies(jax.grad(lambda w, x: lax.psum(loss(w, x), AXIS)), [False, True]) == [True]


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0] * 2))


def test_custom_rules():
    assert varies(lambda same, mine: (doubled(same), doubled(mine)), [False, True]) == [False, True]
    assert varies(lambda x: jax.nn.relu(lax.psum(x, AXIS)), [True]) == [False]
    assert varies(jax.nn.relu, [True]) == [True]


def test_loops_and_conditions():
    def scanned(same, mine):
        return lax.scan(lambda c, x: (c + x, c), same, mine)

    ones = jnp.ones(3)
    assert varies(scanned, [False, False], 1.0, ones) == [False, False]
    assert varies(scanned, [False, True], 1.0, ones) == [True, True]
    assert varies(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x), [False]) == [False]
    assert varies(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x), [True]) == [True]
    assert varies(lambda p, x: lax.cond(p > 0, jnp.sin, jnp.cos, x), [True, False]) == [True]
    assert varies(lambda p, x: lax.cond(p > 0, jnp.sin, jnp.cos, x), [False, False]) == [False]


def test_a_loop_that_asks_for_the_replica_id():
    def fn(x):
        return lax.fori_loop(0, 3, lambda i, c: c + lax.axis_index(AXIS), x)

    assert varies(fn, [False], 1) == [True]


def test_a_constant_of_the_program():
    table = jnp.arange(3.0)
    assert varies(lambda i: table * i, [False]) == [False]
    assert varies(lambda i: table * i, [True]) == [True]


def test_a_conditional_whose_condition_is_the_same_varies_as_its_branches_do():
    def fn(same, mine):
        total = lax.cond(same > 0, lambda: lax.psum(mine, AXIS), lambda: 0.0 * same)
        either = lax.cond(same > 0, lambda: mine, lambda: same)
        return total, either, lax.cond(mine > 0, lambda: same, lambda: -same)

    assert varies(fn, [False, True]) == [False, True, True]
