"""What a function that makes one value for each replica is told."""

import dataclasses

import pytest

import distrib
from distrib.values import ValueContext
from tests.support.strategies import on_every_strategy


def test_outside_of_a_strategy_there_is_one_replica():
    context = ValueContext()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert repr(context) == str(context) == "distrib.ValueContext(replica id 0, total: 1)"


def test_it_is_a_value():
    assert ValueContext(1, 2) == ValueContext(1, 2) != ValueContext(0, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ValueContext().replica_id_in_sync_group = 1
    assert distrib.experimental.ValueContext is ValueContext


@on_every_strategy
def test_each_replica_is_asked_for_once_in_order(make_strategy):
    strategy = make_strategy()
    count = strategy.num_replicas_in_sync
    seen = []

    def value_fn(context):
        seen.append(context)
        return context.replica_id_in_sync_group * 10

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert seen == [ValueContext(i, count) for i in range(count)]
    assert strategy.experimental_local_results(value) == tuple(i * 10 for i in range(count))
