"""The program of a replica as a list of stretches between its meetings with the others.

A meeting is a collective over the replicas. Programs that were traced for different shapes meet in
the same order, if the user's function does not branch on shapes around its collectives.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from distrib.collectives import ONE_SUM_NAMES, is_one_sum
from distrib.engines.varying import mentions, sub_jaxpr
from distrib.errors import UnevenReplicasError
from distrib.platform.jax_compat import bind_equation, jaxpr_function
from distrib.platform.mesh import REPLICA_AXIS

_COLLECTIVES = (
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "ppermute",
    "all_to_all",
    "reduce_scatter",
)
_LOOPS = ("scan", "while", "cond")


def is_meeting(equation: Any) -> bool:
    """Tell whether an equation is a collective over the replicas."""
    if is_one_sum(equation):
        return True
    if equation.primitive.name not in _COLLECTIVES:
        return False
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    return axes == REPLICA_AXIS or (isinstance(axes, tuple | list) and REPLICA_AXIS in axes)


def replica_groups(meeting: Any) -> Sequence[Sequence[int]] | None:
    """Return the groups of replicas among which a meeting is held; None for all of them."""
    return meeting.params.get("axis_index_groups")


def is_sum(equation: Any) -> bool:
    """Tell whether a meeting adds the values of the replicas."""
    return is_one_sum(equation) or equation.primitive.name in ("psum", "psum_invariant")


def _contains_meeting(equation: Any) -> bool:
    return any(mentions(equation, name) for name in (*_COLLECTIVES, *ONE_SUM_NAMES))


def acts(equation: Any) -> bool:
    """Tell whether an equation does something beside computing its results, such as printing.

    To depend on the mesh axis counts as an effect for JAX; it is none that anybody sees.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def is_literal(atom: Any) -> bool:
    """Tell whether an operand is a constant that stands in the equation."""
    return hasattr(atom, "val")


@dataclass(frozen=True)
class Stretches:
    """A jaxpr, cut at its meetings.

    Attributes:
      jaxpr: the whole, closed; its meetings stand at the top level.
      stretches: the equations before the first meeting, between meetings, and after the last.
      meetings: the collectives, one fewer than there are stretches.
    """

    jaxpr: Any
    stretches: tuple[tuple[Any, ...], ...]
    meetings: tuple[Any, ...]

    @property
    def inputs(self) -> Sequence[Any]:
        """The variables of the inputs."""
        return self.jaxpr.jaxpr.invars

    @property
    def outputs(self) -> Sequence[Any]:
        """The atoms of the outputs."""
        return self.jaxpr.jaxpr.outvars

    def constants(self) -> dict[Any, Any]:
        """Return the values of the constants."""
        return dict(zip(self.jaxpr.jaxpr.constvars, self.jaxpr.consts, strict=True))


def cut(closed: Any, num_replicas: int) -> Stretches:
    """Cut a program at its meetings, those inside of calls included.

    Raises:
      UnevenReplicasError: if a loop or a conditional contains a meeting.
    """
    while any(_is_call_with_meeting(e) for e in closed.jaxpr.eqns):
        closed = jax.make_jaxpr(_inlining(closed), axis_env=[(REPLICA_AXIS, num_replicas)])(
            *[
                jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
                for a in closed.in_avals
            ]
        )
    stretches: list[list[Any]] = [[]]
    meetings = []
    for equation in closed.jaxpr.eqns:
        if is_meeting(equation):
            meetings.append(equation)
            stretches.append([])
        else:
            stretches[-1].append(equation)
    return Stretches(closed, tuple(tuple(s) for s in stretches), tuple(meetings))


def _is_call_with_meeting(equation: Any) -> bool:
    if is_meeting(equation) or not _contains_meeting(equation):
        return False
    inner = sub_jaxpr(equation)
    if equation.primitive.name in _LOOPS or inner is None:
        raise UnevenReplicasError(
            "The replicas have batches of unequal sizes, and the step has a collective inside of a "
            f"{equation.primitive.name}: they cannot be brought together there. Pass "
            'drop_remainder=True or InputOptions(last_batch="drop") or "pad", and choose a batch '
            "size that divides over the replicas."
        )
    return True


def _inlining(closed: Any) -> Callable[..., list[Any]]:
    """Return the function of a jaxpr that takes calls with meetings apart, one level of them."""

    def evaluate(*inputs: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            operands = [look_up(values, atom) for atom in equation.invars]
            if _is_call_with_meeting(equation):
                inner = sub_jaxpr(equation)
                constants = getattr(_closed(equation), "consts", [])
                call = jaxpr_function(ClosedJaxpr(inner, constants))
                results = call(*operands[len(operands) - len(inner.invars) :])
            else:
                results = bind_equation(equation, operands)
            values.update(zip(equation.outvars, results, strict=True))
        return [look_up(values, atom) for atom in jaxpr.outvars]

    return evaluate


def _closed(equation: Any) -> Any:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            return equation.params[name]
    return None


def look_up(values: dict[Any, Any], atom: Any) -> Any:
    """Return the value of an operand."""
    return atom.val if is_literal(atom) else values[atom]


def needed(stretches: Stretches, outputs: Sequence[Any]) -> set[Any]:
    """Return the variables on which some outputs and all meetings depend."""
    wanted = {atom for atom in outputs if not is_literal(atom)}
    for index in range(len(stretches.stretches) - 1, -1, -1):
        for equation in reversed(stretches.stretches[index]):
            if acts(equation) or any(v in wanted for v in equation.outvars):
                wanted.update(a for a in equation.invars if not is_literal(a))
        if index:
            wanted.update(a for a in stretches.meetings[index - 1].invars if not is_literal(a))
    return wanted


def divisions(stretches: Stretches, by: int) -> list[tuple[int, int]]:
    """Return the places, stretch and equation, where something is divided by the number ``by``."""
    return [
        (i, j)
        for i, stretch in enumerate(stretches.stretches)
        for j, equation in enumerate(stretch)
        if equation.primitive.name == "div"
        and is_literal(equation.invars[1])
        and float(equation.invars[1].val) == by
    ]


class Direction(enum.Enum):
    """Which way a mean over the replicas goes in a sum."""

    FORWARD = "forward"
    """The sum is divided by the number of replicas."""
    BACKWARD = "backward"
    """What is summed has been divided: the gradient of a mean."""
    SHARED_OUT = "shared out"
    """A gradient of which each replica is to get the share of its own examples."""


def means(
    stretches: Stretches, places: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], Direction]:
    """Return the sums over the replicas that are steps of means, as `jax.lax.pmean` makes them.

    A mean is a sum that is divided by the number of replicas, and nothing else is made of the sum;
    its gradient is the sum of something divided by that number.

    Args:
      stretches: the program.
      places: where it divides by the number of replicas.

    Returns:
      Meetings and their operands, by position, and which way each goes.
    """
    dividing = [stretches.stretches[i][j] for i, j in places]
    found = {}
    for index, meeting in enumerate(stretches.meetings):
        if meeting.primitive.name in ("psum", "psum_invariant"):
            for operand in range(len(meeting.invars)):
                direction = _direction(stretches, meeting, operand, dividing)
                if direction is not None:
                    found[index, operand] = direction
    return found


def _direction(
    stretches: Stretches, meeting: Any, operand: int, dividing: list[Any]
) -> Direction | None:
    def divides(equation: Any) -> bool:
        return any(equation is other for other in dividing)

    equations = [e for stretch in stretches.stretches for e in stretch]
    total, summand = meeting.outvars[operand], meeting.invars[operand]
    users = [e for e in (*equations, *stretches.meetings) if total in _variables(e)]
    if users and total not in _output_variables(stretches):
        if all(divides(e) and e.invars[0] is total for e in users):
            return Direction.FORWARD
    makers = [e for e in equations if any(v is summand for v in e.outvars)]
    users = [e for e in (*equations, *stretches.meetings) if summand in _variables(e)]
    if len(makers) == 1 and divides(makers[0]) and len(users) == 1:
        return Direction.BACKWARD
    return None


def _variables(equation: Any) -> list[Any]:
    return [a for a in equation.invars if not is_literal(a)]


def _output_variables(stretches: Stretches) -> list[Any]:
    return [a for a in stretches.outputs if not is_literal(a)]


def check_same_meetings(cuts: Sequence[Stretches], shapes: Sequence[str]) -> None:
    """Check that programs that were traced for different shapes meet at the same collectives.

    Args:
      cuts: the programs.
      shapes: what each was traced for, for messages.

    Raises:
      UnevenReplicasError: naming the shapes and the collectives.
    """
    first = cuts[0]
    for other, shown in zip(cuts[1:], shapes[1:], strict=True):
        who = f"Replicas with arguments of shapes {shapes[0]} and {shown} meet at"
        for mine, theirs in zip(first.meetings, other.meetings, strict=False):
            if _described(mine) != _described(theirs):
                raise UnevenReplicasError(
                    f"{who} different collectives: {_described(mine)} and {_described(theirs)}. A "
                    "collective needs equal shapes on all replicas: reduce over the batch first."
                )
        if len(first.meetings) != len(other.meetings):
            raise UnevenReplicasError(
                f"{who} {len(first.meetings)} and {len(other.meetings)} collectives: one would "
                "wait for ever."
            )


def _described(meeting: Any) -> str:
    forms = ", ".join(f"{a.aval.dtype}{list(a.aval.shape)}" for a in meeting.invars)
    return f"{meeting.primitive.name}({forms})"
