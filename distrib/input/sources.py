"""What a user may pass as a dataset, brought to one interface: a ``Source`` of host batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax

from distrib.errors import InputError
from distrib.input.array_source import ArraySource
from distrib.input.host_arrays import comes_from, is_array
from distrib.input.iterable_source import IterableSource, OneShotSource

_ACCEPTED = (
    "pass a pytree of arrays with batch_size=..., an iterable of batches, a Grain dataset, a torch "
    "DataLoader or a tf.data.Dataset"
)


class Source(Protocol):
    """Host batches, one epoch for each ``iter()``.

    A batch is a pytree of ``np.ndarray`` (JAX arrays stay what they are), each ``[examples, ...]``.
    """

    @property
    def kind(self) -> str:
        """One word or two for what the source is made of, such as ``"arrays"``."""
        ...

    @property
    def one_shot(self) -> bool:
        """Whether there is one pass only: a further ``iter()`` goes on where the last one was."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch."""
        ...

    def first(self) -> Any:
        """Return the first batch of some epoch without starting one; None if there is none."""
        ...

    def describe(self) -> str:
        """Return a phrase for messages."""
        ...


def as_source(
    dataset: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Source:
    """Return what the user passed as a ``Source``.

    Args:
      dataset: a pytree of arrays ``[examples, ...]`` (an array, tuple, dict, NamedTuple or other
        container known to JAX, but not a list) together with ``batch_size``; or something that
        gives global batches: an iterable (a list is one), an iterator, a Grain ``MapDataset``,
        ``IterDataset`` or ``DataLoader``, a torch ``DataLoader`` or a ``tf.data.Dataset``.
      batch_size: for arrays only: examples in a global batch.
      shuffle: for arrays only: whether each epoch has a new order.
      seed: for arrays only: see ``ArraySource``.
      drop_remainder: for arrays only: whether to leave out a last, short batch.

    Raises:
      InputError: if the dataset is none of these, or the options do not go with it.

    >>> import numpy as np
    >>> [x.tolist() for x, y in as_source((np.arange(3), np.zeros(3)), batch_size=2)]
    [[0, 1], [2]]
    >>> as_source([np.arange(2), np.arange(2)]).describe()
    'a list of 2 batches'
    """
    if _is_array_tree(dataset):
        if batch_size is None:
            raise InputError(
                f"the dataset is a {type(dataset).__name__}, which is read as a pytree of arrays: "
                "pass batch_size=..., the examples in a global batch (or, if it holds whole "
                "batches, pass a list of them)."
            )
        return ArraySource(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_remainder=drop_remainder,
        )
    source = _iterable_source(dataset)
    for name, given in (
        ("batch_size", batch_size is not None),
        ("shuffle", shuffle),
        ("seed", seed is not None),
        ("drop_remainder", drop_remainder),
    ):
        if given:
            hint = (
                "for a list of whole arrays pass a tuple instead"
                if isinstance(dataset, list)
                else f"set it where {source.describe()} is made"
            )
            raise InputError(
                f"{name} goes with arrays only, and {source.describe()} gives batches that are "
                f"made already: leave {name} out, and {hint}."
            )
    return source


def _is_array_tree(dataset: Any) -> bool:
    if isinstance(dataset, list) or dataset is None:
        return False
    return is_array(dataset) or not jax.tree_util.all_leaves([dataset])


def _refuse_what_gives_no_batches(dataset: Any) -> None:
    name = type(dataset).__name__
    has_iter = issubclass(type(dataset), Iterable)
    if comes_from(dataset, "torch", "Dataset") and not comes_from(
        dataset, "torch", "IterableDataset"
    ):
        raise InputError(
            f"the dataset is a torch {name}, which gives single examples: wrap it, "
            "torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    if callable(dataset) and not has_iter:
        raise InputError(
            f"the dataset is a {name}, which can be called but not iterated: call it, or pass a "
            "generator function without arguments, which is called for each epoch, or pass a "
            "function of an InputContext to distribute_datasets_from_function."
        )
    is_text = isinstance(dataset, (str, bytes, bytearray))
    if is_text or not (has_iter or hasattr(type(dataset), "__getitem__")):
        raise InputError(
            f"the dataset is a {name}, which cannot be iterated for batches: {_ACCEPTED}."
        )


def _iterable_source(dataset: Any) -> Source:
    if inspect.isgeneratorfunction(dataset):
        return IterableSource(
            dataset, kind="iterable", description=f"the generator function {dataset.__name__}"
        )
    _refuse_what_gives_no_batches(dataset)
    name = type(dataset).__name__
    if hasattr(type(dataset), "__next__") and iter(dataset) is dataset:
        return OneShotSource(dataset, f"a {name}")
    if comes_from(dataset, "tensorflow") and hasattr(dataset, "as_numpy_iterator"):
        return IterableSource(
            lambda: iter(dataset.as_numpy_iterator()),
            kind="tf.data",
            description=f"a tf.data {name}",
        )
    kind, convert = "iterable", None
    if comes_from(dataset, "grain"):
        kind = "Grain"
    elif comes_from(dataset, "torch", "DataLoader"):
        kind, convert = "torch", _lists_to_tuples
    if kind != "iterable":
        description = f"a {kind} {name}"
    elif isinstance(dataset, list):
        description = f"a list of {len(dataset)} batches"
    else:
        description = f"a {name}"
    return IterableSource(
        lambda: iter(dataset), kind=kind, description=description, convert=convert
    )


def _lists_to_tuples(batch: Any) -> Any:
    """Return ``batch`` with tuples for the lists that torch's collation makes of tuples."""
    if isinstance(batch, list):
        return tuple(_lists_to_tuples(item) for item in batch)
    if type(batch) is dict:
        return {key: _lists_to_tuples(value) for key, value in batch.items()}
    return batch
