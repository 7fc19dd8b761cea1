"""What a function that makes one value for each replica is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ValueContext:
    """Which replica a value is made for.

    Args:
      replica_id_in_sync_group: the replica, from 0.
      num_replicas_in_sync: how many replicas there are.

    >>> ValueContext(1, 2)
    distrib.ValueContext(replica id 1, total: 2)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __repr__(self) -> str:
        return (
            f"distrib.ValueContext(replica id {self.replica_id_in_sync_group}, total: "
            f"{self.num_replicas_in_sync})"
        )
