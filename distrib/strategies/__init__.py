"""The strategies."""

from distrib.strategies import default
from distrib.strategies.central_storage import CentralStorageStrategy
from distrib.strategies.current import experimental_set_strategy
from distrib.strategies.extended import StrategyExtended
from distrib.strategies.many_steps import train_loop
from distrib.strategies.mirrored import MirroredStrategy
from distrib.strategies.one_device import OneDeviceStrategy
from distrib.strategies.strategy import Strategy

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
    "experimental_set_strategy",
    "train_loop",
]

default.install()
