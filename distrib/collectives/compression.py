"""Fewer bits on the wire: how an array is encoded before it is sent, and decoded after.

A replica that encodes an array knows what it has rounded off. All-reduce algorithms hand these
errors out, and whoever reduces at each step adds them to the values of the next: *error feedback*
(Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", 2014; Karimireddy, Rebjock, Stich and Jaggi,
"Error feedback fixes SignSGD and other gradient compression schemes", 2019).
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

BLOCK = 256
"""The elements that share one scale in ``int8``, so that small numbers beside large ones keep their
digits; the scale adds 4 bytes to 256."""

_SCALE_BYTES = 4
_LARGEST = 127


class Compression(Protocol):
    """A way to send arrays ``[..., elements]`` of a floating dtype."""

    @property
    def name(self) -> str | None:
        """What the user calls it."""
        ...

    @property
    def error_feedback(self) -> bool:
        """Whether it rounds so much that errors are to be kept for the next step."""
        ...

    def applies_to(self, dtype: Any) -> bool:
        """Tell whether arrays of ``dtype`` are made smaller."""
        ...

    def encode(self, array: jax.Array) -> jax.Array:
        """Return what is sent: ``[..., units]``, zeros for zeros."""
        ...

    def decode(self, sent: jax.Array, like: jax.Array) -> jax.Array:
        """Return ``[..., elements]`` in the dtype and number of elements of ``like``."""
        ...


class Uncompressed:
    """Arrays of any dtype travel as they are."""

    name = None
    error_feedback = False

    def applies_to(self, dtype: Any) -> bool:
        """Return True."""
        return True

    def encode(self, array: jax.Array) -> jax.Array:
        """Return the array."""
        return array

    def decode(self, sent: jax.Array, like: jax.Array) -> jax.Array:
        """Return the array."""
        return sent


class BFloat16:
    """The upper 16 bits, rounded: 8 bits of exponent, as float32 has, and 8 of precision.

    They are sent as integers: on CPU devices XLA turns collectives of bfloat16 into float32.
    """

    name = "bfloat16"
    error_feedback = False

    def applies_to(self, dtype: Any) -> bool:
        """Tell whether ``dtype`` is real, floating, and has more than 16 bits."""
        return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 2

    def encode(self, array: jax.Array) -> jax.Array:
        """Return ``uint16[..., elements]``."""
        return jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, sent: jax.Array, like: jax.Array) -> jax.Array:
        """Return the numbers."""
        return jax.lax.bitcast_convert_type(sent, jnp.bfloat16).astype(like.dtype)


class Int8:
    """Multiples, from -127 to 127, of a scale for each block of :data:`BLOCK` elements.

    The scale is the largest magnitude of the block over 127, so that an element is rounded by at
    most half of that. A block with an element that is not finite arrives as NaN, all of it: whoever
    looks for such gradients still finds them.
    """

    name = "int8"
    error_feedback = True

    def applies_to(self, dtype: Any) -> bool:
        """Tell whether ``dtype`` is real and floating."""
        return jnp.issubdtype(dtype, jnp.floating)

    def encode(self, array: jax.Array) -> jax.Array:
        """Return ``int8[..., blocks * (block + 4)]``: the numbers of a block, then its scale."""
        *rows, elements = array.shape
        block = min(BLOCK, elements)
        padding = [(0, 0)] * len(rows) + [(0, -elements % block)]
        blocks = jnp.pad(array, padding).reshape(*rows, -1, block).astype(jnp.float32)
        scale = jnp.abs(blocks).max(-1, keepdims=True) / _LARGEST
        # Below that the hardware may take a number for zero, and dividing by it gives infinity.
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)
        multiples = jnp.round(blocks / jnp.where(scale == 0, 1, scale))
        multiples = jnp.nan_to_num(multiples * (scale != 0), nan=0.0)
        scale_bytes = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
        sent = jnp.concatenate([multiples.astype(jnp.int8), scale_bytes], -1)
        return sent.reshape(*rows, -1)

    def decode(self, sent: jax.Array, like: jax.Array) -> jax.Array:
        """Return the numbers."""
        elements = like.shape[-1]
        block = min(BLOCK, elements)
        rows = sent.shape[:-1]
        blocks = sent.reshape(*rows, -1, block + _SCALE_BYTES)
        scale = jax.lax.bitcast_convert_type(blocks[..., block:], jnp.float32)
        numbers = blocks[..., :block] * scale[..., None]
        return numbers.reshape(*rows, -1)[..., :elements].astype(like.dtype)


_COMPRESSIONS: dict[str, Compression] = {"bfloat16": BFloat16(), "int8": Int8()}


def compression_named(name: str | None) -> Compression:
    """Return the compression of that name.

    >>> int8 = compression_named("int8")
    >>> x = jnp.array([127.0, 1.0, -2.4])
    >>> print(int8.decode(int8.encode(x), x))
    [127.   1.  -2.]

    Raises:
      ValueError: if there is none.
    """
    if name is None:
        return Uncompressed()
    if name not in _COMPRESSIONS:
        raise ValueError(
            f"compression is {name!r}, and must be 'bfloat16', 'int8', or None for full precision."
        )
    return _COMPRESSIONS[name]
