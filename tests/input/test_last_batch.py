"""Short batches that are dropped, or padded with a mask."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distrib
from distrib.errors import InputError
from tests.support.strategies import central, mirrored, on_every_strategy

DROP = distrib.InputOptions(last_batch="drop")
PAD = distrib.InputOptions(last_batch="pad")


def whole(strategy, element):
    """Return the tree of an element with the components of the replicas side by side."""
    return jax.tree.map(np.asarray, strategy.gather(element, axis=0))


def sizes(strategy, value):
    return [len(part) for part in strategy.experimental_local_results(value)]


@on_every_strategy
def test_a_batch_that_is_shorter_than_the_others_is_dropped(make_strategy):
    strategy = make_strategy()
    dataset = strategy.experimental_distribute_dataset(np.arange(9), DROP, batch_size=5)
    for _ in range(2):
        assert [whole(strategy, x).tolist() for x in dataset] == [[0, 1, 2, 3, 4]]


@on_every_strategy
def test_a_whole_last_batch_is_kept(make_strategy):
    strategy = make_strategy()
    dataset = strategy.experimental_distribute_dataset(np.arange(8), DROP, batch_size=4)
    assert [whole(strategy, x).tolist() for x in dataset] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@on_every_strategy
def test_padded_batches_have_one_shape_and_a_mask(make_strategy):
    strategy = make_strategy()
    replicas = strategy.num_replicas_in_sync
    length = -(-5 // replicas) * replicas
    data = {"x": np.arange(9), "y": np.ones((9, 2), np.float32)}
    dataset = strategy.experimental_distribute_dataset(data, PAD, batch_size=5)
    seen = []
    for batch, mask in dataset:
        assert (
            sizes(strategy, mask)
            == sizes(strategy, batch["x"])
            == [length // replicas] * (replicas)
        )
        host, own = whole(strategy, batch), whole(strategy, mask)
        assert own.dtype == bool
        assert host["y"].shape == (length, 2)
        seen.append(host["x"][own].tolist())
        assert host["x"][~own].tolist() == [seen[-1][-1]] * (length - len(seen[-1]))
    assert seen == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]


@settings(max_examples=25)
@given(replicas=st.integers(1, 4), examples=st.integers(1, 20), batch_size=st.integers(1, 9))
def test_each_example_counts_once_in_padded_batches(replicas, examples, batch_size):
    strategy = mirrored(replicas)
    dataset = strategy.experimental_distribute_dataset(
        np.arange(examples), PAD, batch_size=batch_size
    )
    elements = [whole(strategy, element) for element in dataset]
    length = -(-batch_size // replicas) * replicas
    assert {batch.shape for batch, _ in elements} == {(length,)}
    kept = [example for batch, mask in elements for example in batch[mask].tolist()]
    assert kept == list(range(examples))


def test_a_padded_step_is_compiled_once_whatever_the_batches():
    strategy = central(4)
    traces = []

    def step(batch, mask):
        traces.append(batch.shape)
        return distrib.nn.masked_mean(batch, mask)

    dataset = strategy.experimental_distribute_dataset(np.arange(11.0), PAD, batch_size=4)
    for _ in range(2):
        means = [strategy.run(step, args=element) for element in dataset]
        assert [float(strategy.reduce("MEAN", m, axis=None)) for m in means] == [1.5, 5.5, 9.0]
    assert len(traces) == 1


def generated():
    yield from ({"x": np.arange(start, stop)} for start, stop in ((0, 4), (4, 8), (8, 9)))


def loaded():
    import torch

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return {"x": torch.tensor(index)}

    return torch.utils.data.DataLoader(Squares(), batch_size=4)


@pytest.mark.parametrize(
    "make",
    [
        generated,
        lambda: list(generated()),
        lambda: [{"x": jnp.asarray(batch["x"])} for batch in generated()],
        pytest.param(loaded, marks=pytest.mark.needs("torch")),
    ],
    ids=["generator", "list", "JAX arrays", "torch"],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_iterables_of_batches(make, replicas):
    """The first batch says how many examples a whole one has."""
    strategy = mirrored(replicas)
    dropped = strategy.experimental_distribute_dataset(make(), DROP)
    kept = [whole(strategy, element)["x"].tolist() for element in dropped]
    assert kept == [[0, 1, 2, 3], [4, 5, 6, 7]]
    padded = strategy.experimental_distribute_dataset(make(), PAD)
    elements = [whole(strategy, element) for element in padded]
    assert [batch["x"].tolist() for batch, _ in elements] == [[0, 1, 2, 3], [4, 5, 6, 7], [8] * 4]
    assert [mask.tolist() for _, mask in elements] == [[True] * 4] * 2 + [[True] + [False] * 3]


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_datasets_from_a_function_are_made_even_by_replica(mode):
    """Their batches are a replica's; one that has none left gets copies, which do not count."""
    strategy = mirrored(2)
    expected = [[0, 1, 2], [3, 4, 5], [6]]

    def dataset_fn(context):
        shard = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        return [np.array(batch) for batch in expected[shard]]

    def distributed(last_batch):
        options = distrib.InputOptions(experimental_replication_mode=mode, last_batch=last_batch)
        return strategy.distribute_datasets_from_function(dataset_fn, options)

    assert [whole(strategy, x).tolist() for x in distributed("drop")] == [[0, 1, 2, 3, 4, 5]]
    elements = list(distributed("pad"))
    assert [sizes(strategy, x) for x, _ in elements] == [[3, 3], [3, 3]]
    seen = [whole(strategy, element) for element in elements]
    assert [x[mask].tolist() for x, mask in seen] == [[0, 1, 2, 3, 4, 5], [6]]


def test_what_cannot_be_kept_is_an_error_and_not_an_epoch_of_nothing():
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(np.arange(3), DROP, batch_size=4)
    with pytest.raises(InputError, match="has no batch of 4 examples to keep: one has 3"):
        list(dataset)
    short = strategy.distribute_datasets_from_function(lambda _: [np.arange(3)], DROP)
    with pytest.raises(InputError, match="has no batch of 3 examples to keep: one has 0"):
        list(short)


@pytest.mark.parametrize("options", [DROP, PAD], ids=["drop", "pad"])
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((2, 4), "a list of 2 batches has a batch of 4 examples where a whole one has 2"),
        ((0, 4), "a batch of 0 examples where a whole one has 0: the first batch must have"),
    ],
)
def test_batches_that_do_not_fit_the_first_are_refused(options, lengths, message):
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(
        [np.zeros(length) for length in lengths], options
    )
    with pytest.raises(InputError, match=re.escape(message)):
        list(dataset)


@pytest.mark.parametrize("options", [DROP, PAD], ids=["drop", "pad"])
def test_scalars_have_no_length_to_fill_up(options):
    dataset = mirrored(1).experimental_distribute_dataset([np.float32(1)], options)
    with pytest.raises(InputError, match="rank 0"):
        list(dataset)


def test_the_element_spec_is_of_the_padded_element():
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(np.zeros((3, 2)), PAD, batch_size=5)
    assert dataset.element_spec == (
        jax.ShapeDtypeStruct((6, 2), np.float64),
        jax.ShapeDtypeStruct((6,), bool),
    )
    assert strategy.experimental_distribute_dataset([], PAD).element_spec is None


@pytest.mark.parametrize("options", [DROP, PAD], ids=["drop", "pad"])
def test_leaving_a_pass_early_closes_the_loader(options):
    closed = []

    class Loader:
        def __iter__(self):
            try:
                for _ in range(5):
                    yield np.zeros(2)
            finally:
                closed.append(True)

    iterator = iter(mirrored(2).experimental_distribute_dataset(Loader(), options))
    next(iterator)
    iterator.close()
    assert closed == [True]
