"""tf.distribute's experimental spellings."""

from distrib.collectives import CommunicationOptions
from distrib.strategies import CentralStorageStrategy
from distrib.values import ValueContext

__all__ = ["CentralStorageStrategy", "CommunicationOptions", "ValueContext"]
