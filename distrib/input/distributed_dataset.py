"""Datasets whose every element has a piece for each replica."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distrib.errors import InputError, OutOfRangeError
from distrib.input.last_batch import Draw, evened
from distrib.input.options import InputContext, InputOptions, InputReplicationMode
from distrib.input.placing import BatchPlacer
from distrib.input.prefetch import Prefetcher
from distrib.input.sources import Source, as_source


class OptionalElement:
    """An element of a dataset, or the news that there is none."""

    def __init__(self, elements: Sequence[Any]):
        self._elements = tuple(elements)

    def has_value(self) -> bool:
        """Tell whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Return the element.

        Raises:
          OutOfRangeError: if there is none.
        """
        if not self._elements:
            raise OutOfRangeError(
                "The given optional does not have a value: the dataset has ended."
            )
        return self._elements[0]


class DistributedIterator:
    """One pass over a distributed dataset.

    A thread loads and places elements ahead of use; it ends with the iterator.

    Attributes:
      strategy: the strategy for whose replicas the elements are.
    """

    def __init__(self, prefetcher: Prefetcher[Any], description: str, strategy: Any = None):
        self._prefetcher = prefetcher
        self._description = description
        self.strategy = strategy

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        return next(self._prefetcher)

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
          OutOfRangeError: at the end of the dataset.
        """
        for element in self._prefetcher:
            return element
        raise OutOfRangeError(f"End of sequence: {self._description} has no more elements.")

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` elements, fewer at the end of the dataset."""
        return self._prefetcher.take(count)

    def get_next_as_optional(self) -> OptionalElement:
        """Return the next element, or an optional without a value at the end."""
        return OptionalElement(list(itertools.islice(self._prefetcher, 1)))

    @property
    def ended(self) -> bool:
        """Whether the pass is over."""
        return self._prefetcher.ended

    def close(self) -> None:
        """End the thread that loads ahead; the iterator is at its end afterwards."""
        self._prefetcher.close()

    def __repr__(self) -> str:
        return f"<distrib.DistributedIterator of {self._description}>"


class DistributedDataset:
    """A dataset whose elements are per-replica values.

    Made by ``strategy.experimental_distribute_dataset`` and
    ``strategy.distribute_datasets_from_function``. Each ``iter()`` is one pass, one epoch; of a
    source that can be read once, such as a generator, there is one pass, which each ``iter()``
    continues; once it is over, ``iter()`` raises :class:`distrib.errors.InputError`.

    Args:
      make_elements: starts a pass over host elements.
      place: from a host element to per-replica values.
      first: returns a first host element without starting a pass, or None.
      depth: how many elements to prepare ahead of use.
      description: the source, for messages.
      one_shot: whether there is one pass only.

    Attributes:
      strategy: the strategy that distributes it, which sets this.
    """

    def __init__(
        self,
        make_elements: Callable[[], Iterator[Any]],
        place: Callable[[Any], Any],
        *,
        first: Callable[[], Any],
        depth: int,
        description: str,
        one_shot: bool,
    ):
        self._make_elements = make_elements
        self._place = place
        self._first = first
        self._depth = depth
        self._description = description
        self._one_shot = one_shot
        self._pass: DistributedIterator | None = None
        self.strategy: Any = None

    def __iter__(self) -> DistributedIterator:
        if self._one_shot and self._pass is not None and not self._pass.ended:
            return self._pass
        # Of a pass that is over the source knows: to go on as if it were an epoch of nothing would
        # pass for training.
        prefetcher = Prefetcher(
            self._make_elements, self._depth, self._place, description=self._description
        )
        iterator = DistributedIterator(prefetcher, self._description, self.strategy)
        if self._one_shot:
            self._pass = iterator
        return iterator

    @property
    def element_spec(self) -> Any:
        """Shape and dtype of the first element as it comes from the source, ``[batch, ...]``.

        None if there is no element. Asking starts no epoch.

        Raises:
          InputError: for a source that can be read once, whose first element it would use up.
        """
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._first())

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold the elements of one pass: ``state = reduce_func(state, element)``."""
        return functools.reduce(reduce_func, self, initial_state)

    def __repr__(self) -> str:
        return f"<distrib.DistributedDataset of {self._description}>"


def distribute_dataset(
    dataset: Any,
    placer: BatchPlacer,
    options: InputOptions,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int | None,
    drop_remainder: bool,
) -> DistributedDataset:
    """Distribute global batches: each is cut over the replicas.

    Raises:
      InputError: if the dataset is of no kind that can be read, or the options do not fit.
    """
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InputError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`, which makes a dataset for each replica. "
            "experimental_distribute_dataset has one, and cuts its batches."
        )
    source = as_source(
        dataset, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_remainder=drop_remainder
    )
    even = functools.partial(
        evened,
        last_batch=options.last_batch,
        size=batch_size,
        multiple=placer.num_replicas,
        description=source.describe(),
    )
    return DistributedDataset(
        lambda: even([batch] for batch in source),
        lambda draw: placer.split(draw[0]),
        first=lambda: _first(source, even),
        depth=options.experimental_per_replica_buffer_size,
        description=source.describe(),
        one_shot=source.one_shot,
    )


def datasets_from_function(
    dataset_fn: Callable[[InputContext], Any], placer: BatchPlacer, options: InputOptions
) -> DistributedDataset:
    """Distribute what ``dataset_fn`` makes: each replica draws its own element, as it is.

    Raises:
      InputError: if ``dataset_fn`` returns something that cannot be read.
    """
    size = placer.num_replicas
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        contexts = [InputContext(size, i, size) for i in range(size)]
    else:
        contexts = [InputContext(1, 0, size)]
    sources = [as_source(dataset_fn(context)) for context in contexts]
    even = functools.partial(
        evened,
        last_batch=options.last_batch,
        size=None,
        multiple=1,
        description=sources[0].describe(),
    )
    return DistributedDataset(
        lambda: even(_drawn([iter(source) for source in sources], size)),
        placer.pieces,
        first=lambda: _first(sources[0], even),
        depth=options.experimental_per_replica_buffer_size,
        description=sources[0].describe(),
        one_shot=any(source.one_shot for source in sources),
    )


def _first(source: Source, even: Callable[[Iterator[Draw]], Iterator[Draw]]) -> Any:
    batch = source.first()
    return None if batch is None else next(even(iter([[batch]])))[0]


def _drawn(iterators: list[Iterator[Any]], size: int) -> Iterator[Draw]:
    """Draw an element for each replica, from its own source or in turn from the one there is.

    At the end, replicas for which nothing is left get empty pieces. A scalar has none: as in
    tf.distribute, a rest of scalars that does not suffice for all replicas is left out.
    """
    if len(iterators) == 1:
        iterators *= size
    while True:
        drawn = [list(itertools.islice(iterator, 1)) for iterator in iterators]
        filled = [element[0] for element in drawn if element]
        if not filled:
            return
        if len(filled) == size:
            yield filled
            continue
        if any(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(filled[0])):
            return  # To give the same one again would count it twice.
        empty = jax.tree.map(lambda x: x[:0], filled[0])
        yield [element[0] if element else empty for element in drawn]
