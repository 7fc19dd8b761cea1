"""Making a strategy current without a ``with`` block."""

import threading

import pytest

import distrib
from distrib.errors import ContextError
from tests.support.strategies import central, mirrored


@pytest.fixture(autouse=True)
def undone():
    """Leave the default strategy current."""
    yield
    distrib.experimental_set_strategy(None)


def test_it_stays_until_it_is_replaced():
    first, second = mirrored(2), central(2)
    distrib.experimental_set_strategy(first)
    assert distrib.get_strategy() is first
    assert distrib.has_strategy()
    assert distrib.in_cross_replica_context()
    assert distrib.get_replica_context() is None
    assert distrib.Variable(1.0).distribute_strategy is first
    distrib.experimental_set_strategy(second)
    assert distrib.get_strategy() is second
    distrib.experimental_set_strategy(None)
    assert not distrib.has_strategy()
    assert distrib.get_replica_context().num_replicas_in_sync == 1


def test_scopes_and_steps_of_the_current_strategy():
    strategy = mirrored(2)
    distrib.experimental_set_strategy(strategy)
    with strategy.scope():
        assert distrib.get_strategy() is strategy
    assert distrib.get_strategy() is strategy
    result = strategy.run(lambda: distrib.get_replica_context().replica_id_in_sync_group * 1)
    assert [int(x) for x in result.values] == [0, 1]
    with pytest.raises(ContextError, match="Mixing different"):
        with mirrored(2).scope():
            pass


def test_inside_of_a_scope_it_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        for given in (mirrored(2), strategy, None):
            with pytest.raises(ContextError, match="inside a strategy's scope: leave the `with`"):
                distrib.experimental_set_strategy(given)


def test_what_is_no_strategy_is_refused():
    with pytest.raises(TypeError, match="got 3: pass a strategy, or None"):
        distrib.experimental_set_strategy(3)
    assert not distrib.has_strategy()


def test_inside_of_a_step_it_is_refused():
    with pytest.raises(ContextError, match="inside a strategy's scope"):
        mirrored(2).run(lambda: distrib.experimental_set_strategy(None))


def test_it_is_of_this_thread():
    distrib.experimental_set_strategy(mirrored(2))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(distrib.has_strategy()))
    thread.start()
    thread.join()
    assert seen == [False]
