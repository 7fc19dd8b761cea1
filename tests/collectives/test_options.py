"""What a user may ask of the collectives."""

import dataclasses

import jax.numpy as jnp
import pytest

import distrib
from distrib.collectives import CommunicationOptions


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
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    options = CommunicationOptions(bytes_per_pack)

    def step(x):
        return distrib.get_replica_context().all_reduce("SUM", [x + i for i in range(4)], options)

    sums = strategy.run(step, args=(jnp.ones(4),))
    assert [total.values[1].tolist() for total in sums] == [[2.0 * (1 + i)] * 4 for i in range(4)]
    assert ops.shapes == shapes
