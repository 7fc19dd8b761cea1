"""What a step reads, writes, takes, returns, sends and compiles to, as plain data."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from distrib import render
from distrib.engines.deferred_updates import updated_variables
from distrib.engines.hlo import Form, Sent, collectives
from distrib.engines.lift import Lifted
from distrib.engines.nnx_objects import is_nnx_object
from distrib.engines.signature import Kind, traced_form
from distrib.platform import leaves_with_paths, short_device_string
from distrib.variables import Variable

_KINDS = {
    Kind.SPLIT: "a part for each replica",
    Kind.UNEVEN: "a part for each replica, of unequal shapes",
    Kind.EVERYWHERE: "the same on every replica",
    Kind.OBJECT: "a constant of the program",
}


@dataclass(frozen=True)
class VariableUse:
    """A variable that a step reads or writes.

    Attributes:
      name: its name.
      form: dtype, shape and bytes of one copy.
      lives: where the copies are.
      aggregation: how what the replicas assign is combined, or what they hold.
      synchronization: when the copies are brought together.
    """

    name: str
    form: Form
    lives: str
    aggregation: str
    synchronization: str


@dataclass(frozen=True)
class Taken:
    """An argument of a step.

    Attributes:
      path: where it stands, ``args[0]['image']`` for one.
      kind: how it enters the program.
      forms: dtype, shape and bytes that a replica sees: of each replica, if they differ; none of a
        Python object.
    """

    path: str
    kind: str
    forms: tuple[Form, ...]


@dataclass(frozen=True)
class Returned:
    """An output of a step: where it stands, and what one replica returns there."""

    path: str
    form: Form | None
    value: str = ""


@dataclass(frozen=True)
class Memory:
    """What the program needs on each device, in bytes, as XLA has planned it."""

    arguments: int
    outputs: int
    donated: int
    temporary: int


@dataclass(frozen=True)
class StepUse:
    """What a step does with variables and what it returns, known when it is traced.

    Attributes:
      reads: the variables on whose old values something depends.
      writes: the variables that it changes.
      returns: describes what one replica returns, that of the most examples where they differ.
        Called for an explanation only: it builds the user's tree of forms instead of arrays.
      copies: what is copied between devices before and after the program.
      num_programs: how many programs a call runs.
    """

    reads: tuple[VariableUse, ...]
    writes: tuple[VariableUse, ...]
    returns: Callable[[], tuple[Returned, ...]]
    copies: tuple[Sent, ...]
    num_programs: int


@dataclass(frozen=True)
class Explanation:
    """What a step reads, writes, takes, returns, sends and compiles to.

    Printed, it is a table for each of them; a notebook shows them as HTML.

    Attributes:
      name: the function, with the line where it is defined.
      devices: the devices that the program runs on, a replica on each.
      reads: the variables on whose old values something depends.
      writes: the variables that it changes.
      takes: the arguments.
      returns: what one replica returns, that of the most examples where they differ.
      sends: the collectives of the program, and copies between devices.
      num_programs: how many programs a call runs: one, and one more where updates are applied on a
        device of their own.
      memory: what the program needs on each device; None if XLA does not say.
      flops: floating-point operations on each device as XLA counts them; None if it does not.
      hlo_lines: the length of the compiled program.
    """

    name: str
    devices: tuple[str, ...]
    reads: tuple[VariableUse, ...]
    writes: tuple[VariableUse, ...]
    takes: tuple[Taken, ...]
    returns: tuple[Returned, ...]
    sends: tuple[Sent, ...]
    num_programs: int
    memory: Memory | None
    flops: float | None
    hlo_lines: int

    @property
    def sent_bytes(self) -> int:
        """The bytes that a replica brings to collectives, and those copied between devices.

        What stands in a loop counts once.
        """
        return sum(sent.nbytes for sent in self.sends)

    @property
    def donated_bytes(self) -> int:
        """The bytes on each device that new values take over from old ones."""
        return 0 if self.memory is None else self.memory.donated

    def __str__(self) -> str:
        return render.as_text(self._heading, self._tables())

    def _repr_html_(self) -> str:
        return render.as_html(self._heading, self._tables())

    @property
    def _heading(self) -> str:
        count = len(self.devices)
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        return f"{self.name}, {replicas} on {', '.join(self.devices)}"

    def _tables(self) -> list[render.Table]:
        arguments = tuple(
            (each.path, " ".join(map(str, each.forms)) or "object", each.kind)
            for each in self.takes
        )
        outputs = tuple(
            (each.path, each.value if each.form is None else str(each.form))
            for each in self.returns
        )
        sent = tuple(
            (
                f"{each.kind}, in a loop" if each.in_loop else each.kind,
                each.count,
                ", ".join(map(str, each.forms)),
                each.nbytes,
            )
            for each in self.sends
        )
        count = sum(each.count for each in self.sends)
        messages = f", in {count} message{'' if count == 1 else 's'}" if count else ""
        return [
            _variables("reads", self.reads),
            _variables("writes", self.writes),
            render.Table("takes", ("argument", "in a replica", "kind"), arguments),
            render.Table("returns", ("output", "of a replica"), outputs),
            render.Table(
                f"sends {self.sent_bytes:,} bytes{messages}",
                ("what", "count", "arrays of a replica", "bytes"),
                sent,
            ),
            self._compiled(),
        ]

    def _compiled(self) -> render.Table:
        rows: list[tuple[str | int, ...]] = [("lines of HLO", self.hlo_lines)]
        if self.memory is not None:
            rows += [
                ("bytes of arguments, on each device", self.memory.arguments),
                ("bytes of outputs", self.memory.outputs),
                ("bytes of them in place of arguments (donated)", self.memory.donated),
                ("bytes in between", self.memory.temporary),
            ]
        if self.flops is not None:
            rows.append(("floating-point operations, on each device", round(self.flops)))
        programs = "1 program" if self.num_programs == 1 else f"{self.num_programs} programs"
        return render.Table(f"compiles to {programs}", ("program of the step", ""), tuple(rows))


def _variables(title: str, uses: Sequence[VariableUse]) -> render.Table:
    total = sum(use.form.nbytes for use in uses)
    count = f"{len(uses)} variable{'' if len(uses) == 1 else 's'}, {total:,} bytes a copy"
    rows = tuple(
        (use.name, str(use.form), use.form.nbytes, use.lives, use.synchronization, use.aggregation)
        for use in uses
    )
    columns = ("variable", "value", "bytes", "lives", "synchronization", "aggregation")
    return render.Table(f"{title} {count if uses else 'nothing'}", columns, rows)


def use_of(lifted: Lifted, mesh: Mesh, *, applied_elsewhere: bool) -> StepUse:
    """Describe what a step does with variables and what it returns.

    Args:
      lifted: the step.
      mesh: where it runs.
      applied_elsewhere: whether its updates are applied by another program, where variables are.
    """
    updated = updated_variables(lifted.updates)
    written = list({id(v): v for v in (*lifted.writes, *updated)}.values())
    written_here = {id(v) for v in lifted.writes}
    fetched = [v for v in lifted.reads if id(v) not in written_here and not _lives_on(v, mesh)]
    results = lifted.jaxpr.out_avals
    first = lifted.num_outputs + len(lifted.nnx_changes)
    operands = results[first : len(results) - len(lifted.writes)]
    copies = []
    if fetched:
        copies.append(Sent("copy to the replicas", tuple(map(_form, fetched)), mesh.devices.size))
    if applied_elsewhere:
        back = tuple(map(_form, operands))
        copies.append(Sent("copy to the device of the variables", back))
    return StepUse(
        reads=tuple(map(_use, lifted.reads)),
        writes=tuple(map(_use, written)),
        # Not the lifted step itself, which would keep its variables alive.
        returns=functools.partial(
            _returned, lifted.output, tuple(lifted.jaxpr.out_avals[: lifted.num_outputs])
        ),
        copies=tuple(copies),
        num_programs=2 if applied_elsewhere else 1,
    )


def _lives_on(variable: Variable, mesh: Mesh) -> bool:
    return variable.distribute_strategy.extended.lives_on(mesh)


def _form(value: Any) -> Form:
    return Form(str(value.dtype), value.shape, math.prod(value.shape) * value.dtype.itemsize)


def _use(variable: Variable) -> VariableUse:
    devices = variable.storage.cell.array.sharding.device_set
    if len(devices) == 1:
        lives = f"on {short_device_string(next(iter(devices)))}"
    elif variable.storage.per_replica:
        lives = f"one of its own on each of {len(devices)} devices"
    else:
        lives = f"a copy on each of {len(devices)} devices"
    return VariableUse(
        variable.name,
        _form(variable),
        lives,
        variable.aggregation.name,
        variable.synchronization.name,
    )


def _returned(output: Callable[[Sequence[Any]], Any], avals: Sequence[Any]) -> tuple[Returned, ...]:
    result = output([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])
    found = leaves_with_paths({"output": result}, is_leaf=lambda leaf: isinstance(leaf, Variable))
    return tuple(
        Returned(path, None, f"variable {leaf.name}")
        if isinstance(leaf, Variable)
        else Returned(path, _form(leaf))
        if hasattr(leaf, "dtype")
        else Returned(path, None, repr(leaf))
        for path, leaf in found
    )


def taken(
    paths: Sequence[str], leaves: Sequence[Any], keys: Sequence[tuple[Kind, Any]]
) -> tuple[Taken, ...]:
    """Describe the arguments of a call.

    Args:
      paths: where each leaf stands.
      leaves: the leaves.
      keys: how each enters the program.
    """
    found = []
    for path, leaf, (kind, key) in zip(paths, leaves, keys, strict=True):
        shown, forms = _KINDS[kind], ()
        if kind is Kind.UNEVEN:
            forms = tuple(_form(jax.ShapeDtypeStruct(*each)) for each in key[1])
        elif kind is not Kind.OBJECT:
            forms = (_form(traced_form(leaf, key)),)
        elif is_nnx_object(leaf):
            shown = f"NNX {type(leaf).__name__}, changed in place"
        elif isinstance(leaf, Variable):
            shown = f"variable {leaf.name}"
        found.append(Taken(path, shown, forms))
    return tuple(found)


def explained(
    fn: Callable[..., Any], mesh: Mesh, use: StepUse, takes: tuple[Taken, ...], compiled: Any
) -> Explanation:
    """Describe a compiled step.

    Args:
      fn: the function of the step.
      mesh: where it runs.
      use: what it does with variables, and returns.
      takes: its arguments.
      compiled: the program.
    """
    text = compiled.as_text()
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    flops = costs.get("flops") if isinstance(costs, dict) else None
    return Explanation(
        name=_name(fn),
        devices=tuple(short_device_string(device) for device in mesh.devices.flat),
        reads=use.reads,
        writes=use.writes,
        takes=takes,
        returns=use.returns(),
        # A collective of one replica stays in the program, and sends nothing.
        sends=(*(collectives(text) if mesh.devices.size > 1 else ()), *use.copies),
        num_programs=use.num_programs,
        memory=None
        if memory is None
        else Memory(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
        ),
        # XLA says -1 where it does not know.
        flops=flops if flops is not None and flops >= 0 else None,
        hlo_lines=len(text.splitlines()),
    )


def _name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    code = getattr(fn, "__code__", None)
    if code is None:
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
