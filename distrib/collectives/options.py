"""What a user may ask of the collectives."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BYTES_PER_PACK = 4 * 1024 * 1024
"""Tensors are packed up to this size, in bytes, when the user names none: past a few megabytes a
collective is bound by bandwidth, and the copy into a pack costs more than a second collective."""


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of the collectives of a step.

    Args:
      bytes_per_pack: small tensors of one dtype travel together in packs of at most this many bytes;
        0 lets distrib choose (4 MiB). A larger tensor travels alone.

    Raises:
      ValueError: if ``bytes_per_pack`` is negative.

    >>> CommunicationOptions(bytes_per_pack=1024).pack_limit
    1024
    """

    bytes_per_pack: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"bytes_per_pack is {self.bytes_per_pack}, and must be 0 (distrib chooses) or more bytes."
            )

    @property
    def pack_limit(self) -> int:
        """The largest pack, in bytes."""
        return self.bytes_per_pack or DEFAULT_BYTES_PER_PACK
