"""Ready-made batches as sources: those that start again, and those that cannot."""

import numpy as np
import pytest

from distrib.errors import InputError
from distrib.input import IterableSource, OneShotSource


def source_of(make, **kwargs):
    return IterableSource(make, kind="iterable", description="a loader", **kwargs)


def arrays(*lengths):
    return [np.arange(n) for n in lengths]


def lists(source):
    return [batch.tolist() for batch in source]


def test_an_iterable_starts_again_with_a_new_iterator():
    made = []

    def make():
        made.append(1)
        return iter(arrays(2, 1))

    source = source_of(make)
    assert made == []
    assert (source.kind, source.one_shot, source.describe()) == ("iterable", False, "a loader")
    assert lists(source) == lists(source) == [[0, 1], [0]]
    assert len(made) == 2


def test_what_is_wrong_with_the_dataset_shows_where_the_loop_begins():
    def make():
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        iter(source_of(make))


def test_batches_are_converted_before_they_are_checked():
    source = source_of(lambda: iter(["1", "23"]), convert=lambda text: np.array(list(text), int))
    assert lists(source) == [[1], [2, 3]]


def test_a_bad_batch_is_named_by_its_number():
    iterator = iter(source_of(lambda: iter([*arrays(2, 2), {"x": 1.5}])))
    next(iterator)
    next(iterator)
    with pytest.raises(InputError, match="batch 2 of a loader: leaf x is a float, 1.5"):
        next(iterator)


def test_an_epoch_of_nothing_after_one_of_something():
    left = [arrays(2, 1), []]
    source = source_of(lambda: iter(left.pop(0)))
    assert lists(source) == [[0, 1], [0]]
    with pytest.raises(InputError, match="gave 2 batches in an earlier epoch and none in this one"):
        list(source)


def test_the_first_batch_of_an_iterable():
    source = source_of(lambda: iter(arrays(3, 1)))
    assert source.first().tolist() == [0, 1, 2]
    assert lists(source) == [[0, 1, 2], [0]]
    assert source_of(lambda: iter([])).first() is None


def test_the_users_iterator_is_closed_with_the_pass_that_made_it():
    closed = []

    def make():
        try:
            yield from arrays(2, 1)
        finally:
            closed.append(1)

    source = source_of(make)
    next(iter(source))
    assert closed == [1]
    list(source)
    assert closed == [1, 1]


def test_one_pass_goes_on_and_is_not_closed():
    closed = []

    def generator():
        try:
            yield from arrays(3, 2, 1)
        finally:
            closed.append(1)

    source = OneShotSource(generator(), "a generator")
    assert (source.kind, source.one_shot, source.describe()) == ("iterator", True, "a generator")
    assert next(iter(source)).tolist() == [0, 1, 2]
    assert closed == []
    assert lists(source) == [[0, 1], [0]]
    with pytest.raises(InputError, match="a generator is used up after 3 batches and cannot start"):
        iter(source)


def test_the_number_of_a_bad_batch_counts_over_all_loops():
    source = OneShotSource(iter([*arrays(2, 2), "text"]), "an iterator")
    next(iter(source))
    with pytest.raises(InputError, match="batch 2 of an iterator: leaf .* is a str"):
        list(source)


def test_one_pass_has_no_first_batch_to_show():
    source = OneShotSource(iter(arrays(2)), "an iterator")
    with pytest.raises(InputError, match="use up the first element of an iterator"):
        source.first()
    assert lists(source) == [[0, 1]]
