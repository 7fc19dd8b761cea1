"""What a compiled program sends, read from its HLO text.

The text is XLA's own description of the program after all optimisation: what is combined, or has
been left out, shows as it runs.
"""

from __future__ import annotations

import collections
import math
import re
from dataclasses import dataclass

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_FORM = re.compile(r"(\w+)\[([\d,]*)\]")
_DTYPE = re.compile(r"(bf|f|s|u|c)(\d+)(\w*)")
_KINDS = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True)
class Form:
    """Dtype and shape of an array that a replica sends.

    >>> str(Form("float32", (2, 3), 24))
    'float32[2,3]'
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Sent:
    """One kind of message of a step.

    Attributes:
      kind: the collective as XLA names it, ``"all-reduce"`` for one, or a copy between devices.
      forms: the arrays that each replica brings to it.
      count: how often it stands in the program.
      in_loop: whether it stands in a loop, and is then sent each time round.
    """

    kind: str
    forms: tuple[Form, ...]
    count: int = 1
    in_loop: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that a replica brings, or that are copied, all ``count`` times together."""
        return self.count * sum(form.nbytes for form in self.forms)


def collectives(text: str) -> tuple[Sent, ...]:
    """Return the collectives of a program, equal ones counted, in the order in which they stand.

    >>> found = collectives('''ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %sum = f32[4]{0} all-reduce(%p), channel_id=1, to_apply=%add
    ... }''')
    >>> [(each.kind, str(each.forms[0]), each.nbytes) for each in found]
    [('all-reduce', 'float32[4]', 16)]
    """
    lines_of = _computations(text)
    types: dict[str, str] = {}
    for lines in lines_of.values():
        for line in lines:
            if definition := _DEFINITION.match(line):
                types[definition[1]] = definition[2].partition("(")[0]
    in_loops = _in_loops(lines_of)
    found: collections.Counter[Sent] = collections.Counter()
    for computation, lines in lines_of.items():
        for line in lines:
            if collective := _COLLECTIVE.search(line):
                operands = line[collective.end() :].partition("), ")[0]
                forms = [_form(types[name]) for name in _NAME.findall(operands)]
                found[Sent(collective[1], tuple(forms), 1, computation in in_loops)] += 1
    return tuple(Sent(each.kind, each.forms, count, each.in_loop) for each, count in found.items())


def _computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation of a program by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            lines = found[start[1]] = []
        else:
            lines.append(line)
    return found


def _in_loops(lines_of: dict[str, list[str]]) -> set[str]:
    """Return the computations that loops run, by themselves or through others."""
    waiting = [
        name
        for lines in lines_of.values()
        for line in lines
        for name in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)
    ]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in lines_of and name not in found:
            found.add(name)
            waiting += [called for line in lines_of[name] for called in _NAME.findall(line)]
    return found


def _form(type_text: str) -> Form:
    match = _FORM.search(type_text)
    if match is None:
        return Form(type_text.strip(), (), 0)
    shape = tuple(int(length) for length in match[2].split(",") if length)
    dtype = _DTYPE.fullmatch(match[1])
    if dtype is None:
        name, bits = ("bool", 8) if match[1] == "pred" else (match[1], 8)
    else:
        bits = int(dtype[2])
        name = f"{_KINDS[dtype[1]]}{bits}{'_' if dtype[3] else ''}{dtype[3]}"
    return Form(name, shape, -(-math.prod(shape) * bits // 8))
