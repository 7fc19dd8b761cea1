"""What a user may ask of the collectives."""

import dataclasses
import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.collectives import CommunicationImplementation, CommunicationOptions
from tests.support.algorithms import mirrored


def test_unless_told_distrib_chooses():
    options = CommunicationOptions()
    assert options.bytes_per_pack == 0
    assert options.tensor_limit == 64 * 1024
    assert options.pack_limit == 4 * 1024 * 1024


def test_one_number_bounds_packs_and_the_tensors_in_them():
    options = CommunicationOptions(bytes_per_pack=100)
    assert (options.pack_limit, options.tensor_limit) == (100, 100)


def test_a_negative_number():
    message = r"bytes_per_pack is -1, and must be 0 \(distrib chooses\) or more bytes"
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(-1)


def test_options_are_values():
    assert CommunicationOptions(8) == CommunicationOptions(bytes_per_pack=8)
    assert len({CommunicationOptions(8), CommunicationOptions(8)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommunicationOptions().bytes_per_pack = 8
    assert distrib.experimental.CommunicationOptions is CommunicationOptions


class Counting(distrib.NcclAllReduce):
    """An all-reduce that notes what it is traced for."""

    def __init__(self):
        self.shapes = []

    def sum_over_replicas(self, value, num_replicas):
        self.shapes.append(value.shape)
        return super().sum_over_replicas(value, num_replicas)


@pytest.mark.parametrize(
    ("bytes_per_pack", "shapes"),
    [(0, [(16,)]), (32, [(8,)] * 2), (16, [(4,)] * 4), (1, [(4,)] * 4)],
)
def test_how_tensors_of_16_bytes_travel(bytes_per_pack, shapes):
    ops = Counting()
    strategy = mirrored(2, ops)
    options = CommunicationOptions(bytes_per_pack)

    def step(x):
        return distrib.get_replica_context().all_reduce("SUM", [x + i for i in range(4)], options)

    sums = strategy.run(step, args=(jnp.ones(4),))
    assert [total.values[1].tolist() for total in sums] == [[2.0 * (1 + i)] * 4 for i in range(4)]
    assert ops.shapes == shapes


def test_the_other_fields_of_tf_distribute():
    options = CommunicationOptions(
        timeout_seconds=2.5, implementation=CommunicationImplementation.NCCL
    )
    assert options.timeout_seconds == 2.5
    assert distrib.experimental.CollectiveCommunication is CommunicationImplementation
    assert CommunicationOptions(implementation="ring").implementation.value == "RING"
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_seconds is .*, and must be more than 0"):
            CommunicationOptions(timeout_seconds=seconds)
    with pytest.raises(ValueError, match="implementation is 'MPI', and must be"):
        CommunicationOptions(implementation="MPI")


def test_collective_hints_are_deprecated():
    with pytest.warns(DeprecationWarning, match="use distrib.experimental.CommunicationOptions"):
        hints = distrib.experimental.CollectiveHints(50 * 1024, timeout_seconds=1.0)
    assert hints == CommunicationOptions(50 * 1024, 1.0)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="bytes_per_pack is -1"):
        distrib.experimental.CollectiveHints(-1)


def collectives(ops, options, leaves=4, count=2):
    """Return how many arrays go through all-reduces and permutes in a step of 16-byte tensors.

    XLA may make one all-reduce of several arrays of several all-reduces.
    """
    strategy = mirrored(count, ops)

    def step(x):
        values = [x + i for i in range(leaves)]
        return distrib.get_replica_context().all_reduce("SUM", values, options)

    text = strategy.extended.compiled_text(step, args=(jnp.ones(4),))
    for total in strategy.run(step, args=(jnp.ones(4),)):
        assert len({part.tobytes() for part in map(np.asarray, total.values)}) == 1
    return [
        sum(result.count("[") for result in re.findall(rf" = (.*) {name}\(", text))
        for name in ("all-reduce", "collective-permute")
    ]


def test_the_implementation_of_one_call_decides_what_is_compiled():
    for ops in (distrib.NcclAllReduce(), distrib.RingAllReduce()):
        assert collectives(ops, CommunicationOptions(implementation="RING")) == [0, 2]
        assert collectives(ops, CommunicationOptions(implementation="NCCL")) == [1, 0]
    assert collectives(distrib.RingAllReduce(), CommunicationOptions()) == [0, 2]


@pytest.mark.parametrize(
    ("num_packs", "bytes_per_pack", "expected"),
    [(None, 0, 1), (0, 0, 4), (1, 0, 1), (2, 0, 2), (3, 0, 3), (99, 0, 16), (2, 16, 4), (0, 64, 1)],
)
@pytest.mark.parametrize("make", [distrib.NcclAllReduce, distrib.HierarchicalCopyAllReduce])
def test_num_packs_is_the_number_of_reduced_arrays(make, num_packs, bytes_per_pack, expected):
    options = CommunicationOptions(bytes_per_pack)
    assert collectives(make(num_packs=num_packs), options) == [expected, 0]


def test_packs_of_a_number_hold_large_tensors_too_and_one_dtype():
    ops = Counting()
    ops.num_packs = 2
    strategy = mirrored(2, ops)

    def step():
        tree = [jnp.ones(100_000), jnp.ones(2), jnp.ones(3, jnp.int32)]
        return distrib.get_replica_context().all_reduce("SUM", tree)

    strategy.run(step)
    assert ops.shapes == [(50_001,), (50_001,), (2,), (1,)]


def test_a_timeout_in_a_compiled_step():
    options = CommunicationOptions(timeout_seconds=1.0)
    strategy = mirrored(2)
    context = distrib.get_replica_context
    for step in (
        lambda: context().all_reduce("SUM", jnp.ones(1), options),
        lambda: context().all_gather(jnp.ones(1), 0, options),
    ):
        with pytest.raises(ValueError, match="timeout_seconds is 1 in a compiled step"):
            strategy.run(step)
    value = distrib.PerReplica([1.0, 2.0])
    with pytest.raises(ValueError, match="timeout_seconds is 1 in a reduction in cross-replica"):
        strategy.extended.reduce_to("SUM", value, "CPU:0", options)


@pytest.mark.usefixtures("eagerly")
def test_a_timeout_with_replicas_in_threads():
    """Replica 1 is late by far; replica 2 is never asked."""
    strategy = mirrored(3)
    release = threading.Event()

    def step(options):
        context = distrib.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            release.wait(60)
        return context.all_reduce("SUM", jnp.ones(1), options)

    try:
        with pytest.raises(
            distrib.errors.ReplicaDeadlineError, match="Replica 1 has run for 0.3 s"
        ):
            strategy.run(lambda: step(CommunicationOptions(timeout_seconds=0.3)))
    finally:
        release.set()
    total = strategy.run(lambda: step(CommunicationOptions(timeout_seconds=60)))
    assert [x.tolist() for x in total.values] == [[3]] * 3


@pytest.mark.usefixtures("eagerly")
def test_replicas_must_ask_for_the_same():
    strategy = mirrored(2)

    def step():
        context = distrib.get_replica_context()
        options = CommunicationOptions(bytes_per_pack=1 + int(context.replica_id_in_sync_group))
        return context.all_reduce("SUM", jnp.ones(1), options)

    with pytest.raises(distrib.errors.MeetingError, match="Replica 0 calls all_reduce"):
        strategy.run(step)


def test_a_gather_has_no_ring():
    options = CommunicationOptions(implementation="RING")
    with pytest.raises(ValueError, match="all_gather got implementation=RING"):
        mirrored(2).run(lambda: distrib.get_replica_context().all_gather(jnp.ones(1), 0, options))
