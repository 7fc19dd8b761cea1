"""The programs of several groups of replicas, which see different shapes, as one program.

Between two collectives every replica runs, by a `jax.lax.switch`, the stretch of its own group's
program. What depends on nothing but variables and results of collectives is computed outside of the
switch, once for all, so that copies of variables stay equal bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distrib.engines.grouped_outputs import finisher
from distrib.engines.groups import Forms, Group, Lift
from distrib.engines.lift import stand_in
from distrib.engines.lowering import Leaf
from distrib.engines.meetings import (
    Direction,
    acts,
    check_same_meetings,
    cut,
    is_literal,
    is_sum,
    look_up,
    needed,
    replica_groups,
)
from distrib.engines.replica_means import find_means, means_over_groups
from distrib.engines.signature import Kind
from distrib.engines.spmd import entered_form
from distrib.engines.varying import equal_everywhere, mentions
from distrib.platform.jax_compat import bind_equation
from distrib.platform.mesh import REPLICA_AXIS


class Together:
    """The programs of several groups of replicas as one program.

    Args:
      groups: the groups, that of the most examples first.
      group_of: the group of each replica.
      leaves: how the arguments enter.
      lift: traces the step.
      on_cpu: whether the replicas run on CPU devices.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        group_of: Sequence[int],
        leaves: Sequence[Leaf],
        lift: Lift,
        *,
        on_cpu: bool,
    ):
        self._size = len(group_of)
        self._on_cpu = on_cpu
        self._groups = groups
        self._steps = [group.step for group in groups]
        self._group_of = group_of
        self._examples = [groups[g].examples for g in group_of]
        self._leaves = leaves
        self._cuts = [cut(step.jaxpr, self._size) for step in self._steps]
        check_same_meetings(self._cuts, [_shown(group.forms) for group in groups])
        shapes = [
            {group.output_shape(i) for group in groups} for i in range(self._steps[0].num_outputs)
        ]
        self._uniform = [len(different) == 1 for different in shapes]
        self.output_shapes = [
            different.pop() if len(different) == 1 else None for different in shapes
        ]
        over_groups = means_over_groups(self._cuts)
        self._means = [
            find_means(cuts, group, lift, over_groups)
            for cuts, group in zip(self._cuts, groups, strict=True)
        ]
        self._all_common = self._find_common()
        self._wanted = [self._find_wanted(g) for g in range(len(groups))]
        self._accumulated = [self._find_accumulated(g) for g in range(len(groups))]

    def body(self, values: dict[int, Any], arrays: list, nnx: list) -> tuple[list, list, list]:
        """Run the program of a replica, whichever its group."""
        group = jnp.asarray(self._group_of)[jax.lax.axis_index(REPLICA_AXIS)]
        environments = [self._inputs(g, values, arrays, nnx) for g in range(len(self._steps))]
        last = len(self._cuts[0].stretches) - 1
        for index in range(last):
            self._run_common(index, environments[0])
            self._run_stretch(index, group, environments)
        self._run_common(last, environments[0])
        return self._results(last, group, environments)

    def _inputs(self, g: int, values: dict[int, Any], arrays: list, nnx: list) -> dict[Any, Any]:
        inputs = []
        for array, leaf, form in zip(arrays, self._leaves, self._groups[g].forms, strict=True):
            if leaf.kind is Kind.UNEVEN:
                inputs.append(array[0][tuple(slice(0, d) for d in form.shape)])
            else:
                inputs.append(entered_form(array, leaf))
        inputs += nnx
        inputs += [
            values[id(v)] if id(v) in values else stand_in(v) for v in self._steps[g].variables
        ]
        environment = self._cuts[g].constants()
        environment.update(zip(self._cuts[g].inputs, inputs, strict=True))
        return environment

    def _common_inputs(self) -> set[Any]:
        """Return the inputs of the first group's program that are equal on every replica."""
        step, cuts = self._steps[0], self._cuts[0]
        differs = [leaf.kind is not Kind.EVERYWHERE for leaf in self._leaves]
        differs += [False] * step.num_nnx
        differs += [v.storage.per_replica for v in step.variables]
        equal = {v for v, d in zip(cuts.inputs, differs, strict=True) if not d}
        return equal | set(cuts.constants())

    def _find_wanted(self, g: int) -> set[Any]:
        """Return what group ``g`` must compute: outputs, and what it brings to meetings.

        New values of variables that are equal everywhere are taken from the first group's program.
        """
        cuts, step = self._cuts[g], self._steps[g]
        outputs = list(cuts.outputs[: step.num_outputs])
        outputs += [
            mine
            for mine, first in zip(
                cuts.outputs[step.num_outputs :],
                self._cuts[0].outputs[step.num_outputs :],
                strict=True,
            )
            if g == 0 or not self._is_common_output(first)
        ]
        return needed(cuts, outputs)

    def _find_accumulated(self, g: int) -> set[Any]:
        """Return what group ``g`` computes out of its accumulators.

        It holds the examples of earlier steps: replicas bring and keep it that have none in this.
        """
        step, cuts = self._steps[g], self._cuts[g]
        accumulators = {id(v) for v in step.accumulators}
        inputs = cuts.inputs[len(cuts.inputs) - len(step.variables) :]
        found = {x for x, v in zip(inputs, step.variables, strict=True) if id(v) in accumulators}
        for equation in (e for stretch in cuts.stretches for e in stretch):
            if any(not is_literal(atom) and atom in found for atom in equation.invars):
                found.update(equation.outvars)
        return found

    def _is_common_output(self, atom: Any) -> bool:
        return is_literal(atom) or atom in self._all_common

    def _find_common(self) -> set[Any]:
        """Return all variables of the first group's program that are equal on every replica."""
        common = self._common_inputs()
        for index, stretch in enumerate(self._cuts[0].stretches):
            for equation in stretch:
                if _depends_only_on(equation, common):
                    common.update(equation.outvars)
            if index < len(self._cuts[0].meetings):
                meeting = self._cuts[0].meetings[index]
                equal = equal_everywhere(meeting, REPLICA_AXIS)
                common.update(
                    variable
                    for i, variable in enumerate(meeting.outvars)
                    if equal[i] and self._means[0].get((index, i)) is not Direction.SHARED_OUT
                )
        return common

    def _run_common(self, index: int, environment: dict[Any, Any]) -> None:
        for equation in self._cuts[0].stretches[index]:
            if _depends_only_on(equation, self._all_common):
                _run(equation, environment)

    def _run_stretch(
        self,
        index: int,
        group: Any,
        environments: list[dict[Any, Any]],
    ) -> None:
        """Run a stretch and the meeting after it."""
        kept = [
            [
                v
                for equation in cuts.stretches[index]
                for v in equation.outvars
                if v in self._wanted[g] and not (g == 0 and v in self._all_common)
            ]
            for g, cuts in enumerate(self._cuts)
        ]
        meetings = [cuts.meetings[index] for cuts in self._cuts]

        def brings(g: int, values: dict[Any, Any]) -> list[Any]:
            return [
                self._counted(g, index, i, look_up(values, atom))
                for i, atom in enumerate(meetings[g].invars)
            ]

        results, brought = self._switch(index, group, environments, kept, brings)
        for environment, variables, new in zip(environments, kept, results, strict=True):
            environment.update(zip(variables, new, strict=True))
        met = bind_equation(meetings[0], brought)
        for g, (environment, meeting) in enumerate(zip(environments, meetings, strict=True)):
            results = [self._shared_out(g, index, i, result) for i, result in enumerate(met)]
            environment.update(zip(meeting.outvars, results, strict=True))

    def _switch(
        self,
        index: int,
        group: Any,
        environments: list[dict[Any, Any]],
        kept: list[list[Any]],
        returns: Callable[[int, dict[Any, Any]], list[Any]],
    ) -> tuple[list[list[Any]], list[Any]]:
        """Run a stretch of each group's program on its replicas.

        Returns:
          For each group the values that it keeps, which are zeros on the replicas of others; and
          what ``returns`` gives, of which every replica has its own.
        """
        groups = range(len(self._steps))

        def values_of(g: int) -> dict[Any, Any]:
            values = dict(environments[g])
            for equation in self._equations(g, index):
                _run(equation, values)
            return values

        def branch(g: int) -> Any:
            values = values_of(g)
            own = [
                [values[v] if h == g else jnp.zeros(v.aval.shape, v.aval.dtype) for v in kept[h]]
                for h in groups
            ]
            return own, returns(g, values)

        if self._compute_all(index):
            everything = [values_of(g) for g in groups]
            own = [[everything[g][v] for v in kept[g]] for g in groups]
            candidates = zip(*(returns(g, everything[g]) for g in groups), strict=True)
            return own, [jax.lax.select_n(group, *values) for values in candidates]
        return jax.lax.switch(group, [functools.partial(branch, g) for g in groups])

    def _equations(self, g: int, index: int) -> list[Any]:
        """Return what group ``g`` itself must compute in a stretch."""
        return [
            equation
            for equation in self._cuts[g].stretches[index]
            if (
                (acts(equation) and self._groups[g].takes_part)
                or any(v in self._wanted[g] for v in equation.outvars)
            )
            and not (g == 0 and _depends_only_on(equation, self._all_common))
        ]

    def _compute_all(self, index: int) -> bool:
        """Tell whether every replica computes all groups' stretches, and takes its own.

        On CPUs XLA compiles the gradient of a convolution inside of a conditional to code that was
        measured to be 13 times as slow (106 against 8 ms); to compute two or three of them is
        faster. Where a stretch has an effect, such as a print, only the replica's own may run.
        """
        equations = [e for g in range(len(self._steps)) for e in self._equations(g, index)]
        return (
            self._on_cpu
            and not any(acts(e) for e in equations)
            and any(mentions(e, "conv_general_dilated") for e in equations)
        )

    def _counted(self, g: int, index: int, operand: int, value: Any) -> Any:
        """Return what a replica of group ``g`` brings to a meeting."""
        meeting = self._cuts[g].meetings[index]
        if not self._groups[g].takes_part:
            atom = meeting.invars[operand]
            accumulated = not is_literal(atom) and atom in self._accumulated[g]
            return value if accumulated else _nothing_for(meeting.primitive.name, value)
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            return value
        direction = self._means[g].get((index, operand))
        if direction is not None:
            if self._groups[g].examples == 0 and direction is not Direction.SHARED_OUT:
                return jnp.zeros_like(value)
            if direction is Direction.SHARED_OUT:
                return value
            return value * self._share(meeting, jnp.result_type(value))
        if self._groups[g].examples == 0 and is_sum(meeting):
            return jnp.where(jnp.isnan(value), 0, value)
        return value

    def _shared_out(self, g: int, index: int, operand: int, result: Any) -> Any:
        """Return what a replica of group ``g`` gets of a sum over the replicas."""
        if self._means[g].get((index, operand)) is Direction.SHARED_OUT:
            meeting = self._cuts[g].meetings[index]
            return result * self._share(meeting, jnp.result_type(result))
        return result

    def _share(self, meeting: Any, dtype: Any) -> jax.Array:
        """Return the examples of this replica over the mean number of those that it meets."""
        shares = [0.0] * self._size
        for members in replica_groups(meeting) or [range(self._size)]:
            total = sum(self._examples[i] for i in members)
            for i in members:
                shares[i] = len(members) * self._examples[i] / max(total, 1)
        return jnp.asarray(shares, dtype)[jax.lax.axis_index(REPLICA_AXIS)]

    def _results(
        self,
        index: int,
        group: Any,
        environments: list[dict[Any, Any]],
    ) -> tuple[list, list, list]:
        """Run the last stretch and return outputs, what is equal everywhere, and new values."""
        step = self._steps[0]
        count = step.num_outputs
        first = self._cuts[0].outputs
        own = [i for i, uniform in enumerate(self._uniform) if uniform]
        own += [i for i in range(count, len(first)) if not self._is_common_output(first[i])]
        ragged = [i for i, uniform in enumerate(self._uniform) if not uniform]
        kept = [[cuts.outputs[i] for i in ragged] for cuts in self._cuts]

        def returns(g: int, values: dict[Any, Any]) -> list[Any]:
            if not self._groups[g].takes_part:
                return [self._left_alone(g, i, values) for i in own]
            outputs = self._cuts[g].outputs
            return [jnp.asarray(look_up(values, outputs[i]), first[i].aval.dtype) for i in own]

        rows, selected = self._switch(index, group, environments, kept, returns)
        chosen = dict(zip(own, selected, strict=True))
        outputs: list[Any] = []
        for i in range(count):
            if self._uniform[i]:
                outputs.append(chosen[i][None])
            else:
                outputs += [rows[g][ragged.index(i)][None] for g in range(len(self._cuts))]
        rest = [
            chosen[i]
            if i in chosen
            else jnp.asarray(look_up(environments[0], first[i]), first[i].aval.dtype)
            for i in range(count, len(first))
        ]
        split_at = len(rest) - len(step.writes)
        return outputs, rest[:split_at], rest[split_at:]

    def _left_alone(self, g: int, i: int, values: dict[Any, Any]) -> Any:
        """Return result ``i`` of a replica that takes no part.

        A variable or NNX array is what it was. An output that is the same on all replicas is that;
        another, which is a number made from no examples, is NaN, or 0 for integers.
        """
        step, cuts = self._steps[g], self._cuts[g]
        form = cuts.outputs[i].aval
        nnx_start = len(self._groups[g].forms)
        first_write = len(cuts.outputs) - len(step.writes)
        if i >= first_write:
            new = cuts.outputs[i]
            if not is_literal(new) and new in self._accumulated[g]:
                return values[new]
            written = id(step.writes[i - first_write])
            position = [id(v) for v in step.variables].index(written)
            return values[cuts.inputs[nnx_start + step.num_nnx + position]]
        if i >= step.num_outputs:
            return values[cuts.inputs[nnx_start + step.nnx_changes[i - step.num_outputs]]]
        if self._is_common_output(self._cuts[0].outputs[i]):
            return jnp.asarray(look_up(values, cuts.outputs[i]), form.dtype)
        nothing = jnp.nan if jnp.issubdtype(form.dtype, jnp.inexact) else 0
        return jnp.full(form.shape, nothing, form.dtype)

    def finish(self) -> Callable[[list], Any]:
        """Return the function that turns the outputs of the step into what ``run`` returns."""
        return finisher(self._groups, self._group_of, self._uniform)


def _nothing_for(collective: str, value: Any) -> Any:
    """Return what leaves the result of a collective as the other replicas make it."""
    value = jnp.asarray(value)
    if collective not in ("pmax", "pmin"):
        return jnp.zeros_like(value)
    inexact = jnp.issubdtype(value.dtype, jnp.inexact)
    limits = jnp.finfo(value.dtype) if inexact else jnp.iinfo(value.dtype)
    return jnp.full_like(value, limits.min if collective == "pmax" else limits.max)


def _run(equation: Any, environment: dict[Any, Any]) -> None:
    operands = [look_up(environment, atom) for atom in equation.invars]
    environment.update(zip(equation.outvars, bind_equation(equation, operands), strict=True))


def _depends_only_on(equation: Any, common: set[Any]) -> bool:
    if acts(equation) or mentions(equation, "axis_index"):
        return False
    return all(is_literal(atom) or atom in common for atom in equation.invars)


def _shown(forms: Forms) -> str:
    return ", ".join(f"{form.dtype}{list(form.shape)}" for form in forms)
