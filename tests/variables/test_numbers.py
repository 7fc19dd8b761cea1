"""Integers, booleans, Python numbers and text in variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import VariableError
from tests.support.strategies import mirrored, on_two_replicas

Aggregation = distrib.VariableAggregation
ON_READ = distrib.VariableSynchronization.ON_READ


def made(value, **kwargs):
    with mirrored(2).scope():
        return distrib.Variable(value, name="v", **kwargs)


@pytest.mark.parametrize(
    "value",
    ["s", b"s", ["text"], np.array("text"), object(), None],
    ids=["str", "bytes", "list", "array", "object", "None"],
)
def test_text_and_objects_are_kept_in_python(value):
    with pytest.raises(VariableError, match="'v' was given .* no device can hold it. Keep text"):
        made(value)
    if value is not None:
        with pytest.raises(VariableError, match="'v' was given .* no array of numbers"):
            made(1.0).assign(value)


def test_text_is_a_constant_of_a_step():
    strategy = mirrored(2)
    seen = []
    result = strategy.run(lambda mode: seen.append(mode) or mode + "!", args=("train",))
    assert (result, seen) == ("train!", ["train"])


@pytest.mark.parametrize(
    ("initial", "value"),
    [
        (1, True),
        (1, np.int8(3)),
        (np.uint8(3), 200),
        (jnp.int8(3), jnp.asarray(3)),
        (jnp.float16(1), 2.5),
        (jnp.bfloat16(1), 2),
        (1j, 2.0),
        (True, jnp.bool_(False)),
    ],
    ids=str,
)
def test_numbers_that_fit(initial, value):
    v = made(initial)
    v.assign(value)
    assert v.dtype == jnp.asarray(initial).dtype == v.numpy().dtype
    assert v.numpy() == value


@pytest.mark.parametrize(
    ("initial", "value", "message"),
    [
        (1, 1.5, "dtype is int32, and the value's float32 would lose"),
        (1, 1j, "dtype is int32, and the value's complex64 would lose"),
        (1.0, 1j, "dtype is float32, and the value's complex64 would lose"),
        ([1], [1.5], "dtype is int32, and the value's float32 would lose"),
        (jnp.int8(1), np.int32(3), "dtype is int8, and the value's int32 would lose"),
        (jnp.int8(1), 300, "300 is outside of the range of its dtype int8"),
        (np.uint8(1), -1, "-1 is outside of the range of its dtype uint8"),
        (1, 2**31, "2147483648 is outside of the range of its dtype int32"),
        (True, 1, "dtype is bool, and the value is the number 1. Assign True"),
        (True, 1.0, "dtype is bool, and the value's float32 would lose"),
    ],
    ids=str,
)
@pytest.mark.parametrize("inside", [False, True], ids=["cross", "replica"])
def test_numbers_that_do_not_fit(initial, value, message, inside):
    v = made(initial)
    with pytest.raises(VariableError, match=f"'v'.*{message}"):
        if inside:
            v.distribute_strategy.run(lambda: v.assign(value))
        else:
            v.assign(value)


def test_an_initial_value_that_is_too_large():
    with pytest.raises(VariableError, match="'v' was given 1099511627776, which is too large"):
        made(2**40)


def test_integers_wrap_around_as_arrays_do():
    v = made(2**31 - 1)
    v.assign_add(1)
    assert v.numpy() == -(2**31)


@pytest.mark.parametrize(
    ("synchronization", "aggregation", "copies", "total"),
    [
        ("ON_WRITE", "NONE", [1, 2], 1),
        ("ON_WRITE", "SUM", [3, 3], 3),
        ("ON_WRITE", "ONLY_FIRST_REPLICA", [1, 1], 1),
        ("ON_READ", "SUM", [1, 2], 3),
        ("ON_READ", "ONLY_FIRST_REPLICA", [1, 2], 1),
    ],
)
def test_integers_in_replicas(engine, synchronization, aggregation, copies, total):
    v = made(
        7,
        synchronization=distrib.VariableSynchronization[synchronization],
        aggregation=Aggregation[aggregation],
    )
    v.distribute_strategy.run(
        lambda: v.assign(jnp.asarray(distrib.get_replica_context().replica_id_in_sync_group) + 1)
    )
    assert [int(copy) for copy in v.values] == copies
    assert (v.numpy().tolist(), v.numpy().dtype) == (total, np.int32)


@pytest.mark.parametrize("aggregation", ["NONE", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_booleans_in_replicas(engine, synchronization, aggregation):
    v = made(
        True,
        synchronization=distrib.VariableSynchronization[synchronization],
        aggregation=Aggregation[aggregation],
    )

    def step():
        v.assign(jnp.asarray(distrib.get_replica_context().replica_id_in_sync_group) > 0)

    v.distribute_strategy.run(step)
    first_only = (synchronization, aggregation) == ("ON_WRITE", "ONLY_FIRST_REPLICA")
    assert [bool(copy) for copy in v.values] == ([False, False] if first_only else [False, True])


@on_two_replicas
def test_what_booleans_and_integers_refuse(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        flags = distrib.Variable([True, False], name="v")
        for value, aggregation, message in (
            (True, Aggregation.SUM, "'v' has aggregation=SUM and the dtype bool: booleans have no"),
            (True, Aggregation.MEAN, "'v' has aggregation=MEAN and the non-floating dtype bool"),
            (1, Aggregation.MEAN, "'v' has aggregation=MEAN and the non-floating dtype int32"),
        ):
            with pytest.raises(VariableError, match=message):
                distrib.Variable(value, name="v", aggregation=aggregation)
    rows = distrib.IndexedSlices([True], [1])
    for change, name in (
        (lambda: flags.assign_add([True, True]), "assign_add"),
        (lambda: strategy.run(lambda: flags.assign_sub(jnp.array([True, True]))), "assign_sub"),
        (lambda: flags.scatter_add(rows), "scatter_add"),
    ):
        with pytest.raises(VariableError, match=f"{name} was called on variable 'v' of dtype bool"):
            change()
    flags.scatter_update(rows)
    assert flags.numpy().tolist() == [True, True]


def test_numbers_as_arguments_of_a_step_have_a_kind_only():
    v = made(jnp.int8(1))
    v.distribute_strategy.run(lambda x: v.assign(x), args=(5,))
    assert (int(v.numpy()), v.numpy().dtype) == (5, np.int8)
    with pytest.raises(VariableError, match="'v': its dtype is int8, and the value's float32"):
        v.distribute_strategy.run(lambda x: v.assign(x), args=(2.5,))
    assert isinstance(v.value(), jax.Array)
