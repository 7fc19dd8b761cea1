"""Variables, and the places where their values live."""

from distrib.variables.change import ADDING_SCATTERS, change_name, combined, share_of_total
from distrib.variables.component import Component, Copies, owner_of
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
from distrib.variables.variable import (
    Variable,
    check_not_jitted,
    is_variable,
    live_variables,
)
from distrib.variables.variable_tree import VariableTree

__all__ = [
    "ADDING_SCATTERS",
    "Cell",
    "Component",
    "Copies",
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
    "change_name",
    "changes_held",
    "check_not_jitted",
    "combined",
    "is_variable",
    "live_variables",
    "own_copy",
    "share_of_total",
    "owner_of",
]
