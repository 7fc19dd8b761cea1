import jax.numpy as jnp
import pytest

import distrib
from distrib.errors import SlicesError, UnsupportedError, VariableError
from tests.support.strategies import mirrored, on_every_strategy

Aggregation = distrib.VariableAggregation


def made(strategy, value, **kwargs):
    with strategy.scope():
        return distrib.Variable(value, name="table", **kwargs)


@on_every_strategy
def test_scatters_outside_of_replicas(make_strategy):
    v = made(make_strategy(), [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    rows = distrib.IndexedSlices([[1.0, 2.0], [10.0, 20.0]], [0, 2])
    v.scatter_add(rows)
    v.scatter_update(distrib.IndexedSlices([[7.0, 7.0]], [1], (3, 2)))
    assert [x.tolist() for x in v.values] == [[[2, 3], [7, 7], [13, 23]]] * len(v.values)


@on_every_strategy
def test_a_scatter_returns_the_new_value(make_strategy):
    strategy = make_strategy()
    v = made(strategy, [1.0, 2.0], aggregation=Aggregation.MEAN)
    rows = distrib.IndexedSlices([5.0], [1])
    assert jnp.asarray(v.scatter_add(rows)).tolist() == [1, 7]
    result = strategy.run(lambda: v.scatter_sub(rows))
    if not isinstance(strategy, distrib.CentralStorageStrategy):
        (first, *_) = strategy.experimental_local_results(result)
        assert first.tolist() == [1, 2]


def test_what_is_refused():
    strategy = mirrored(2)
    v = made(strategy, [1.0, 2.0, 3.0])
    on_read = made(strategy, [1.0], synchronization=distrib.VariableSynchronization.ON_READ)
    summed = made(strategy, [1.0, 2.0, 3.0], aggregation=Aggregation.SUM)
    rows = distrib.IndexedSlices([1.0], [0])
    with pytest.raises(UnsupportedError, match="ON_READ` doesn't support `scatter_add`.*'table'"):
        on_read.scatter_add(rows)
    with pytest.raises(UnsupportedError, match="scatter_max is only supported .*'table' has SUM"):
        summed.scatter_max(rows)
    with pytest.raises(TypeError, match="scatter_add of variable 'table' takes a distrib.Indexed"):
        v.scatter_add(jnp.ones(3))
    with pytest.raises(SlicesError, match="'table' of shape .* index 3, and the table has rows 0"):
        v.scatter_add(distrib.IndexedSlices([1.0], [3]))
    with pytest.raises(SlicesError, match=r"'table' of shape \(3,\): .* of shape \(4,\)"):
        v.scatter_add(distrib.IndexedSlices([1.0], [0], (4,)))
    with pytest.raises(SlicesError, match=r"'table' .* rows of shape \(1,\)"):
        v.scatter_add(distrib.IndexedSlices([[1.0]], [0]))
    ints = made(strategy, [1, 2])
    with pytest.raises(VariableError, match="'table': its dtype is int32, and the value's float32"):
        ints.scatter_add(rows)
    assert v.numpy().tolist() == [1, 2, 3]


def test_a_scalar_has_no_rows():
    v = made(mirrored(2), 1.0)
    with pytest.raises(SlicesError, match=r"'table' of shape \(\)"):
        v.scatter_add(distrib.IndexedSlices([1.0], [0]))
