"""The program of a replica, cut at its meetings with the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from distrib.engines.meetings import (
    acts,
    check_same_meetings,
    cut,
    divisions,
    is_meeting,
    look_up,
    means,
    needed,
)
from distrib.errors import UnevenReplicasError
from distrib.platform.jax_compat import bind_equation

AXIS = "replica"
SIZE = 3


def traced(fn, *args, axes=((AXIS, SIZE),)):
    return jax.make_jaxpr(fn, axis_env=list(axes))(*args)


def cut_of(fn, *args):
    return cut(traced(fn, *args), SIZE)


def meeting_names(stretches):
    return [meeting.primitive.name.removesuffix("_invariant") for meeting in stretches.meetings]


def psum(x):
    return lax.psum(x, AXIS)


# What a meeting is.


@pytest.mark.parametrize(
    "fn",
    [
        psum,
        lambda x: lax.pmax(x, AXIS),
        lambda x: lax.pmin(x, (AXIS,)),
        lambda x: lax.all_gather(x, AXIS),
        lambda x: lax.ppermute(x, AXIS, [(0, 1)]),
        lambda x: lax.all_to_all(x, AXIS, 0, 0),
        lambda x: lax.psum_scatter(x, AXIS, tiled=True),
    ],
    ids=["psum", "pmax", "pmin", "all_gather", "ppermute", "all_to_all", "psum_scatter"],
)
def test_collectives_over_the_replicas_are_meetings(fn):
    equations = traced(fn, jnp.ones(SIZE)).jaxpr.eqns
    assert sum(is_meeting(equation) for equation in equations) == 1
    assert len(cut_of(lambda x: fn(x * 2) + 1, jnp.ones(SIZE)).meetings) == 1


def test_other_equations_are_none():
    def fn(x):
        return lax.psum(x, "model") + lax.axis_index(AXIS)

    equations = traced(fn, 1.0, axes=((AXIS, SIZE), ("model", 2))).jaxpr.eqns
    assert not any(is_meeting(equation) for equation in equations)


def test_what_acts():
    def fn(x):
        jax.debug.print("{}", x)
        return psum(jnp.sin(x)) + lax.axis_index(AXIS)

    acting = [e.primitive.name for e in traced(fn, 1.0).jaxpr.eqns if acts(e)]
    assert len(acting) == 1 and "debug" in acting[0]


# Cutting.


def test_stretches_lie_between_the_meetings():
    def fn(x):
        a = psum(x * 2)
        b = lax.pmax(jnp.sin(a) + x, AXIS)
        return b - 1

    stretches = cut_of(fn, jnp.float32(1))
    assert meeting_names(stretches) == ["psum", "pmax"]
    names = [[e.primitive.name for e in stretch] for stretch in stretches.stretches]
    assert names == [["mul"], ["sin", "add"], ["sub"]]
    assert len(stretches.inputs) == len(stretches.outputs) == 1


def test_a_program_without_meetings_is_one_stretch():
    stretches = cut_of(lambda x: x + 1, 1.0)
    assert len(stretches.stretches) == 1
    assert stretches.meetings == ()


@jax.custom_vjp
def custom(x):
    return psum(x) * 2


custom.defvjp(lambda x: (custom(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    "call",
    [
        jax.jit(lambda x: psum(x) * 2),
        jax.jit(lambda x: jax.jit(psum)(x) * 2),
        jax.checkpoint(lambda x: psum(x) * 2),
        custom,
    ],
    ids=["jit", "jit in jit", "checkpoint", "custom_vjp"],
)
def test_meetings_inside_of_calls_are_brought_to_the_top(call):
    stretches = cut_of(lambda x: call(x + 1) + 3, 1.0)
    assert meeting_names(stretches) == ["psum"]
    assert all(is_meeting(meeting) for meeting in stretches.meetings)


def test_calls_without_meetings_stay_what_they_are():
    stretches = cut_of(lambda x: psum(jax.jit(jnp.sin)(x)), 1.0)
    names = [e.primitive.name for e in stretches.stretches[0]]
    assert names in (["jit"], ["pjit"])


def test_a_cut_program_computes_what_the_whole_did():
    table = np.array([2.0, 3.0], np.float32)

    @jax.jit
    def inner(x, y):
        return psum(x * table) + y, y - x

    def fn(x, y):
        a, b = inner(x, y)
        return lax.pmax(a * b, AXIS), b

    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    y = jnp.ones((SIZE, 2))
    stretches = cut(traced(fn, x[0], y[0]), SIZE)

    def by_stretches(x, y):
        values = stretches.constants() | dict(zip(stretches.inputs, (x, y), strict=True))
        for i, stretch in enumerate(stretches.stretches):
            for equation in (*stretch, *stretches.meetings[i : i + 1]):
                operands = [look_up(values, atom) for atom in equation.invars]
                results = bind_equation(equation, operands)
                values.update(zip(equation.outvars, results, strict=True))
        return tuple(look_up(values, atom) for atom in stretches.outputs)

    expected = jax.vmap(fn, axis_name=AXIS)(x, y)
    for result, right in zip(jax.vmap(by_stretches, axis_name=AXIS)(x, y), expected, strict=True):
        np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: lax.scan(lambda c, _: (psum(c), None), x, None, length=2)[0], "scan"),
        (lambda x: lax.while_loop(lambda c: c < 3, lambda c: psum(c) + 1, x), "while"),
        (lambda x: lax.cond(x > 0, psum, lambda v: v, x), "cond"),
        (jax.jit(lambda x: lax.fori_loop(0, 2, lambda i, c: psum(c), x)), "(scan|while)"),
    ],
    ids=["scan", "while", "cond", "loop in jit"],
)
def test_a_meeting_in_a_loop_is_refused(fn, name):
    message = f"collective inside of a {name}.*drop_remainder=True.*choose a batch size"
    with pytest.raises(UnevenReplicasError, match=message):
        cut_of(fn, 1.0)


def test_loops_without_meetings_are_no_obstacle():
    stretches = cut_of(lambda x: psum(lax.fori_loop(0, 2, lambda i, c: c * 2, x)), 1.0)
    assert meeting_names(stretches) == ["psum"]


# What is needed.


def test_needed_is_what_outputs_meetings_and_effects_depend_on():
    def fn(x, unused, printed):
        jax.debug.print("{}", printed * 2)
        _ = unused * 3
        return psum(x), x - 1

    stretches = cut_of(fn, 1.0, 1.0, 1.0)
    x, unused, printed = stretches.inputs
    wanted = needed(stretches, stretches.outputs[:1])
    assert x in wanted and printed in wanted
    assert unused not in wanted
    assert stretches.outputs[1] not in wanted


# Means.


def found_means(fn, *args):
    stretches = cut_of(fn, *args)
    return set(means(stretches, divisions(stretches, SIZE)))


def test_pmean_is_a_mean_and_psum_is_none():
    assert found_means(lambda x: lax.pmean(x, AXIS), 1.0) == {(0, 0)}
    assert found_means(psum, 1.0) == set()
    assert found_means(lambda x: psum(x) / (SIZE + 1), 1.0) == set()


def test_a_sum_that_is_used_elsewhere_as_well_is_no_mean():
    def fn(x):
        total = psum(x * 2)
        return total / SIZE, total

    def fn_of_both(x):
        total = psum(x * 2)
        return total / SIZE + jnp.sin(total)

    assert found_means(fn, 1.0) == found_means(fn_of_both, 1.0) == set()


def test_the_gradient_of_a_mean_is_one():
    assert found_means(jax.grad(lambda x: lax.pmean(x, AXIS) ** 2), 1.0) == {(0, 0), (1, 0)}


def test_means_are_found_by_operand():
    def fn(x, y):
        a, b = lax.psum((x, y), AXIS)
        return a / SIZE, b

    stretches = cut_of(fn, 1.0, 1.0)
    (mean,) = means(stretches, divisions(stretches, SIZE))
    meeting, operand = mean
    assert stretches.meetings[meeting].invars[operand] is stretches.inputs[0]


def test_divisions_are_found_by_place():
    stretches = cut_of(lambda x: psum(x / SIZE) / 2 + x / 4.0, 1.0)
    assert divisions(stretches, SIZE) == [(0, 0)]
    assert [place[0] for place in divisions(stretches, 2)] == [1]
    assert divisions(stretches, 5) == []


# Different programs.


def test_programs_of_different_shapes_that_meet_alike():
    cuts = [cut_of(lambda x: psum(x.sum()), jnp.ones(n)) for n in (2, 1)]
    check_same_meetings(cuts, ["float32[2]", "float32[1]"])


def test_meetings_of_unequal_shapes():
    cuts = [cut_of(psum, jnp.ones(n)) for n in (2, 1)]
    message = (
        r"shapes \[2\] and \[1\] meet at different collectives: psum.*\(float32\[2\]\) and "
        r"psum.*\(float32\[1\]\)\. .*reduce over the batch first"
    )
    with pytest.raises(UnevenReplicasError, match=message):
        check_same_meetings(cuts, ["[2]", "[1]"])


def test_different_collectives():
    cuts = [cut_of(psum, 1.0), cut_of(lambda x: lax.pmax(x, AXIS), 1.0)]
    with pytest.raises(UnevenReplicasError, match="meet at different collectives: psum.* and pmax"):
        check_same_meetings(cuts, ["A", "B"])


def test_a_different_number_of_collectives():
    cuts = [cut_of(psum, 1.0), cut_of(lambda x: psum(psum(x)), 1.0)]
    with pytest.raises(UnevenReplicasError, match="A and B meet at 1 and 2 collectives: one would"):
        check_same_meetings(cuts, ["A", "B"])
