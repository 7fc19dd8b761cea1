"""Arrays in memory as a source of batches: epochs, shuffling, gathering."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from distrib.errors import InputError
from distrib.input.host_arrays import host_batch
from distrib.input.options import checked_int
from distrib.input.splitting import batch_size_of

# On the CPU, JAX takes over a buffer that starts on a 64-byte boundary instead of copying it. The
# boundary costs 4 us, which the copy of a smaller batch does not.
_ALIGNMENT = 64
_ALIGN_FROM_BYTES = 1 << 16


class ArraySource:
    """Batches of a pytree of arrays; each ``iter()`` is the next epoch.

    Every epoch gives each example exactly once, in order or, with ``shuffle``, in an order drawn
    from ``(seed, epoch)``; the order of epoch 0 is the same in every run with the same seed. The
    last batch is short where the examples do not divide, unless ``drop_remainder``. Unshuffled
    batches are views of the arrays, so do not write to the arrays while they are in use.

    Args:
      arrays: a pytree of arrays ``[examples, ...]``; what is not NumPy's is copied to the host.
      batch_size: examples in a (global) batch.
      shuffle: whether to draw a new order each epoch.
      seed: a non-negative int. None draws one when the source is made, so that runs differ; it
        can be read back as ``.seed``. Without ``shuffle`` it is not used.
      drop_remainder: whether to leave out a last, short batch.

    Raises:
      InputError: if a leaf is not an array or lengths differ (with paths and lengths), or a number
        is out of its range.

    >>> source = ArraySource({"x": np.arange(5)}, batch_size=2)
    >>> [batch["x"].tolist() for batch in source]
    [[0, 1], [2, 3], [4]]
    """

    kind = "arrays"
    one_shot = False

    def __init__(
        self,
        arrays: Any,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        """Check the arrays and the numbers; nothing is copied that is NumPy's already."""
        for name, value in (("shuffle", shuffle), ("drop_remainder", drop_remainder)):
            if not isinstance(value, bool):
                raise InputError(
                    f"{name} is {value!r}; it must be a bool: pass True or False (a shuffle is "
                    "always over the whole epoch and has no buffer size)."
                )
        # np.asarray makes memory-mapped arrays plain ones (without reading them), JAX's NumPy's.
        self._arrays = jax.tree_util.tree_map(np.asarray, host_batch(arrays))
        self._num_examples = batch_size_of(self._arrays, what="dataset")
        self._batch_size = checked_int(
            "batch_size", batch_size, minimum=1, fix="pass the examples in a global batch."
        )
        self._drop_remainder = drop_remainder
        self._shuffle = shuffle
        if seed is None:
            # 63 bits, so that the seed can be passed on as any ordinary int.
            seed = int(np.random.default_rng().integers(1 << 63))
        self.seed = checked_int("seed", seed, minimum=0, fix="pass a non-negative int, or None.")
        self._epochs = itertools.count()
        if not self._num_batches():
            fix = "a smaller batch_size, or drop_remainder=False" if drop_remainder else "examples"
            raise InputError(f"{self.describe()} make no batch at all: pass {fix}.")

    def describe(self) -> str:
        """Return a phrase for messages: how many examples, in which batches."""
        order = ", shuffled" if self._shuffle else ""
        return f"arrays of {self._num_examples} examples in batches of {self._batch_size}{order}"

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the next epoch, each leaf ``[batch, ...]``."""
        # The epoch is counted here and not at the first batch, so that an iterator made earlier is
        # an earlier epoch whichever thread draws from it first.
        return self._epoch(next(self._epochs))

    def first(self) -> Any:
        """Return the first batch of epoch 0; the epochs to come stay what they are."""
        return next(self._epoch(0))

    def _num_batches(self) -> int:
        full, rest = divmod(self._num_examples, self._batch_size)
        return full + (rest > 0 and not self._drop_remainder)

    def _epoch(self, epoch: int) -> Iterator[Any]:
        leaves, structure = jax.tree_util.tree_flatten(self._arrays)
        order = None
        if self._shuffle:
            entropy = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            order = np.random.default_rng(entropy).permutation(self._num_examples)
        for batch in range(self._num_batches()):
            cut = slice(batch * self._batch_size, (batch + 1) * self._batch_size)
            if order is None:
                yield structure.unflatten([leaf[cut] for leaf in leaves])
            else:
                rows = order[cut]
                yield structure.unflatten([_gather(leaf, rows) for leaf in leaves])


def _gather(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Copy the rows ``[batch]`` of ``array`` into fresh memory ``[batch, ...]``."""
    if not array.flags.c_contiguous:
        return array[rows]  # np.take would first copy the whole of a strided array
    shape = (len(rows), *array.shape[1:])
    num_bytes = math.prod(shape) * array.itemsize
    if num_bytes < _ALIGN_FROM_BYTES or array.dtype.hasobject:
        return np.take(array, rows, axis=0)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.__array_interface__["data"][0] % _ALIGNMENT
    out = np.ndarray(shape, array.dtype, buffer=memory, offset=offset)
    # With the default mode NumPy would gather into a buffer of its own and copy; rows are in range.
    return np.take(array, rows, axis=0, out=out, mode="clip")
