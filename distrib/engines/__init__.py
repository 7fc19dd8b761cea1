"""How steps become compiled programs."""

from distrib.engines.engine import SpmdEngine
from distrib.engines.function import Function, function
from distrib.engines.many_steps import joined, with_step_axis
from distrib.engines.placement import InProgram, OnOneDevice, UpdatePlacement
from distrib.engines.run_options import NO_OPTIONS, RunOptions
from distrib.engines.signature import is_argument
from distrib.engines.threads import ThreadsEngine

__all__ = [
    "NO_OPTIONS",
    "Function",
    "InProgram",
    "OnOneDevice",
    "RunOptions",
    "SpmdEngine",
    "ThreadsEngine",
    "UpdatePlacement",
    "function",
    "is_argument",
    "joined",
    "with_step_axis",
]
