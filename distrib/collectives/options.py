"""What a user may ask of the collectives."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass

from distrib.collectives.compression import compression_named

SMALL_TENSOR_BYTES = 64 * 1024
"""Unless the user says otherwise, a tensor of more bytes than this travels alone. Packing copies:
on two CPU devices a pack with the 400 kB weight of an MNIST layer made a step of 0.65 ms take 2 to
4 ms."""

DEFAULT_BYTES_PER_PACK = 4 * 1024 * 1024
"""The largest pack of small tensors, in bytes, unless the user says otherwise."""


class CommunicationImplementation(enum.Enum):
    """Who carries out a collective.

    ``AUTO`` leaves it to the strategy's cross-device ops; ``RING`` is
    :class:`distrib.RingAllReduce`; ``NCCL`` is what XLA does, NCCL on GPUs
    (:class:`distrib.NcclAllReduce`).
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of the collectives of a step.

    Args:
      bytes_per_pack: tensors of one dtype travel together in packs of at most this many bytes, and
        a larger tensor alone; this wins over the ``num_packs`` of an algorithm. 0 leaves it to the
        algorithm, and by default distrib chooses: tensors of at most 64 KiB, in packs of 4 MiB.
      timeout_seconds: with replicas in threads, how long the others may take to reach the
        collective once one waits in it. A compiled step refuses it: its replicas are one program,
        in which XLA alone could break off a collective.
      implementation: a :class:`CommunicationImplementation`, or its name.
      compression: ``"bfloat16"`` or ``"int8"``: floating values are sent in fewer bits. A single
        call keeps nothing for the next, so its ``int8`` is without error feedback; give the
        compression to the strategy's cross-device ops for that. None: as the algorithm does.

    Raises:
      ValueError: if ``bytes_per_pack`` is negative, ``timeout_seconds`` is not positive, or the
        implementation or compression is unknown.

    >>> CommunicationOptions(bytes_per_pack=1024).pack_limit
    1024
    >>> CommunicationOptions(implementation="ring").implementation
    <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    compression: str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"bytes_per_pack is {self.bytes_per_pack}, and must be 0 (distrib chooses) or more "
                "bytes."
            )
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(
                f"timeout_seconds is {self.timeout_seconds}, and must be more than 0, or None for "
                "no deadline of its own."
            )
        if not isinstance(self.implementation, CommunicationImplementation):
            object.__setattr__(self, "implementation", _implementation_named(self.implementation))
        compression_named(self.compression)

    @property
    def pack_limit(self) -> int:
        """The largest pack, in bytes."""
        return self.bytes_per_pack or DEFAULT_BYTES_PER_PACK

    @property
    def tensor_limit(self) -> int:
        """The largest tensor that goes into a pack, in bytes."""
        return self.bytes_per_pack or SMALL_TENSOR_BYTES


def _implementation_named(name: object) -> CommunicationImplementation:
    if isinstance(name, str) and name.upper() in CommunicationImplementation.__members__:
        return CommunicationImplementation[name.upper()]
    raise ValueError(
        f"implementation is {name!r}, and must be CommunicationImplementation.AUTO, RING or NCCL."
    )


def check_no_timeout(options: CommunicationOptions | None, where: str) -> None:
    """Refuse a timeout where nothing could keep it.

    Raises:
      ValueError: if the options have one.
    """
    if options is not None and options.timeout_seconds is not None:
        raise ValueError(
            f"timeout_seconds is {options.timeout_seconds:g} in {where}, where no replica waits "
            "for another in Python: a collective of a compiled program is broken off by XLA "
            "alone. Leave it out, or run replicas in threads: "
            "distrib.config.run_functions_eagerly(True)."
        )


def check_for_gather(options: CommunicationOptions | None) -> None:
    """Refuse options that have a meaning for sums only.

    Raises:
      ValueError: for a compression, or the implementation RING.
    """
    if options is None:
        return
    if options.compression is not None:
        raise ValueError(
            f"all_gather got compression={options.compression!r}, but gathers values as they are: "
            "only sums are compressed. Convert the values first: x.astype(jnp.bfloat16)."
        )
    if options.implementation is CommunicationImplementation.RING:
        raise ValueError(
            "all_gather got implementation=RING, but the ring is an algorithm for sums: leave the "
            "implementation AUTO or NCCL."
        )


def CollectiveHints(  # noqa: N802 - tf.distribute's name
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return :class:`CommunicationOptions`, under tf.distribute's deprecated name.

    Warns:
      DeprecationWarning: always.
    """
    warnings.warn(
        "CollectiveHints is deprecated: use distrib.experimental.CommunicationOptions.",
        DeprecationWarning,
        stacklevel=2,
    )
    return CommunicationOptions(bytes_per_pack, timeout_seconds)
