import jax.numpy as jnp
import pytest

import distrib
from distrib.context import (
    current_program,
    require_cross_replica_context,
    require_same_strategy,
)
from distrib.errors import ContextError


@pytest.fixture
def strategy() -> distrib.MirroredStrategy:
    return distrib.MirroredStrategy(["CPU:0", "CPU:1"])


def test_outside_of_every_scope():
    replica = distrib.get_replica_context()
    assert replica is not None
    assert replica.strategy is distrib.get_strategy()
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)
    assert not distrib.has_strategy()
    assert not distrib.in_cross_replica_context()
    assert current_program() is None


def test_in_a_scope(strategy):
    with strategy.scope():
        assert distrib.get_strategy() is strategy
        assert distrib.has_strategy()
        assert distrib.in_cross_replica_context()
        assert distrib.get_replica_context() is None
    assert not distrib.has_strategy()


@pytest.mark.parametrize("scoped", [False, True])
def test_in_a_step(strategy, scoped):
    seen = {}

    def step():
        replica = distrib.get_replica_context()
        seen["strategy"] = distrib.get_strategy() is replica.strategy is strategy
        seen["has"] = distrib.has_strategy()
        seen["cross"] = distrib.in_cross_replica_context()
        seen["program"] = current_program() is not None
        seen["size"] = replica.num_replicas_in_sync
        return replica.replica_id_in_sync_group

    if scoped:
        with strategy.scope():
            result = strategy.run(step)
    else:
        result = strategy.run(step)
    assert [int(part) for part in result.values] == [0, 1]
    assert seen == {"strategy": True, "has": True, "cross": False, "program": True, "size": 2}
    assert current_program() is None


def test_in_a_merge_function(strategy):
    seen = []

    def merge(current):
        seen.append((current is distrib.get_strategy() is strategy, distrib.get_replica_context()))
        with current.scope():
            seen.append((distrib.in_cross_replica_context(), current_program() is not None))

    strategy.run(lambda: distrib.get_replica_context().merge_call(merge))
    assert seen == [(True, None), (True, True)]


def test_the_context_is_left_when_a_step_raises(strategy):
    def step():
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        strategy.run(step)
    assert not distrib.has_strategy()
    assert [float(x) for x in strategy.run(lambda: jnp.float32(2)).values] == [2.0, 2.0]


def test_replica_devices(strategy):
    seen = []
    strategy.run(lambda: seen.append(distrib.get_replica_context().devices))
    one = distrib.OneDeviceStrategy("CPU:3")
    one.run(lambda: seen.append(distrib.get_replica_context().devices))
    task = "/job:localhost/replica:0/task:0/device:CPU:"
    assert seen == [(f"{task}*",), (f"{task}3",)]


def test_require_same_strategy(strategy):
    other = distrib.OneDeviceStrategy("CPU:0")
    require_same_strategy(strategy)
    with strategy.scope():
        require_same_strategy(strategy)
        with pytest.raises(
            ContextError, match="OneDeviceStrategy of 1 on CPU:0> is not <distrib.Mirr"
        ):
            require_same_strategy(other)


def test_require_cross_replica_context(strategy):
    def check():
        require_cross_replica_context(strategy, "frobnicate", "leave it")

    check()
    with strategy.scope():
        check()
    with pytest.raises(ContextError, match="frobnicate requires being in cross.*: leave it"):
        strategy.run(check)
