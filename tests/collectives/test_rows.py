import jax.numpy as jnp
import pytest

import distrib
from distrib.collectives import all_reduce_rows, all_rows, concatenated_rows, scaled_rows
from distrib.errors import AggregationError
from tests.support.strategies import on_every_strategy

SUM, MEAN = distrib.ReduceOp.SUM, distrib.ReduceOp.MEAN
ROWS = distrib.IndexedSlices([1.0, 2.0, 3.0], [1, 1, 3], (4,))


def twice(tree):
    return [jnp.concatenate([x, x]) for x in tree]


def test_what_is_sent_is_merged():
    total = all_reduce_rows(SUM, ROWS, num_replicas=2, gather=twice)
    assert (total.indices.tolist(), total.values.tolist()) == ([1, 3, 1, 3], [3, 3, 3, 3])
    mean = all_reduce_rows(MEAN, ROWS, num_replicas=2, gather=twice)
    assert mean.to_dense().tolist() == [0, 3, 0, 3]
    apart = all_reduce_rows(SUM, ROWS, num_replicas=2, gather=twice, merge=False)
    assert apart.indices.tolist() == [1, 1, 3, 1, 1, 3]
    alone = all_reduce_rows(SUM, ROWS, num_replicas=1, gather=twice)
    assert alone.indices.tolist() == [1, 1, 3]


def test_the_parts():
    assert scaled_rows(MEAN, ROWS, 2).values.tolist() == [0.5, 1, 1.5]
    assert scaled_rows(MEAN, distrib.IndexedSlices([1], [0]), 2).values.dtype == jnp.float32
    assert concatenated_rows([ROWS, ROWS]).to_dense().tolist() == [0, 6, 0, 6]
    assert all_rows(jnp.array([5.0, 6.0])).to_dense().tolist() == [5, 6]
    with pytest.raises(AggregationError, match="all_reduce.SUM. of an IndexedSlices cannot add"):
        scaled_rows(SUM, distrib.IndexedSlices([True], [0]), 2)


@on_every_strategy
def test_among_other_arrays(make_strategy, engine):
    strategy = make_strategy()
    n = strategy.num_replicas_in_sync

    def step():
        context = distrib.get_replica_context()
        i = jnp.asarray(context.replica_id_in_sync_group, jnp.float32)
        rows = distrib.IndexedSlices((i + 1)[None], jnp.array([1]), (3,))
        total = context.all_reduce("SUM", {"a": i, "rows": rows, "z": [i + 1]})
        return total, context.all_reduce("MEAN", rows).to_dense()

    total, mean = strategy.run(step)
    one = strategy.experimental_local_results(mean)[-1]
    assert one.tolist() == [0, (n + 1) / 2, 0]
    first = strategy.experimental_local_results(total)[0]
    assert float(first["a"]) == n * (n - 1) / 2
    assert float(first["z"][0]) == n * (n + 1) / 2
    assert first["rows"].to_dense().tolist() == [0, n * (n + 1) / 2, 0]
