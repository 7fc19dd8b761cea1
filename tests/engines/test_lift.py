"""From the user's function to a pure function of a replica: what it read, changed and returned."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.collectives import NcclAllReduce
from distrib.engines.lift import Call, lift
from distrib.errors import ContextError, NestedTraceError, OutputError, TracedValueError
from distrib.platform.jax_compat import jaxpr_function
from tests.support.strategies import mirrored

SUM, MEAN = distrib.VariableAggregation.SUM, distrib.VariableAggregation.MEAN
ON_READ = distrib.VariableSynchronization.ON_READ
X = jax.ShapeDtypeStruct((2,), jnp.float32)


def lifted(strategy, fn, *forms, deferred=False):
    call = Call(fn, lambda leaves, _: (tuple(leaves), {}), forms, (True,) * len(forms), None)
    return lift(
        strategy,
        call,
        num_replicas=strategy.num_replicas_in_sync,
        ops=NcclAllReduce(),
        deferred=deferred,
    )


def variables(strategy, *names, **kwargs):
    with strategy.scope():
        made = [distrib.Variable(jnp.ones(2), name=name, **kwargs) for name in names]
    return made[0] if len(made) == 1 else made


def used(step):
    """Return the variables whose inputs stand in an equation, or go straight to an output."""
    jaxpr = step.jaxpr.jaxpr
    atoms = [a for equation in jaxpr.eqns for a in equation.invars] + list(jaxpr.outvars)
    ids = {id(a) for a in atoms}
    inputs = jaxpr.invars[len(jaxpr.invars) - len(step.variables) :]
    return [v for v, atom in zip(step.variables, inputs, strict=True) if id(atom) in ids]


def same(found, expected):
    return [id(v) for v in found] == [id(v) for v in expected]


# Variables.


def test_reads_and_writes_are_found():
    strategy = mirrored(2)
    a, b, c, d = variables(strategy, "a", "b", "c", "d", aggregation=MEAN)

    def step(x):
        c.assign(a.value() * x)
        b.assign_add(x)
        return a.value()

    found = lifted(strategy, step, X)
    assert same(found.writes, [c, b])
    assert same(used(found), [a, b])  # b, because to add to it reads it
    assert {v.name for v in found.reads} >= {"a", "b"}
    assert same(found.variables, [a, b, c, d])


def test_only_variables_that_are_read_stand_in_the_program():
    strategy = mirrored(2)
    a, b, c = variables(strategy, "a", "b", "c", aggregation=MEAN)

    def step(x):
        c.assign(x)
        return b.value() + x

    found = lifted(strategy, step, X)
    assert same(used(found), [b])
    assert [v.name for v in found.reads if v.name != "c"] == ["b"]
    assert a.name == "a"  # alive, and left out


def test_a_step_reads_what_it_assigned_before():
    strategy = mirrored(1)
    v = variables(strategy, "v")

    def step(x):
        v.assign(x)
        return v.value() * 2

    found = lifted(strategy, step, X)
    assert used(found) == []
    out, new = jaxpr_function(found.jaxpr)(jnp.array([1.0, 2.0]), jnp.zeros(2))
    assert (out.tolist(), new.tolist()) == ([2, 4], [1, 2])


def test_the_program_is_pure():
    """(values read, inputs) -> (outputs, new values), whatever the variables hold by then."""
    strategy = mirrored(1)
    v, w = variables(strategy, "v", "w")

    def step(x):
        v.assign_add(w * x)
        return {"v": v.value(), "n": 3}

    found = lifted(strategy, step, X)
    run = jaxpr_function(found.jaxpr)
    arguments = (jnp.array([1.0, 2.0]), jnp.array([10.0, 10.0]), jnp.array([3.0, 4.0]))
    for _ in range(2):
        outputs = run(*arguments)
        assert [x.tolist() for x in outputs] == [[13, 18], [13, 18]]
    result = found.output(outputs[: found.num_outputs])
    assert (result["v"].tolist(), result["n"]) == ([13, 18], 3)
    assert v.numpy().tolist() == [1, 1]


def test_a_variable_of_another_strategy_is_found_by_tracing_again():
    strategy, other = mirrored(2), mirrored(1)
    mine, theirs = variables(strategy, "mine"), variables(other, "theirs")
    outside = distrib.Variable(jnp.ones(2), name="outside")
    traces = []

    def step(x):
        traces.append(1)
        return mine + theirs + outside + x

    found = lifted(strategy, step, X)
    assert len(traces) == 3  # one more for each variable that was not known
    assert same(found.variables, [mine, theirs, outside])
    assert same(used(found), [mine, theirs, outside])
    traces.clear()
    lifted(strategy, lambda x: (traces.append(1), x + mine.value())[1], X)
    assert traces == [1]


def test_a_variable_of_another_strategy_is_not_written():
    strategy = mirrored(2)
    theirs = variables(mirrored(1), "theirs")
    with pytest.raises(ContextError, match="Mixing different.*'theirs'"):
        lifted(strategy, lambda x: theirs.assign(x), X)


def test_updates_that_are_left_to_the_device_of_the_variables():
    strategy = mirrored(2)
    v, w = variables(strategy, "v", "w", aggregation=SUM)

    def step(x):
        v.assign_add(x)
        w.assign(x * 2)
        v.assign_sub(x)

    found = lifted(strategy, step, X, deferred=True)
    assert found.writes == ()
    updates = [deferred.update for deferred in found.updates]
    assert [[u.name for u in update.variables] for update in updates] == [
        ["v"],
        ["w"],
        ["v"],
    ]
    assert [deferred.shards for deferred in found.updates] == [(None,)] * 3
    assert all(update.operand is None for update in updates)  # nothing traced is left
    assert [a.shape for a in found.jaxpr.out_avals] == [(2,)] * 3


# Outputs.


class Point:
    """A pytree of the user's own."""

    def __init__(self, x, label):
        self.x, self.label = x, label


jax.tree_util.register_pytree_node(
    Point, lambda p: ((p.x,), p.label), lambda label, children: Point(children[0], label)
)


def test_python_objects_in_the_output_come_back_as_they_are():
    strategy = mirrored(2)
    v = variables(strategy, "v")
    mean = distrib.metrics.Mean()

    def step(x):
        return {
            "arrays": (x, np.float32(2), Point(x + 1, "p")),
            "constants": [1, 2.5, True, "text", b"bytes", 1j, None],
            "variable": v,
            "metric": mean,
            "empty": (),
        }

    found = lifted(strategy, step, X)
    assert found.num_outputs == 3
    result = found.output(["first", "second", "third"])
    assert result["arrays"][:2] == ("first", "second")
    assert (result["arrays"][2].x, result["arrays"][2].label) == ("third", "p")
    assert result["constants"] == [1, 2.5, True, "text", b"bytes", 1j, None]
    assert type(result["constants"][2]) is bool
    assert result["variable"] is v
    assert result["metric"] is mean
    assert result["empty"] == ()


def test_an_output_that_no_replica_can_hand_back_is_named():
    with pytest.raises(OutputError, match=r"<object.* of type object at a\[1\], which is not an"):
        lifted(mirrored(2), lambda x: {"a": [x, object()]}, X)


def test_a_variable_in_the_output_is_not_kept_alive():
    strategy = mirrored(2)
    held = [variables(strategy, "v")]
    output = lifted(strategy, lambda x: held[0], X).output
    assert output([]) is held[0]
    alive = weakref.ref(held.pop())
    gc.collect()
    assert alive() is None
    assert output([]) is None


# Faults.


def test_python_that_needs_a_value():
    with pytest.raises(TracedValueError, match="known only when the step runs.*jnp.where"):
        lifted(mirrored(2), lambda x: float(x.sum()), X)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_a_change_inside_of_a_transformation(transform):
    strategy = mirrored(2)
    v = variables(strategy, "v", aggregation=MEAN)

    def inner(x):
        v.assign(jnp.ones(2) * x)
        return x

    with pytest.raises(NestedTraceError, match="Variable 'v' was changed inside a JAX transf"):
        lifted(strategy, lambda x: transform(inner)(x), X)


def test_a_value_that_escaped_from_an_earlier_trace():
    strategy = mirrored(2)
    kept = []
    lifted(strategy, lambda x: kept.append(x), X)
    with pytest.raises(TracedValueError, match="escaped from an earlier one"):
        lifted(strategy, lambda x: x + kept[0], X)


def test_the_users_own_error_comes_out():
    def step(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lifted(mirrored(2), step, X)


def test_the_replica_id():
    one = lifted(mirrored(1), lambda x: x * int(_replica_id()), X)
    assert "axis_index" not in str(one.jaxpr)
    assert "axis_index" in str(lifted(mirrored(2), lambda x: x * _replica_id(), X).jaxpr)


def _replica_id():
    return distrib.get_replica_context().replica_id_in_sync_group


def test_an_on_read_variable_is_written_by_each_replica_alone():
    strategy = mirrored(2)
    v = variables(strategy, "v", synchronization=ON_READ, aggregation=SUM)
    assert "psum" not in str(lifted(strategy, lambda x: v.assign_add(x), X).jaxpr)
    w = variables(strategy, "w", aggregation=SUM)
    assert "psum" in str(lifted(strategy, lambda x: w.assign_add(x), X).jaxpr)
