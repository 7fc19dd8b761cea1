"""How steps become compiled programs."""

from distrib.engines.engine import SpmdEngine
from distrib.engines.placement import InProgram, OnOneDevice, UpdatePlacement
from distrib.engines.threads import ThreadsEngine

__all__ = ["InProgram", "OnOneDevice", "SpmdEngine", "ThreadsEngine", "UpdatePlacement"]
