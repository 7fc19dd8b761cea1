"""Which results of a replica's program may differ by replica.

A forward pass over the jaxpr: a result varies if one of its operands does, unless it comes out of a
collective over all replicas. Where a sub-program cannot be followed, the answer is yes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distrib.collectives import is_one_sum

_MEETINGS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
_LOOPS = {"scan", "while", "cond"}


def varying_outputs(jaxpr: Any, inputs: Sequence[bool], axis: str) -> list[bool]:
    """Tell for each output of ``jaxpr`` whether replicas may see different values.

    Args:
      jaxpr: the program of a replica.
      inputs: for each input, whether it differs by replica.
      axis: the mesh axis of the replicas.
    """
    varies: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))

    def look_up(atom: Any) -> bool:
        return not hasattr(atom, "val") and varies.get(atom, False)

    for equation in jaxpr.eqns:
        operands = [look_up(atom) for atom in equation.invars]
        results = _results(equation, operands, axis)
        varies.update(zip(equation.outvars, results, strict=True))
    return [look_up(atom) for atom in jaxpr.outvars]


def _results(equation: Any, operands: list[bool], axis: str) -> list[bool]:
    name = equation.primitive.name
    count = len(equation.outvars)
    if name == "axis_index":
        return [equation.params.get("axis_name") == axis] * count
    equal = equal_everywhere(equation, axis)
    if any(equal):
        return [not is_equal for is_equal in equal]
    if name == "cond" and not operands[0]:
        branches = [getattr(branch, "jaxpr", branch) for branch in equation.params["branches"]]
        per_branch = [varying_outputs(branch, operands[1:], axis) for branch in branches]
        return [any(results) for results in zip(*per_branch, strict=True)]
    inner = sub_jaxpr(equation)
    if inner is not None and name not in _LOOPS and len(inner.invars) == len(operands):
        return varying_outputs(inner, operands, axis)
    if inner is not None or name in _LOOPS:
        return (
            [True] * count if any(operands) or mentions(equation, "axis_index") else [False] * count
        )
    return [any(operands)] * count


def equal_everywhere(equation: Any, axis: str) -> list[bool]:
    """Tell for each result of an equation whether a collective makes it equal on all replicas."""
    count = len(equation.outvars)
    if is_one_sum(equation):
        return [True, False][:count]
    if equation.primitive.name not in _MEETINGS:
        return [False] * count
    if equation.params.get("axis_index_groups") is not None:
        return [False] * count
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    return [axes == axis or (isinstance(axes, tuple | list) and axis in axes)] * count


def sub_jaxpr(equation: Any) -> Any:
    """Return the program that an equation calls, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def mentions(equation: Any, primitive: str) -> bool:
    """Tell whether an equation is ``primitive``, or calls a program that contains it."""
    if equation.primitive.name == primitive:
        return True
    for value in equation.params.values():
        for candidate in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(candidate, "jaxpr", candidate)
            if hasattr(inner, "eqns") and any(mentions(e, primitive) for e in inner.eqns):
                return True
    return False


def calls_back(jaxpr: Any) -> bool:
    """Tell whether a program calls functions of the host while it runs."""
    names = ("pure_callback", "io_callback", "debug_callback", "debug_print")
    return any(mentions(equation, name) for equation in jaxpr.eqns for name in names)


def used_inputs(jaxpr: Any) -> list[bool]:
    """Tell for each input of a program whether an output or an effect depends on it."""
    wanted = {atom for atom in jaxpr.outvars if not hasattr(atom, "val")}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in wanted for v in equation.outvars):
            wanted.update(atom for atom in equation.invars if not hasattr(atom, "val"))
    return [v in wanted for v in jaxpr.invars]
