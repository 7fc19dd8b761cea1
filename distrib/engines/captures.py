"""The objects with variables that a function finds by itself: by name, attribute or key.

A program is made of the variables that the function found when it was traced. If ``state``, or
``self.state``, or ``models["a"]``, means another object at the next call, the program must be made
anew, or it would go on training the old one.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distrib.context import CanBeCurrent, default_frame
from distrib.engines.nnx_objects import is_nnx_object
from distrib.variables import HoldsVariables, Variable

_DEPTH = 4
_WIDTH = 100_000
# Nothing inside of these leads to a variable that a step could be made to find by another way.
_CLOSED = (types.ModuleType, type, jax.Array, np.ndarray, str, bytes, int, float, complex)
_LIBRARIES = ("distrib", "jax", "jaxlib", "flax", "optax", "numpy", "absl")


class Capture:
    """Some keys under which a function finds objects, and the objects that it found.

    Args:
      look_up: from a key to the object that stands there now; raises LookupError if there is none.
      keys: the keys.
    """

    __slots__ = ("_found", "_keys", "_look_up")

    def __init__(self, look_up: Callable[[Any], Any], keys: Sequence[Any]):
        self._look_up = look_up
        self._keys = tuple(keys)
        # Identities suffice: an object that dies takes its variables along, and these the program.
        self._found = tuple(map(id, map(look_up, self._keys)))

    def holds(self) -> bool:
        """Tell whether the same objects stand under the keys."""
        try:
            return tuple(map(id, map(self._look_up, self._keys))) == self._found
        except (AttributeError, LookupError, TypeError, ValueError):
            return False


def captures(fn: Callable[..., Any], arguments: Sequence[Any] = ()) -> list[Capture]:
    """Return the keys by which ``fn``, or a function of its module that it calls, finds variables.

    None of them keeps ``fn`` or an argument alive.

    Args:
      fn: a function, a method or another callable.
      arguments: objects that it is given and may search as well.
    """
    return _searched(fn, arguments).captures


def found_nnx_objects(fn: Callable[..., Any]) -> list[Any]:
    """Return the NNX objects that ``fn`` can reach without being given them."""
    return _searched(fn, ()).nnx_objects


def found_strategies(
    fn: Callable[..., Any] | None, objects: Sequence[Any] = ()
) -> tuple[list[Any], list[Capture]]:
    """Return the strategies that a function, or objects, lead to, and the keys of the way there.

    A variable leads to the strategy that it belongs to.
    """
    search = _searched(fn, objects)
    return list({id(s): s for s in search.strategies}.values()), search.captures


def _searched(fn: Callable[..., Any] | None, arguments: Sequence[Any]) -> _Search:
    search = _Search()
    if isinstance(fn, types.MethodType):
        # A bound method is made at each look-up; the instance and the function last.
        roots = [fn.__self__, fn.__func__, *arguments]
    else:
        roots = [*arguments] if fn is None else [fn, *arguments]
    for root in roots:
        try:
            search.leads_to_variables(weakref.ref(root), root, 0)
        except TypeError:
            continue  # What takes no weak reference is a plain value, and part of the signature.
    return search


class _Search:
    """A walk over the objects that a function can reach by names, attributes and keys."""

    def __init__(self) -> None:
        self.captures: list[Capture] = []
        self.nnx_objects: list[Any] = []
        self.strategies: list[Any] = []
        self._known: dict[int, bool] = {}
        self._kept: list[Any] = []

    def leads_to_variables(self, reach: Callable[[], Any], value: Any, depth: int) -> bool:
        """Tell whether variables are found in ``value``, and record by which keys.

        Args:
          reach: returns ``value`` anew, without holding it.
          value: the object to look into.
          depth: how far it is from the function.
        """
        if isinstance(value, Variable | HoldsVariables | CanBeCurrent):
            self.strategies += _strategies_of(value)
            return True
        if is_nnx_object(value):
            self.nnx_objects.append(value)
            return False
        if _is_closed(value) or depth > _DEPTH or len(self._known) > _WIDTH:
            return False
        if id(value) not in self._known:
            self._known[id(value)] = False  # While it is walked, for objects that hold one another.
            self._kept.append(value)  # So that no other object gets its identity meanwhile.
            found = [self._record(*place, depth + 1) for place in _places(reach, value)]
            self._known[id(value)] = any(found)
        return self._known[id(value)]

    def _record(self, look_up: Callable[[Any], Any], keys: Sequence[Any], depth: int) -> bool:
        leading = [
            key
            for key in keys
            if self.leads_to_variables(functools.partial(look_up, key), look_up(key), depth)
        ]
        if leading:
            self.captures.append(Capture(look_up, leading))
        return bool(leading)


def _strategies_of(value: Any) -> list[Any]:
    if isinstance(value, CanBeCurrent):
        return [value]
    variables = [value] if isinstance(value, Variable) else value.distributed_variables()
    default = default_frame().strategy
    return [s for s in (v.distribute_strategy for v in variables) if s is not default]


def _is_closed(value: Any) -> bool:
    if isinstance(value, _CLOSED):
        return True
    plain = isinstance(value, types.FunctionType | types.MethodType | dict | list | tuple)
    return not plain and _of_library(value) and not _wraps(value)


def _of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def _wraps(value: Any) -> bool:
    """Tell whether ``value`` is a library's object for a function: of jax.jit, distrib.function."""
    functions = types.FunctionType | types.MethodType
    return _of_library(value) and isinstance(getattr(value, "__wrapped__", None), functions)


def _places(
    reach: Callable[[], Any], value: Any
) -> Iterator[tuple[Callable[[Any], Any], Sequence[Any]]]:
    """Return the ways into an object: how a key is looked up, and the keys that there are."""
    if isinstance(value, types.FunctionType):
        module = value.__globals__
        names_of_code = _global_names(value.__code__)
        names = [name for name in names_of_code if name in module]
        own = [name for name in names if not _of_another_module(module[name], module)]
        yield (lambda name: reach().__globals__[name]), own
        for name in own:
            if isinstance(module[name], types.ModuleType):
                used = [key for key in names_of_code if key in vars(module[name])]
                yield (lambda key, name=name: vars(reach().__globals__[name])[key]), used
        yield (lambda key: reach().__kwdefaults__[key]), list(value.__kwdefaults__ or ())
        yield (lambda index: reach().__defaults__[index]), range(len(value.__defaults__ or ()))
        cells = [i for i, cell in enumerate(value.__closure__ or ()) if _is_filled(cell)]
        yield (lambda i: reach().__closure__[i].cell_contents), cells
    elif isinstance(value, types.MethodType):
        yield (lambda name: getattr(reach(), name)), ["__self__", "__func__"]
    elif isinstance(value, dict):
        yield (lambda key: reach()[key]), list(value)
    elif isinstance(value, list | tuple):
        yield (lambda index: reach()[index]), range(len(value))
    elif isinstance(value, functools.partial):
        yield (lambda name: getattr(reach(), name)), ["func", "args", "keywords"]
    elif _wraps(value):
        yield (lambda name: getattr(reach(), name)), ["__wrapped__"]
    else:
        yield from _places_of_instance(reach, value)


def _places_of_instance(
    reach: Callable[[], Any], value: Any
) -> Iterator[tuple[Callable[[Any], Any], Sequence[Any]]]:
    if isinstance(getattr(value, "__dict__", None), dict):
        yield (lambda name: vars(reach())[name]), list(vars(value))
    for base in type(value).__mro__:
        if base.__module__.partition(".")[0] not in (*_LIBRARIES, "builtins"):
            slots = base.__dict__.get("__slots__", ())
            names = [slots] if isinstance(slots, str) else list(slots)
            filled = [name for name in names if hasattr(value, name)]
            yield (lambda name: getattr(reach(), name)), filled
            # Methods, which know globals, and what the class holds for all of its instances.
            yield (lambda name, base=base: base.__dict__[name]), list(vars(base))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _of_another_module(value: Any, module: dict[str, Any]) -> bool:
    """Tell whether ``value`` is a library's function, which does not know the user's variables."""
    return isinstance(value, types.FunctionType) and value.__globals__ is not module


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names
