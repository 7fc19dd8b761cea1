"""Variables, and the places where their values live."""

from distrib.variables.holder import HoldsVariables
from distrib.variables.sharded_storage import ShardedStorage
from distrib.variables.storage import (
    Cell,
    LentCells,
    MirroredStorage,
    OnReadStorage,
    PlacedStorage,
    Storage,
    cells_held,
    changes_held,
    own_copy,
)
from distrib.variables.synchronization import VariableAggregation, VariableSynchronization
from distrib.variables.variable import Variable, is_variable, live_variables
from distrib.variables.variable_tree import VariableTree

__all__ = [
    "Cell",
    "HoldsVariables",
    "LentCells",
    "MirroredStorage",
    "OnReadStorage",
    "PlacedStorage",
    "ShardedStorage",
    "Storage",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "VariableTree",
    "cells_held",
    "changes_held",
    "is_variable",
    "live_variables",
    "own_copy",
]
