"""Components of replicas go through the collectives of a step."""

import jax
import numpy as np
import pytest

import distrib
from distrib.collectives import CommunicationOptions, ComponentReducer, algorithm_for
from distrib.errors import AggregationError
from distrib.platform import replica_mesh
from distrib.reduce_op import ReduceOp

MESH = replica_mesh(jax.devices()[2:5])
VALUES = np.float32([[1, 10], [2, 20], [4, 40]])


def test_values_are_reduced_together_and_lie_on_every_device():
    traced = []

    class Counting(distrib.NcclAllReduce):
        def sum_over_replicas(self, value, num_replicas):
            traced.append((value.shape, num_replicas))
            return super().sum_over_replicas(value, num_replicas)

    ops = Counting()
    reducer = ComponentReducer(MESH, lambda options: ops)
    for _ in range(2):
        total, counts = reducer.all_reduce(ReduceOp.SUM, [list(VALUES), [1, 2, 3]])
    assert total.tolist() == [7, 70]
    assert int(counts) == 6
    assert [shard.data.tolist() for shard in total.addressable_shards] == [[7, 70]] * 3
    assert {device.id for device in total.sharding.device_set} == {2, 3, 4}
    assert traced == [((2,), 3), ((), 3)]  # One program, which is kept.
    assert reducer.all_reduce(ReduceOp.MEAN, []) == []


def test_options_choose_the_algorithm():
    seen = []

    def choose(options):
        seen.append(options)
        return distrib.NcclAllReduce()

    reducer = ComponentReducer(MESH, choose)
    options = CommunicationOptions(bytes_per_pack=4)
    for each in (None, options, options):
        (mean,) = reducer.all_reduce(ReduceOp.MEAN, [list(VALUES)], each)
        np.testing.assert_allclose(mean, VALUES.mean(0), rtol=1e-6)
    assert seen == [None, options]


def test_feedback_keeps_a_residual_for_each_replica():
    reducer = ComponentReducer(MESH, lambda options: distrib.RingAllReduce(compression="int8"))
    values = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    residuals = np.zeros_like(values)
    sent = 0
    for _ in range(3):
        (total,), (errors,) = reducer.all_reduce_with_feedback(
            ReduceOp.SUM, [list(values)], [list(residuals)]
        )
        sent, residuals = sent + np.asarray(total), np.asarray(errors)
    assert residuals.shape == (3, 40)
    np.testing.assert_allclose(sent + residuals.sum(0), 3 * values.sum(0), atol=1e-4)


def test_components_must_be_alike():
    reducer = ComponentReducer(MESH, lambda options: distrib.NcclAllReduce())
    parts = [np.ones(2, np.float32), np.ones(2, np.int32), np.ones(1, np.float32)]
    with pytest.raises(AggregationError, match=r"bring float32\[2\], int32\[2\], float32\[1\]"):
        reducer.all_reduce(ReduceOp.SUM, [parts])


def test_the_algorithm_of_a_call():
    compressing = distrib.HierarchicalCopyAllReduce(compression="int8")
    assert algorithm_for(compressing, None) is compressing
    assert algorithm_for(compressing, CommunicationOptions(bytes_per_pack=8)) is compressing
    ring = algorithm_for(compressing, CommunicationOptions(implementation="RING"))
    assert (type(ring), ring.compression) == (distrib.RingAllReduce, "int8")
    nccl = algorithm_for(ring, CommunicationOptions(implementation="NCCL", compression="bfloat16"))
    assert (type(nccl), nccl.compression) == (distrib.NcclAllReduce, "bfloat16")
    narrow = algorithm_for(compressing, CommunicationOptions(compression="bfloat16"))
    assert (type(narrow), narrow.compression) == (distrib.HierarchicalCopyAllReduce, "bfloat16")
    assert compressing.compression == "int8"
