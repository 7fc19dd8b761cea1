"""Many small tensors in few collectives.

A collective costs a fixed time before its first byte moves, so tensors of one dtype are laid end to
end, reduced together and cut apart again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def plan_packs(
    sizes: Sequence[int], dtypes: Sequence[object], limit: int, tensor_limit: int | None = None
) -> list[list[int]]:
    """Group tensors into packs.

    Args:
      sizes: the size of each tensor, in bytes.
      dtypes: the dtype of each.
      limit: the largest pack, in bytes.
      tensor_limit: the largest tensor that shares a pack, in bytes; by default ``limit``.

    Returns:
      Lists of positions. Each position stands in exactly one list; the tensors of a list have one
      dtype and together at most ``limit`` bytes, or there is only one of them.

    >>> plan_packs([4, 4, 100, 4], ["f", "f", "f", "i"], limit=16)
    [[0, 1], [2], [3]]
    """
    packs: list[list[int]] = []
    open_pack: dict[object, tuple[list[int], int]] = {}
    tensor_limit = limit if tensor_limit is None else tensor_limit
    for position, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if size > tensor_limit:
            packs.append([position])
            continue
        pack, used = open_pack.get(dtype, (None, 0))
        if pack is None or used + size > limit:
            pack, used = [], 0
            packs.append(pack)
        pack.append(position)
        open_pack[dtype] = (pack, used + size)
    return packs


def map_packed(
    fn: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    limit: int,
    tensor_limit: int | None = None,
) -> list[jax.Array]:
    """Apply ``fn``, which works element by element, to few packs instead of many leaves.

    Args:
      fn: called with one array for each pack: the leaf itself if it is alone, else ``[elements]``.
      leaves: arrays of any shapes and dtypes.
      limit: the largest pack, in bytes.
      tensor_limit: the largest leaf that shares a pack, in bytes; by default ``limit``.

    Returns:
      The results, in the shapes and the order of ``leaves``.
    """
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    results: list[jax.Array | None] = [None] * len(leaves)
    for pack in plan_packs(sizes, [leaf.dtype for leaf in leaves], limit, tensor_limit):
        if len(pack) == 1:
            results[pack[0]] = fn(leaves[pack[0]])
            continue
        reduced = fn(jnp.concatenate([leaves[i].reshape(-1) for i in pack]))
        start = 0
        for i in pack:
            stop = start + math.prod(leaves[i].shape)
            results[i] = jax.lax.slice(reduced, (start,), (stop,)).reshape(leaves[i].shape)
            start = stop
    return [result for result in results if result is not None]
