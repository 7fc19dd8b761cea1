"""What may be passed as a dataset, what it becomes, and what is said of anything else."""

import re
import threading

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distrib.errors import InputError
from distrib.input import as_source


class FakeTensor:
    """As much of a torch tensor as is used."""

    def __init__(self, values):
        self._values = np.asarray(values)
        self.shape, self.dtype = self._values.shape, f"torch.{self._values.dtype}"

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        if "complex" in self.dtype:
            raise TypeError("Got unsupported ScalarType")
        return self._values


class DataLoader:
    """A stand-in for torch's: the same module and class name, and lists for tuples."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


class FakeTorchDataset:
    """A map-style dataset of torch."""

    def __getitem__(self, index):
        raise IndexError


class FakeTfDataset:
    """As much of a tf.data.Dataset as is used."""

    def __iter__(self):
        raise AssertionError("this would give TensorFlow's tensors")

    def as_numpy_iterator(self):
        return iter([(np.arange(2), {"y": np.zeros(2)}), (np.arange(1), {"y": np.zeros(1)})])


FakeTensor.__module__ = "torch"
DataLoader.__module__ = "torch.utils.data.dataloader"
FakeTorchDataset.__module__ = "torch.utils.data.dataset"
FakeTorchDataset.__name__ = "Dataset"
FakeTfDataset.__module__ = "tensorflow.python.data.ops.batch_op"


class MyLoader(DataLoader):
    """A user's subclass."""


class SameGenerator:
    """The mistake of an iterable that hands out one generator for ever."""

    def __init__(self):
        self._generator = iter([np.arange(2), np.arange(1)])

    def __iter__(self):
        return (batch for batch in self._generator)


def _batches():
    yield np.arange(2)
    yield np.arange(1)


def _lists(source):
    return [jax.tree.map(lambda leaf: leaf.tolist(), batch) for batch in source]


def test_a_list_is_a_list_of_batches_and_starts_again():
    source = as_source([np.arange(2), np.arange(1)])
    assert (source.kind, source.one_shot) == ("iterable", False)
    assert source.describe() == "a list of 2 batches"
    assert _lists(source) == _lists(source) == [[0, 1], [0]]


def test_leaves_of_batches_become_numpy_and_jax_arrays_stay():
    on_device = jnp.arange(2)
    batch = {"a": FakeTensor([1, 2]), "b": on_device, "c": np.float32(3), "d": None}
    (converted,) = as_source([batch])
    assert converted["a"].tolist() == [1, 2]
    assert converted["b"] is on_device
    assert isinstance(converted["c"], np.ndarray)
    assert converted["d"] is None
    plain = {"a": np.arange(2)}
    assert next(iter(as_source([plain]))) is plain


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.arange(2), "y": 1.5}, "batch 1 of a list of 2 batches: leaf y is a float, 1.5"),
        ((np.arange(2), "text"), "batch 1 of a list of 2 batches: leaf [1] is a str, 'text'"),
        (3, "batch 1 of a list of 2 batches: leaf (root) is a int, 3"),
        (FakeTensor([1j]), "leaf (root), a FakeTensor of torch.complex128, does not convert"),
    ],
)
def test_a_leaf_that_is_no_array_is_named_by_batch_path_and_type(batch, message):
    iterator = iter(as_source([np.arange(2), batch]))
    next(iterator)
    with pytest.raises(InputError, match=re.escape(message)):
        next(iterator)


def test_a_generator_goes_on_and_then_says_that_it_is_used_up():
    source = as_source(_batches())
    assert (source.kind, source.one_shot) == ("iterator", True)
    for batch in source:
        assert batch.tolist() == [0, 1]
        break
    assert _lists(source) == [[0]]
    with pytest.raises(
        InputError, match="a generator is used up after 2 batches .* pass something"
    ):
        iter(source)


def test_a_generator_may_be_drawn_from_while_a_thread_is_still_inside_it():
    inside, release = threading.Event(), threading.Event()

    def slow():
        inside.set()
        release.wait(10)
        yield np.arange(2)
        yield np.arange(1)

    source = as_source(slow())
    taken = []
    left_behind = threading.Thread(target=lambda: taken.append(next(iter(source)).tolist()))
    left_behind.start()
    assert inside.wait(10)
    threading.Timer(0.05, release.set).start()
    taken.append(next(iter(source)).tolist())
    left_behind.join()
    assert sorted(taken) == [[0], [0, 1]]


def test_an_iterable_that_gives_nothing_the_second_time_is_found_out():
    source = as_source(SameGenerator())
    assert _lists(source) == [[0, 1], [0]]
    with pytest.raises(InputError, match="gave 2 batches in an earlier epoch and none in this one"):
        list(source)


def test_an_iterable_may_be_empty_from_the_start():
    source = as_source([])
    assert list(source) == list(source) == []


def test_leaving_a_loop_closes_the_iterator_of_that_epoch():
    closed = []

    class Loader:
        def __iter__(self):
            try:
                yield from _batches()
            finally:
                closed.append(True)

    iterator = iter(as_source(Loader()))
    next(iterator)
    iterator.close()
    assert closed == [True]


def test_iteration_by_getitem_and_an_iterator_without_iter():
    class Rows:
        def __getitem__(self, index):
            return [np.arange(2), np.arange(1)][index]

    class OnlyNext:
        def __init__(self):
            self._batches = _batches()

        def __next__(self):
            return next(self._batches)

    class Loader:
        def __iter__(self):
            return OnlyNext()

    assert _lists(as_source(Rows())) == _lists(as_source(Loader())) == [[0, 1], [0]]


@pytest.mark.parametrize("form", ["MapDataset", "IterDataset", "DataLoader"])
def test_grain(form):
    data = grain.MapDataset.range(5).map(lambda i: {"x": np.int32(i), "y": (np.float32(i),)})
    dataset = {
        "MapDataset": lambda: data.batch(2),
        "IterDataset": lambda: data.to_iter_dataset().batch(2),
        "DataLoader": lambda: grain.DataLoader(
            data_source=[{"x": np.int32(i), "y": (np.float32(i),)} for i in range(5)],
            sampler=grain.samplers.SequentialSampler(5, grain.sharding.NoSharding()),
            operations=[grain.transforms.Batch(2)],
        ),
    }[form]()
    source = as_source(dataset)
    assert (source.kind, source.one_shot) == ("Grain", False)
    assert source.describe() == f"a Grain {type(dataset).__name__}"
    expected = [{"x": x, "y": (list(map(float, x)),)} for x in ([0, 1], [2, 3], [4])]
    assert _lists(source) == _lists(source) == expected


def test_a_grain_iterator_has_one_pass():
    source = as_source(iter(grain.MapDataset.range(3).batch(2).to_iter_dataset()))
    assert source.one_shot
    assert _lists(source) == [[0, 1], [2]]


@pytest.mark.parametrize("loader", [DataLoader, MyLoader])
def test_torch_stand_in(loader):
    batch = [FakeTensor([0, 1]), {"y": [FakeTensor([2, 3])]}]
    source = as_source(loader([batch]))
    assert source.kind == "torch"
    assert source.describe() == f"a torch {loader.__name__}"
    assert _lists(source) == _lists(source) == [([0, 1], {"y": ([2, 3],)})]


@pytest.mark.needs("torch")
def test_torch_itself():
    import torch.utils.data

    dataset = torch.utils.data.TensorDataset(torch.arange(3), torch.arange(3.0, requires_grad=True))
    source = as_source(torch.utils.data.DataLoader(dataset, batch_size=2))
    assert source.kind == "torch"
    assert _lists(source) == _lists(source) == [([0, 1], [0.0, 1.0]), ([2], [2.0])]
    assert _lists(as_source(torch.arange(3), batch_size=2)) == [[0, 1], [2]]
    with pytest.raises(InputError, match=r"torch TensorDataset, .* wrap it, torch.utils.data.Data"):
        as_source(dataset)
    with pytest.raises(InputError, match="a Tensor of torch.bfloat16, does not convert to NumPy"):
        list(as_source([torch.zeros(2, dtype=torch.bfloat16)]))


def test_tf_data():
    source = as_source(FakeTfDataset())
    assert (source.kind, source.describe()) == ("tf.data", "a tf.data FakeTfDataset")
    expected = [([0, 1], {"y": [0.0, 0.0]}), ([0], {"y": [0.0]})]
    assert _lists(source) == _lists(source) == expected


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ((np.zeros(2), np.zeros(2)), "the dataset is a tuple, .* pass batch_size="),
        ({"x": np.zeros(2)}, "the dataset is a dict, .* pass batch_size="),
        (np.zeros(2), "the dataset is a ndarray, .* pass batch_size="),
        (jnp.zeros(2), "the dataset is a ArrayImpl, .* pass batch_size="),
        (len, "the dataset is a builtin_function_or_method, .* distribute_datasets_from_function"),
        (FakeTorchDataset(), "the dataset is a torch Dataset, .* wrap it"),
        (None, "the dataset is a NoneType, which cannot be iterated .* pass a pytree of arrays"),
        (3, "the dataset is a int, which cannot be iterated"),
        ("mnist", "the dataset is a str, which cannot be iterated"),
    ],
)
def test_refused(dataset, message):
    with pytest.raises(InputError, match=message):
        as_source(dataset)


@pytest.mark.parametrize(
    "options", [{"batch_size": 2}, {"shuffle": True}, {"seed": 0}, {"drop_remainder": True}]
)
def test_options_of_arrays_are_refused_for_batches(options):
    (name,) = options
    with pytest.raises(InputError, match=f"{name} goes with arrays only.*pass a tuple instead"):
        as_source([np.arange(2)], **options)
    with pytest.raises(InputError, match=f"{name} .* set it where a Grain .* is made"):
        as_source(grain.MapDataset.range(4).batch(2), **options)


def test_a_generator_function_is_called_for_each_epoch():
    def batches():
        yield np.arange(2)
        yield np.arange(1)

    source = as_source(batches)
    assert not source.one_shot
    assert source.describe() == "the generator function batches"
    assert _lists(source) == _lists(source) == [[0, 1], [0]]
