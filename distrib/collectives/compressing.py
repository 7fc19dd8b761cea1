"""The base of the algorithms that can send fewer bits."""

from __future__ import annotations

import abc
import copy
from typing import Self

import jax
import jax.numpy as jnp

from distrib.collectives.compression import Compression, Uncompressed, compression_named
from distrib.collectives.cross_device_ops import CrossDeviceOps
from distrib.collectives.one_sum import one_sum, one_sum_with_errors


class CompressingOps(CrossDeviceOps):
    """An all-reduce whose messages may be compressed.

    Values of fewer than 32 bits are added in float32, others in their own dtype; what travels is
    what the compression makes of them. Integers, complex numbers and PRNG keys are never
    compressed. The gradient of a compressed sum is a compressed sum of the gradients.

    Args:
      compression: ``"bfloat16"``, ``"int8"``, or None.

    Raises:
      ValueError: if there is no such compression.
    """

    _compression: Compression = Uncompressed()

    def __init__(self, compression: str | None = None):
        self._compression = compression_named(compression)

    @property
    def compression(self) -> str | None:
        """The compression on the wire; None for full precision."""
        return self._compression.name

    @property
    def error_feedback(self) -> bool:
        """Whether what is rounded off in a step is to be added to the values of the next."""
        return self._compression.error_feedback

    def with_compression(self, compression: str | None) -> Self:
        """Return the same algorithm with another compression.

        Raises:
          ValueError: if there is no such compression.
        """
        other = copy.copy(self)
        attributes = vars(other)
        attributes["_compression"] = compression_named(compression)
        attributes.pop("_reducers", None)  # They keep programs of the algorithm as it was.
        return other

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape and dtype."""
        if not self._compresses(value, num_replicas):
            return self.exact_sum(value, num_replicas)
        return one_sum(lambda x: self._rounded(x, num_replicas)[0], value)

    def sum_with_errors(self, value: jax.Array, num_replicas: int) -> tuple[jax.Array, jax.Array]:
        """Return the sum, and what this replica rounded off on the way.

        The values of all replicas add up to the sum and the errors of all replicas. Where something
        is not finite, the error is zero: it would stay for ever.
        """
        if not self._compresses(value, num_replicas):
            return super().sum_with_errors(value, num_replicas)
        return one_sum_with_errors(lambda x: self._rounded(x, num_replicas), value)

    @abc.abstractmethod
    def exact_sum(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum over the replicas at full precision, differentiable."""

    @abc.abstractmethod
    def steps(
        self, value: jax.Array, num_replicas: int, wire: Compression
    ) -> tuple[jax.Array, jax.Array]:
        """Carry out the algorithm with messages that ``wire`` encodes and decodes.

        Args:
          value: of any shape, not empty.
          num_replicas: 2 or more.
          wire: applies to the dtype of ``value``.

        Returns:
          The sum, equal bit by bit on all replicas, and what this replica rounded off, both of the
          shape and dtype of ``value``. An amount that several replicas round off alike is in the
          error of one of them.
        """

    def _compresses(self, value: jax.Array, num_replicas: int) -> bool:
        if self._compression.name is None or num_replicas == 1 or value.size == 0:
            return False
        return self._compression.applies_to(value.dtype)

    def _rounded(self, value: jax.Array, num_replicas: int) -> tuple[jax.Array, jax.Array]:
        wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
        total, error = self.steps(wide, num_replicas, self._compression)
        error = jnp.where(jnp.isfinite(error), error, 0)
        return total.astype(value.dtype), error.astype(value.dtype)
