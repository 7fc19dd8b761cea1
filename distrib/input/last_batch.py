"""What becomes of a batch that is shorter than the others, as the last of an epoch is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.errors import InputError
from distrib.input.splitting import batch_size_of

Draw = list[Any]
"""What is drawn from a source for one step: a global batch, or a batch for each replica."""


def evened(
    draws: Iterator[Draw], last_batch: str, *, size: int | None, multiple: int, description: str
) -> Iterator[Draw]:
    """Return the draws of a pass with what ``last_batch`` says done to short batches.

    Args:
      draws: lists of batches, pytrees of arrays ``[examples, ...]``.
      last_batch: as in ``InputOptions``.
      size: the examples of a whole batch; None for those of the first one.
      multiple: padded batches are as long as the next multiple of this.
      description: the source, for messages.

    Raises:
      InputError: from the iterator, as ``dropped`` and ``padded``.
    """
    if last_batch == "drop":
        return dropped(draws, size, description)
    return padded(draws, size, multiple, description) if last_batch == "pad" else draws


def dropped(draws: Iterator[Draw], size: int | None, description: str) -> Iterator[Draw]:
    """Leave out each draw that has a batch of fewer than ``size`` examples.

    Args:
      draws: lists of batches, pytrees of arrays ``[examples, ...]``.
      size: the examples of a whole batch; None for those of the first one.
      description: the source, for messages.

    Raises:
      InputError: from the iterator, if a batch has more examples, or if every draw is left out.

    >>> [x.tolist() for [x] in dropped(iter([[np.arange(5)], [np.arange(4)]]), None, "a list")]
    [[0, 1, 2, 3, 4]]
    """
    kept, short = 0, None
    for draw in draws:
        counts, size = _counted(draw, size, "drop", description)
        if min(counts) == size:
            kept += 1
            yield draw
        else:
            short = counts
    if short and not kept:
        raise InputError(
            f'last_batch is "drop", and {description} has no batch of {size} examples to keep: one '
            f'has {min(short)}. Pass a smaller batch size, or last_batch="pad" or "split".'
        )


def padded(
    draws: Iterator[Draw], size: int | None, multiple: int, description: str
) -> Iterator[Draw]:
    """Fill up each batch and give it a mask: ``(batch, mask)``.

    It is filled with copies of the example before, and not with zeros, at which a norm or a
    logarithm has no gradient, so that even 0 times its gradient would be NaN.

    Args:
      draws: lists of batches, pytrees of arrays ``[examples, ...]``.
      size: the examples of a whole batch; None for those of the first one.
      multiple: batches are filled up to the next multiple of this.
      description: the source, for messages.

    Raises:
      InputError: from the iterator, if a batch has more examples, or the first has none.

    >>> batches = [[np.arange(3)], [np.arange(3, 5)]]
    >>> [(x.tolist(), mask.tolist()) for [(x, mask)] in padded(iter(batches), None, 1, "a list")]
    [([0, 1, 2], [True, True, True]), ([3, 4, 4], [True, True, False])]
    """
    example = None
    for draw in draws:
        counts, size = _counted(draw, size, "pad", description)
        length = -(-size // multiple) * multiple
        filled = []
        for batch, count in zip(draw, counts, strict=True):
            if count:
                example = jax.tree.map(lambda leaf: leaf[-1:], batch)
            mask = np.arange(length) < count
            filled.append((_filled(batch, example, length - count), mask))
        yield filled


def _counted(draw: Draw, size: int | None, kind: str, description: str) -> tuple[list[int], int]:
    """Return the examples of each batch of a draw, and of a whole one."""
    counts = [batch_size_of(batch) for batch in draw]
    size = max(counts) if size is None else size
    if max(counts) > size or not size:
        raise InputError(
            f'last_batch is "{kind}", and {description} has a batch of {max(counts)} examples '
            f"where a whole one has {size}: the first batch must have examples, and none may have "
            'more. Put a longest batch first, or pass last_batch="split".'
        )
    return counts, size


def _filled(batch: Any, example: Any, missing: int) -> Any:
    """Return ``batch`` with ``missing`` copies of ``example``, a tree of ``[1, ...]``, behind."""
    if not missing:
        return batch

    def fill(leaf: Any, one: Any) -> Any:
        arrays = jnp if isinstance(leaf, jax.Array) else np
        return arrays.concatenate([leaf, arrays.repeat(one, missing, axis=0)])

    return jax.tree.map(fill, batch, example)
