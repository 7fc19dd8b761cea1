"""Reduce-scatter: each replica keeps a part of the sum."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from distrib.collectives import (
    CommunicationOptions,
    NcclAllReduce,
    ReductionToOneDevice,
    ScatteringOps,
    gathered,
    is_scattered,
    reduce_scatter,
)
from distrib.platform import replica_mesh, shards_of

SPLIT, EVERYWHERE = PartitionSpec("replica"), PartitionSpec()


def scatter(rows, count, options=None):
    """Return the parts of the sums of ``[replica, ...]`` arrays, laid together, and the whole."""
    shards = [shards_of(row.shape[1:], count) for row in rows]

    def body(rows):
        scattered = reduce_scatter([x[0] for x in rows], shards, NcclAllReduce(), options)
        assert all(is_scattered(x) for x in scattered)
        return [x.part for x in scattered], gathered(scattered)

    mapped = jax.shard_map(
        body,
        mesh=replica_mesh(jax.devices()[:count]),
        in_specs=SPLIT,
        out_specs=([s.spec for s in shards], EVERYWHERE),
        check_vma=False,
    )
    return jax.jit(mapped), shards


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("options", [None, CommunicationOptions(bytes_per_pack=1)])
def test_the_parts_make_up_the_sum(count, options):
    rng = np.random.default_rng(0)
    shapes = [(7, 6), (5,), (3, 9, 2), (16, 2), (2,)]
    rows = [rng.integers(-99, 99, (count, *shape)).astype(np.float32) for shape in shapes]
    rows.append(rows[1].astype(jnp.bfloat16))
    mapped, shards = scatter(rows, count, options)
    parts, wholes = mapped(rows)
    for row, part, whole, how in zip(rows, parts, wholes, shards, strict=True):
        total = np.asarray(row, np.float32).sum(0)
        np.testing.assert_array_equal(np.asarray(how.cut(part), np.float32), total)
        np.testing.assert_array_equal(np.asarray(whole, np.float32), total)
        assert whole.dtype == row.dtype


@hypothesis.given(
    st.integers(2, 8), st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=3), max_size=3)
)
@hypothesis.settings(max_examples=10)
def test_any_shapes(count, shapes):
    rows = [np.arange(count * np.prod(s), dtype=np.float32).reshape(count, *s) for s in shapes]
    mapped, _ = scatter(rows, count)
    for row, whole in zip(rows, mapped(rows)[1], strict=True):
        np.testing.assert_array_equal(whole, row.sum(0))


def test_small_arrays_travel_together():
    rows = [np.ones((2, 4), np.float32) for _ in range(50)]
    mapped, _ = scatter(rows, 2)
    text = mapped.lower(rows).compile().as_text()
    assert len(re.findall(r"reduce-scatter(?:-start)?\(", text)) == 1


def test_large_parts_are_exact():
    """Row 61 of the reports: parts of 4 MiB were wrong now and then."""
    rng = np.random.default_rng(0)
    row = rng.integers(-1000, 1000, (2, 1 << 21)).astype(np.float32)
    mapped, _ = scatter([row], 2)
    total = row.sum(0)
    for _ in range(30):
        (part,), _ = mapped([row])
        assert part.addressable_shards[0].data.nbytes == 4 << 20
        np.testing.assert_array_equal(part, total)


def test_which_ops_scatter():
    assert isinstance(NcclAllReduce(), ScatteringOps)
    assert not isinstance(ReductionToOneDevice(), ScatteringOps)
