"""Objects that are made of variables pass through a step by identity."""

import gc
import weakref

import jax.numpy as jnp

import distrib
from distrib.variables import HoldsVariables
from tests.support.strategies import on_every_strategy

SUM = distrib.VariableAggregation.SUM


class Counter(HoldsVariables):
    """A user's own object of variables."""

    def __init__(self):
        self.seen = distrib.Variable(0.0, aggregation=SUM, name="seen")
        self.label = "label"
        self.steps = distrib.Variable(0, aggregation=SUM, name="steps")
        self.nested = [distrib.Variable(0.0, name="nested")]

    def add(self, x):
        self.seen.assign_add(x)
        self.steps.assign_add(jnp.int32(1))


def test_its_variables_are_its_attributes_in_order():
    counter = Counter()
    assert [v.name for v in counter.distributed_variables()] == ["seen", "steps"]
    assert HoldsVariables().distributed_variables() == []


@on_every_strategy
def test_it_is_an_argument_and_a_result(make_strategy):
    strategy = make_strategy()
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        counter, other = Counter(), Counter()
    traces = []

    def step(counter, x):
        traces.append(1)
        counter.add(x)
        return {"counter": counter, "seen": counter.seen.value()}

    for _ in range(3):
        result = strategy.run(step, args=(counter, jnp.float32(2)))
        assert result["counter"] is counter
    assert len(traces) == 1
    assert (float(counter.seen.numpy()), int(counter.steps.numpy())) == (6 * count, 3 * count)
    strategy.run(step, args=(other, jnp.float32(1)))
    assert len(traces) == 2  # its variables are other inputs: another program
    assert (float(counter.seen.numpy()), float(other.seen.numpy())) == (6 * count, count)


@on_every_strategy
def test_a_step_does_not_keep_it_alive(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        counter = Counter()

    def step(counter):
        counter.add(jnp.float32(1))

    strategy.run(step, args=(counter,))
    alive = weakref.ref(counter)
    del counter
    gc.collect()
    assert alive() is None
