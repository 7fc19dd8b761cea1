"""Where code runs: the stack of contexts and the questions about it."""

from distrib.context.queries import (
    current_program,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    require_cross_replica_context,
    require_same_strategy,
)
from distrib.context.replica_context import ReplicaContext, ReplicaMeeting
from distrib.context.stack import (
    CanBeCurrent,
    Frame,
    ReplicaProgram,
    current_frame,
    default_frame,
    entered,
    inside_scope,
    set_base,
    set_default,
)

__all__ = [
    "CanBeCurrent",
    "Frame",
    "ReplicaContext",
    "ReplicaMeeting",
    "ReplicaProgram",
    "current_frame",
    "current_program",
    "default_frame",
    "entered",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "inside_scope",
    "require_cross_replica_context",
    "require_same_strategy",
    "set_base",
    "set_default",
]
