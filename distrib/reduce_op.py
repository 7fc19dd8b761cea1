"""The two ways of combining the values of several replicas into one."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How the values of the replicas are combined.

    ``SUM`` adds them; ``MEAN`` adds them and divides by their number. Every public function
    that takes a ``ReduceOp`` also takes its name as a string, in any letter case.

    >>> ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the member that ``op`` names.

        Raises:
          ValueError: if ``op`` is neither a member nor the name of one.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ValueError(
            f"{op!r} is not a valid ReduceOp: pass ReduceOp.SUM, ReduceOp.MEAN, 'SUM' or 'MEAN'."
        )
