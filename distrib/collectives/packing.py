"""Many small tensors in few collectives.

A collective costs a fixed time before its first byte moves, so tensors of one dtype are laid end to
end, reduced together and cut apart again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from distrib.collectives.options import CommunicationOptions


@dataclass(frozen=True)
class Packing:
    """How tensors share collectives.

    Attributes:
      limit: the largest pack, in bytes; None for any size.
      tensor_limit: the largest tensor that shares a pack, in bytes; None for ``limit``.
      pieces: into how many equal pieces what has been laid end to end is cut, each a collective.
    """

    limit: int | None
    tensor_limit: int | None = None
    pieces: int = 1


def packing_for(options: CommunicationOptions, num_packs: int | None) -> Packing:
    """Return how tensors travel: as a call says, else as the algorithm does, else as by default.

    Args:
      options: the options of the call.
      num_packs: of the algorithm: the tensors of one dtype together in that many packs, 0 for each
        tensor alone, None for distrib's choice.

    >>> packing_for(CommunicationOptions(), 2)
    Packing(limit=None, tensor_limit=None, pieces=2)
    >>> packing_for(CommunicationOptions(bytes_per_pack=8), 2)
    Packing(limit=8, tensor_limit=8, pieces=1)
    """
    if options.bytes_per_pack or num_packs is None:
        return Packing(options.pack_limit, options.tensor_limit)
    if num_packs == 0:
        return Packing(limit=0, tensor_limit=-1)
    return Packing(limit=None, pieces=num_packs)


def checked_num_packs(what: str, num_packs: int | None) -> int | None:
    """Return the number of packs that an algorithm was given.

    Raises:
      ValueError: if it is negative.
    """
    if num_packs is not None and num_packs < 0:
        raise ValueError(
            f"{what} requires num_packs >= 0, but {num_packs} is specified. Give 0 for each tensor "
            "alone, or leave it out for packs of small tensors."
        )
    return num_packs


def plan_packs(
    sizes: Sequence[int],
    dtypes: Sequence[object],
    limit: int | None,
    tensor_limit: int | None = None,
) -> list[list[int]]:
    """Group tensors into packs.

    Args:
      sizes: the size of each tensor, in bytes.
      dtypes: the dtype of each.
      limit: the largest pack, in bytes; None for any size.
      tensor_limit: the largest tensor that shares a pack, in bytes; by default ``limit``.

    Returns:
      Lists of positions. Each position stands in exactly one list; the tensors of a list have one
      dtype and together at most ``limit`` bytes, or there is only one of them.

    >>> plan_packs([4, 4, 100, 4], ["f", "f", "f", "i"], limit=16)
    [[0, 1], [2], [3]]
    """
    packs: list[list[int]] = []
    open_pack: dict[object, tuple[list[int], int]] = {}
    most = math.inf if limit is None else limit
    tensor_most = most if tensor_limit is None else tensor_limit
    for position, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if size > tensor_most:
            packs.append([position])
            continue
        pack, used = open_pack.get(dtype, (None, 0))
        if pack is None or used + size > most:
            pack, used = [], 0
            packs.append(pack)
        pack.append(position)
        open_pack[dtype] = (pack, used + size)
    return packs


def map_packed(
    fn: Callable[[jax.Array], Any], leaves: Sequence[jax.Array], packing: Packing
) -> list[Any]:
    """Apply ``fn``, which works element by element, to few packs instead of many leaves.

    Args:
      fn: called with one array for each pack: the leaf itself if it is alone, else ``[elements]``;
        returns an array of that shape, or a tree of them.
      leaves: arrays of any shapes and dtypes.
      packing: how leaves share packs.

    Returns:
      The results, in the shapes and the order of ``leaves``.
    """
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    results: list[Any] = [None] * len(leaves)
    for pack in plan_packs(sizes, dtypes, packing.limit, packing.tensor_limit):
        if len(pack) == 1 and packing.pieces == 1:
            results[pack[0]] = fn(leaves[pack[0]])
            continue
        together = jnp.concatenate([leaves[i].reshape(-1) for i in pack])
        reduced = _in_pieces(fn, together, packing.pieces)
        start = 0
        for i in pack:
            results[i] = jax.tree.map(_Cut(start, leaves[i].shape), reduced)
            start += leaves[i].size
    return results


def _in_pieces(fn: Callable[[jax.Array], Any], together: jax.Array, pieces: int) -> Any:
    """Apply ``fn`` to equal pieces; to no more of them than there are elements."""
    length = max(1, math.ceil(together.size / pieces))
    starts = range(0, max(1, together.size), length)
    results = [fn(together[start : start + length]) for start in starts]
    if len(results) == 1:
        return results[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


@dataclass(frozen=True)
class _Cut:
    """Cuts a leaf out of what has been laid end to end."""

    start: int
    shape: tuple[int, ...]

    def __call__(self, together: jax.Array) -> jax.Array:
        stop = self.start + math.prod(self.shape)
        return jax.lax.slice(together, (self.start,), (stop,)).reshape(self.shape)
