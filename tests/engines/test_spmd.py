"""The compiled step: what it is given, what it gives away, and how often it is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.collectives import NcclAllReduce
from distrib.engines.lift import Call, lift
from distrib.engines.placement import InProgram
from distrib.engines.signature import Kind
from distrib.engines.spmd import (
    Leaf,
    Step,
    even_body,
    even_finish,
    stack_components,
    stack_padded,
)
from distrib.platform import replica_mesh, replicated, split
from distrib.values import Layout
from tests.support.strategies import mirrored, on_every_strategy

SUM, MEAN = distrib.VariableAggregation.SUM, distrib.VariableAggregation.MEAN
CPUS = jax.devices("cpu")


def made(strategy, count=1, **kwargs):
    with strategy.scope():
        return [distrib.Variable(jnp.full(4, float(i)), **kwargs) for i in range(count)]


def arrays_of(variables):
    return [v.storage.cell.array for v in variables]


# Donation.


@on_every_strategy
def test_old_values_that_nobody_holds_are_deleted(make_strategy):
    strategy = make_strategy()
    variables = made(strategy, 5, aggregation=SUM)

    def step(x):
        for v in variables:
            v.assign_add(x)

    for _ in range(3):
        old = arrays_of(variables)
        strategy.run(step, args=(jnp.ones(4),))
        assert all(array.is_deleted() for array in old)
    count = strategy.num_replicas_in_sync
    assert [float(v.numpy()[0]) for v in variables] == [i + 3 * count for i in range(5)]


@on_every_strategy
def test_old_values_that_are_overwritten_unread_are_deleted_too(make_strategy):
    strategy = make_strategy()
    variables = made(strategy, 2, aggregation=MEAN)
    old = arrays_of(variables)

    def step(x):
        for v in variables:
            v.assign(x)

    strategy.run(step, args=(jnp.ones(4),))
    assert all(array.is_deleted() for array in old)


@on_every_strategy
def test_what_was_lent_is_spared(make_strategy):
    strategy = make_strategy()
    lent, other = made(strategy, 2, aggregation=SUM)
    before = arrays_of([lent, other])
    held = [lent.value(), *lent.values]

    def step(x):
        lent.assign_add(x)
        other.assign_add(x)

    strategy.run(step, args=(jnp.ones(4),))
    assert [array.tolist() for array in held] == [[0, 0, 0, 0]] * len(held)
    assert [array.is_deleted() for array in before] == [False, True]
    # One copy was enough: what the step made nobody holds.
    new = lent.storage.cell.array
    strategy.run(step, args=(jnp.ones(4),))
    assert new.is_deleted()


@on_every_strategy
def test_what_is_only_read_stays(make_strategy):
    strategy = make_strategy()
    read, untouched, written = made(strategy, 3, aggregation=SUM)
    before = arrays_of([read, untouched])
    x = jnp.ones(4)
    batch = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones(4))

    def step(x, batch):
        written.assign_add(read * x + batch)

    for _ in range(2):
        strategy.run(step, args=(x, batch))
    assert [a is b for a, b in zip(before, arrays_of([read, untouched]), strict=True)] == [True] * 2
    assert x.tolist() == [1, 1, 1, 1]
    assert [part.tolist() for part in strategy.experimental_local_results(batch)] == [
        [1, 1, 1, 1]
    ] * strategy.num_replicas_in_sync


def test_what_a_step_returned_is_not_the_variable_itself():
    strategy = mirrored(2)
    (v,) = made(strategy, aggregation=SUM)

    def step():
        return v.assign_add(jnp.ones(4))

    first = strategy.run(step)
    second = strategy.run(step)
    assert [part.tolist() for part in first.values] == [[2, 2, 2, 2]] * 2
    assert [part.tolist() for part in second.values] == [[4, 4, 4, 4]] * 2


# One program.


def compilations(caplog):
    return [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_step_is_one_program_and_later_calls_compile_nothing(count, caplog):
    strategy = mirrored(count)
    variables = made(strategy, 20, aggregation=MEAN)
    batch = strategy.experimental_distribute_dataset(np.ones((8, 4), np.float32), batch_size=8)
    (x,) = batch

    def step(x, rate, scale):
        for v in variables:
            v.assign_sub(rate * scale * x.mean(0))
        return {"loss": x.sum(), "first": variables[0].value()}

    scale = np.ones(4, np.float32)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        result = strategy.run(step, args=(x, 0.1, scale))
        jax.block_until_ready(result)
        assert len(compilations(caplog)) == 1, caplog.text
        caplog.clear()
        for i in range(3):
            strategy.run(step, args=(x, 0.1 * i, scale))
        assert compilations(caplog) == []


def test_variables_that_are_not_used_do_not_enter():
    strategy = mirrored(2)
    used, *_others = made(strategy, 50)
    text = strategy.extended.compiled_text(lambda: used * 2)
    entry = text[text.index("\nENTRY ") :]
    assert entry.count(" parameter(") == 1


def test_a_program_writes_its_variables_in_place():
    strategy = mirrored(2)
    v, w = made(strategy, 2, aggregation=MEAN)

    def step(x):
        v.assign_add(x)
        return w + x

    text = strategy.extended.compiled_text(step, (jnp.ones(4),))
    header = text[: text.index("\n")]
    assert "input_output_alias={" in header
    assert header.count("-alias)") == 1  # v, and not w


# The step by itself.


def test_a_step_that_is_made_by_hand():
    strategy = mirrored(2)
    mesh = strategy.extended.mesh
    with strategy.scope():
        total = distrib.Variable(0.0, aggregation=SUM)

    def fn(rows, k):
        total.assign_add(rows.sum())
        return rows * k, "constant"

    forms = (jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    call = Call(fn, lambda leaves, _: (tuple(leaves), {}), forms, (True, False), None)
    lifted = lift(strategy, call, num_replicas=2, ops=NcclAllReduce(), deferred=False)
    rows = distrib.PerReplica([jnp.arange(3.0), jnp.arange(3.0) + 10])
    key = (Layout.STACKED, (2, 3), jnp.dtype("float32"), None)
    leaves = [
        Leaf(Kind.SPLIT, key, jax.ShapeDtypeStruct((2, 3), jnp.float32)),
        Leaf(Kind.EVERYWHERE, int, forms[1]),
    ]
    step = Step(
        lifted, leaves, mesh, InProgram(), even_body(lifted, leaves, 2), even_finish(lifted, 2)
    )
    (product, constant), changes = step([rows, 2])
    assert [part.tolist() for part in product.values] == [[0, 2, 4], [20, 22, 24]]
    assert (constant, changes) == ("constant", {})
    assert float(total.numpy()) == 36.0


def test_how_leaves_lie_on_the_mesh():
    form = jax.ShapeDtypeStruct((2,), jnp.float32)
    everywhere, *rest = (
        Leaf(kind, None, form).spec for kind in (Kind.EVERYWHERE, Kind.SPLIT, Kind.UNEVEN)
    )
    assert everywhere == jax.sharding.PartitionSpec()
    assert rest == [jax.sharding.PartitionSpec("replica")] * 2


def test_stack_components_does_it_once():
    mesh = replica_mesh(CPUS[:2])
    value = distrib.PerReplica([1, 2])
    whole = stack_components(value, mesh)
    assert (whole.tolist(), whole.dtype) == ([1, 2], jnp.int32)
    assert stack_components(value, mesh) is whole
    assert value.layout is Layout.STACKED
    assert value.values == (1, 2)


def test_stack_padded_fills_up_with_zeros():
    mesh = replica_mesh(CPUS[:3])
    value = distrib.PerReplica([jnp.ones((2, 2)), jnp.ones((1, 2)), jnp.ones((0, 2))])
    whole = stack_padded(value, jax.ShapeDtypeStruct((3, 2, 2), jnp.float32), mesh)
    assert whole.tolist() == [[[1, 1], [1, 1]], [[1, 1], [0, 0]], [[0, 0], [0, 0]]]
    assert whole.sharding == split(mesh)


def test_arguments_that_lie_on_the_mesh_are_taken_as_they_are():
    strategy = mirrored(2)
    x = jax.device_put(jnp.arange(3.0), replicated(strategy.extended.mesh))
    for argument in (x, jnp.arange(3.0), np.arange(3.0), jax.device_put(jnp.arange(3.0), CPUS[6])):
        result = strategy.run(_doubled, args=(argument,))
        assert [part.tolist() for part in result.values] == [[0, 2, 4]] * 2


def _doubled(x):
    return x * 2
