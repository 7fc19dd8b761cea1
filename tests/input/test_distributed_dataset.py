"""Distributed datasets: every example of an epoch once, and how a pass starts, goes on and ends."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distrib
from distrib.errors import InputError, OutOfRangeError
from tests.support.strategies import central, mirrored

PER_REPLICA = distrib.InputOptions(experimental_replication_mode="PER_REPLICA")
# Strategies are made once: a new mesh would compile anew what cuts components out.
mirrored_once = functools.cache(mirrored)

# Every number below is drawn, one replica and batches larger than the dataset included.
any_epoch = given(
    replicas=st.integers(1, 5),
    examples=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    shuffle=st.booleans(),
)


def numbered(examples):
    """Arrays that are recognised: the number of the example, and ten times that."""
    numbers = np.arange(examples, dtype=np.int32)
    return {"number": numbers, "tens": np.stack([numbers * 10, numbers], axis=1)}


def batches(arrays, batch_size):
    length = len(arrays["number"])
    cuts = [slice(start, start + batch_size) for start in range(0, length, batch_size)]
    return [jax.tree.map(lambda leaf, cut=cut: leaf[cut], arrays) for cut in cuts]


def parts(strategy, element):
    """Return the component of each replica as NumPy arrays."""
    local = strategy.experimental_local_results(element)
    assert len(local) == strategy.num_replicas_in_sync
    return jax.tree.map(np.asarray, list(local))


def numbers_in(strategy, dataset):
    """Return the example numbers of a pass in the order of steps and replicas."""
    seen = []
    for element in dataset:
        pieces = parts(strategy, element)
        for piece in pieces:
            np.testing.assert_array_equal(piece["tens"][:, 0], piece["number"] * 10)
            np.testing.assert_array_equal(piece["tens"][:, 1], piece["number"])
            seen += piece["number"].tolist()
        assert sum(len(piece["number"]) for piece in pieces) > 0, "a step for no example"
    return seen


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("distrib-prefetch-")]


# Each example once.


@settings(max_examples=40)
@any_epoch
def test_each_example_of_an_epoch_is_seen_once(replicas, examples, batch_size, shuffle):
    strategy = mirrored_once(replicas)
    dataset = strategy.experimental_distribute_dataset(
        numbered(examples), batch_size=batch_size, shuffle=shuffle, seed=3
    )
    for _ in range(2):
        seen = numbers_in(strategy, dataset)
        assert sorted(seen) == list(range(examples))
        # Cut left to right: the replicas in their order see the examples in theirs.
        assert shuffle or seen == list(range(examples))


@settings(max_examples=30)
@any_epoch
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_each_example_of_datasets_from_a_function_is_seen_once(
    mode, replicas, examples, batch_size, shuffle
):
    strategy = mirrored_once(replicas)
    order = np.random.default_rng(1).permutation(examples) if shuffle else np.arange(examples)
    arrays = jax.tree.map(lambda leaf: leaf[order], numbered(examples))

    def dataset_fn(context):
        shard = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        return batches(jax.tree.map(lambda leaf: leaf[shard], arrays), batch_size)

    options = distrib.InputOptions(experimental_replication_mode=mode)
    dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
    for _ in range(2):
        assert sorted(numbers_in(strategy, dataset)) == list(range(examples))


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("depth", [0, 3])
def test_however_it_is_loaded_it_is_the_same(to_device, depth):
    strategy = mirrored_once(3)
    options = distrib.InputOptions(
        experimental_fetch_to_device=to_device, experimental_per_replica_buffer_size=depth
    )
    dataset = strategy.experimental_distribute_dataset(numbered(7), options, batch_size=4)
    pieces = [
        [piece["number"].tolist() for piece in parts(strategy, element)] for element in dataset
    ]
    assert pieces == [[[0, 1], [2, 3], []], [[4], [5], [6]]]


def test_drop_remainder_leaves_out_the_last_short_batch():
    strategy = central(2)
    dataset = strategy.experimental_distribute_dataset(
        numbered(10), batch_size=4, drop_remainder=True
    )
    assert numbers_in(strategy, dataset) == list(range(8))


def test_components_lie_on_the_devices_of_their_replicas():
    strategy = distrib.MirroredStrategy(["CPU:3", "CPU:1"])
    for element in strategy.experimental_distribute_dataset(np.arange(5.0), batch_size=4):
        assert isinstance(element, distrib.PerReplica)
        devices = [next(iter(part.devices())).id for part in element.values]
        assert devices == [3, 1]
        assert all(part.dtype == jnp.float32 for part in element.values)


# Datasets from a function.


def test_the_mode_decides_how_many_pipelines_there_are():
    strategy = mirrored_once(3)
    seen = []

    def dataset_fn(context):
        seen.append(
            (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        )
        return [np.full(2, context.input_pipeline_id)]

    strategy.distribute_datasets_from_function(dataset_fn)
    assert seen == [(1, 0, 3)]
    seen.clear()
    (element,) = strategy.distribute_datasets_from_function(dataset_fn, PER_REPLICA)
    assert seen == [(3, 0, 3), (3, 1, 3), (3, 2, 3)]
    assert [part.tolist() for part in parts(strategy, element)] == [[0, 0], [1, 1], [2, 2]]


def test_replicas_whose_dataset_has_ended_get_empty_pieces():
    strategy = mirrored_once(2)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: [np.ones((2, 3), np.float32)] * (1 + context.input_pipeline_id), PER_REPLICA
    )
    shapes = [[part.shape for part in parts(strategy, element)] for element in dataset]
    assert shapes == [[(2, 3), (2, 3)], [(0, 3), (2, 3)]]


def test_a_function_that_returns_no_dataset():
    with pytest.raises(InputError, match="a int, which cannot be iterated"):
        mirrored_once(2).distribute_datasets_from_function(lambda context: 7)


def test_one_dataset_cannot_be_replicated():
    with pytest.raises(InputError, match="only supported in `distribute_datasets_from_function`"):
        mirrored_once(2).experimental_distribute_dataset([np.arange(2)], PER_REPLICA)


# Passes.


def test_iterators_of_one_dataset_are_passes_of_their_own():
    strategy = mirrored_once(2)
    dataset = strategy.experimental_distribute_dataset([np.arange(2), np.arange(2) + 2])
    first, second = iter(dataset), iter(dataset)
    taken = [int(parts(strategy, next(it))[0][0]) for it in (first, second, first, second)]
    assert taken == [0, 0, 2, 2]
    for iterator in (first, second):
        assert next(iterator, "end") == "end"


def test_a_loop_that_is_left_starts_again():
    strategy = mirrored_once(2)
    dataset = strategy.experimental_distribute_dataset([np.arange(2), np.arange(2) + 2])
    for _ in range(2):
        for element in dataset:
            assert int(parts(strategy, element)[0][0]) == 0
            break


def generator(count):
    for i in range(count):
        yield np.full(4, i, np.int32)


def test_a_generator_goes_on_after_break_and_says_when_it_is_used_up():
    """An epoch of nothing would pass for training."""
    strategy = mirrored_once(2)
    dataset = strategy.experimental_distribute_dataset(generator(4))
    seen = []
    for element in dataset:
        seen.append(int(parts(strategy, element)[0][0]))
        if seen == [0, 1]:
            break
    # What was loaded ahead when the loop was left is not lost.
    seen += [int(parts(strategy, element)[0][0]) for element in dataset]
    assert seen == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(InputError, match="a generator is used up after 4 batches"):
            iter(dataset)


@pytest.mark.parametrize("options", [None, PER_REPLICA])
def test_generators_from_a_function(options):
    strategy = mirrored_once(2)
    dataset = strategy.distribute_datasets_from_function(lambda context: generator(4), options)
    iterator = iter(dataset)
    next(iterator)
    assert iter(dataset) is iterator
    rest = list(dataset)
    assert len(rest) == (1 if options is None else 3)
    with pytest.raises(InputError, match="a generator is used up after 4 batches"):
        iter(dataset)


def test_get_next():
    strategy = mirrored_once(2)
    iterator = iter(strategy.experimental_distribute_dataset([np.arange(2), np.arange(2) + 2]))
    firsts = [
        parts(strategy, element)[0].tolist() for element in (next(iterator), iterator.get_next())
    ]
    assert firsts == [[0], [2]]
    for _ in range(2):
        message = "End of sequence: a list of 2 batches has no more elements"
        with pytest.raises(OutOfRangeError, match=message):
            iterator.get_next()
    assert next(iterator, "end") == "end"


def test_get_next_as_optional():
    strategy = mirrored_once(2)
    iterator = iter(strategy.experimental_distribute_dataset([np.arange(2)]))
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert optional.get_value() is optional.get_value()
    assert [part.tolist() for part in parts(strategy, optional.get_value())] == [[0], [1]]
    nothing = iterator.get_next_as_optional()
    assert not nothing.has_value()
    with pytest.raises(OutOfRangeError, match="does not have a value: the dataset has ended"):
        nothing.get_value()


def test_reduce_folds_one_pass():
    strategy = mirrored_once(2)
    dataset = strategy.experimental_distribute_dataset(np.arange(5.0), batch_size=2)

    def add(total, element):
        return total + float(strategy.reduce("SUM", element, axis=0))

    assert [dataset.reduce(100.0, add) for _ in range(2)] == [110.0, 110.0]


def test_element_spec_is_of_a_batch_of_the_source():
    strategy = mirrored_once(2)
    dataset = strategy.experimental_distribute_dataset(numbered(10), batch_size=4)
    assert dataset.element_spec == {
        "number": jax.ShapeDtypeStruct((4,), jnp.int32),
        "tens": jax.ShapeDtypeStruct((4, 2), jnp.int32),
    }
    from_function = strategy.distribute_datasets_from_function(lambda context: [np.zeros((3, 2))])
    assert from_function.element_spec == jax.ShapeDtypeStruct((3, 2), np.float64)
    assert strategy.experimental_distribute_dataset([]).element_spec is None


def test_asking_for_the_element_spec_starts_no_epoch():
    strategy = mirrored_once(2)

    def orders(ask):
        dataset = strategy.experimental_distribute_dataset(
            numbered(12), batch_size=4, shuffle=True, seed=0
        )
        if ask:
            assert dataset.element_spec["number"].shape == (4,)
        return [numbers_in(strategy, dataset) for _ in range(2)]

    assert orders(ask=True) == orders(ask=False)


def test_the_element_spec_of_a_generator_would_use_it_up():
    strategy = mirrored_once(2)
    dataset = strategy.experimental_distribute_dataset(generator(2))
    with pytest.raises(InputError, match="use up the first element of a generator, .* read once"):
        _ = dataset.element_spec
    assert len(list(dataset)) == 2


def test_repr_names_the_source():
    dataset = mirrored_once(2).experimental_distribute_dataset(np.arange(5), batch_size=2)
    assert repr(dataset) == "<distrib.DistributedDataset of arrays of 5 examples in batches of 2>"


# Faults.


class Failing:
    """A loader of ``good`` batches that then raises, each time."""

    def __init__(self, good):
        self.good = good

    def __iter__(self):
        yield from generator(self.good)
        raise OSError("the disk is gone")


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    ("from_function", "good", "elements"), [(False, 3, 3), (True, 3, 1), (True, 4, 2)]
)
def test_the_loaders_error_comes_at_its_position(depth, from_function, good, elements):
    strategy = mirrored_once(2)
    options = distrib.InputOptions(experimental_per_replica_buffer_size=depth)
    if from_function:
        dataset = strategy.distribute_datasets_from_function(lambda c: Failing(good), options)
    else:
        dataset = strategy.experimental_distribute_dataset(Failing(good), options)
    for _ in range(2):
        iterator = iter(dataset)
        for _ in range(elements):
            next(iterator)
        with pytest.raises(OSError, match="the disk is gone"):
            next(iterator)
        assert next(iterator, "end") == "end"


def test_a_batch_that_cannot_be_placed_fails_at_its_position():
    strategy = mirrored_once(2)
    good, bad = {"x": np.arange(2)}, {"x": np.array(["a", "b"])}
    iterator = iter(strategy.experimental_distribute_dataset([good, bad]))
    next(iterator)
    with pytest.raises(InputError, match="The batch holds x of dtype <U1"):
        next(iterator)


# Threads.


def test_close_ends_the_pass_and_its_thread():
    strategy = mirrored_once(2)
    dataset = strategy.experimental_distribute_dataset([np.arange(2)] * 10)
    before = len(loader_threads())
    iterator = iter(dataset)
    next(iterator)
    assert len(loader_threads()) == before + 1
    assert not iterator.ended
    iterator.close()
    assert len(loader_threads()) == before
    assert iterator.ended
    assert next(iterator, "end") == "end"
    assert len(list(dataset)) == 10


def test_a_loop_that_is_left_leaves_no_thread():
    strategy = mirrored_once(2)
    before = set(loader_threads())
    for _ in strategy.experimental_distribute_dataset([np.arange(2)] * 10):
        break
    for thread in set(loader_threads()) - before:
        thread.join(timeout=3)
        assert not thread.is_alive()
