"""The steps of the ring."""

import numpy as np
import pytest

import distrib
from distrib.collectives import ring_steps

COUNTS = range(1, 9)


@pytest.mark.parametrize("count", COUNTS)
def test_played_step_by_step_the_ring_brings_every_total_to_every_replica(count):
    """Each chunk on a replica is the set of replicas that are in it."""
    chunks = [[[replica] for _ in range(count)] for replica in range(count)]
    steps = distrib.ring_steps(count)
    for time in sorted({(-len(s.phase), s.step) for s in steps}):  # Scatter-reduce is the longer.
        sent = [
            (s, list(chunks[s.sender][s.chunk])) for s in steps if (-len(s.phase), s.step) == time
        ]
        for s, content in sent:
            own = chunks[s.receiver][s.chunk] if s.phase == "scatter-reduce" else []
            chunks[s.receiver][s.chunk] = own + content
    everyone = list(range(count))
    assert [[sorted(c) for c in mine] for mine in chunks] == [[everyone] * count] * count


@pytest.mark.parametrize("count", COUNTS)
def test_in_each_step_every_replica_sends_one_chunk_to_its_neighbour(count):
    steps = ring_steps(count)
    assert len(steps) == 2 * (count - 1) * count
    times = [(s.phase, s.step) for s in steps]
    for time in set(times):
        now = [s for s, t in zip(steps, times, strict=True) if t == time]
        assert [s.sender for s in now] == list(range(count))
        assert all(s.receiver == (s.sender + 1) % count for s in now)
        assert sorted(s.chunk for s in now) == list(range(count))
    assert times == sorted(times, key=lambda t: (-len(t[0]), t[1]))


def test_without_replicas_there_is_no_ring():
    with pytest.raises(ValueError, match="num_replicas is 0"):
        ring_steps(0)


@pytest.mark.parametrize("count", COUNTS)
def test_what_was_recorded_is_what_the_plan_sends(count):
    """Playing the recorded messages gives every replica the sum, chunk by chunk."""
    rows = np.random.default_rng(0).integers(0, 100, size=(count, 7)).astype(np.float32)
    size = -(-7 // count)
    held = np.pad(rows, [(0, 0), (0, size * count - 7)]).reshape(count, count, size)
    for step, chunk in distrib.RingAllReduce().record(list(rows)):
        np.testing.assert_array_equal(chunk, held[step.sender, step.chunk])
        add = held[step.receiver, step.chunk] if step.phase == "scatter-reduce" else 0
        # Messages of one step cross: no chunk that is still to be sent in it has changed.
        held[step.receiver, step.chunk] = chunk + add
    for replica in range(count):
        np.testing.assert_array_equal(held[replica].reshape(-1)[:7], rows.sum(0))


def test_a_compressed_ring_records_what_was_rounded():
    (first, *_) = distrib.RingAllReduce(compression="bfloat16").record(
        [np.float32([1.001, 2.0]), np.float32([1.0, 2.0])]
    )
    assert first.chunk.tolist() == [1.0]


def test_what_cannot_be_recorded():
    with pytest.raises(ValueError, match="record got 2 arrays of the forms"):
        distrib.RingAllReduce().record([np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="record got 0 arrays"):
        distrib.RingAllReduce().record([])
