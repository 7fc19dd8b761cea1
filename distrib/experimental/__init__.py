"""tf.distribute's experimental spellings."""

from distrib.collectives import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from distrib.collectives import CommunicationImplementation as CollectiveCommunication
from distrib.strategies import CentralStorageStrategy
from distrib.values import ValueContext

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ValueContext",
]
