"""How steps become compiled programs."""

from distrib.engines.engine import SpmdEngine
from distrib.engines.placement import InProgram, OnOneDevice, UpdatePlacement

__all__ = ["InProgram", "OnOneDevice", "SpmdEngine", "UpdatePlacement"]
