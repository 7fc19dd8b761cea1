"""Tracebacks that end with the user's line: the frames of libraries are taken out.

A step is called through distrib and traced by JAX, whose frames, dozens of them, say nothing about
an error in the step. ``jax.config.update("jax_traceback_filtering", "off")`` shows them all, JAX's
and distrib's.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What stands between the user's lines, and beneath the last of them.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax")
_STANDARD = ("contextlib", "contextvars", "functools", "threading")


def _places() -> tuple[str, ...]:
    """Return the folders and files whose frames are hidden; finding a package imports nothing."""
    folders = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    files = []
    for name in (*_LIBRARIES, *_STANDARD):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders += [os.path.abspath(folder) for folder in spec.submodule_search_locations]
        elif spec is not None and spec.origin:
            files.append(spec.origin)
    return tuple(os.path.join(folder, "") for folder in folders) + tuple(files)


_HIDDEN = _places()


def is_hidden(filename: str) -> bool:
    """Tell whether frames of a file are hidden: distrib's own, JAX's, Flax's, Optax's.

    >>> is_hidden(__file__), is_hidden(jax.__file__), is_hidden("train.py")
    (True, True, False)
    """
    return filename.startswith(_HIDDEN)


def filtered(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of libraries; the frames that stay are not changed."""
    kept = []
    while traceback is not None:
        if not is_hidden(traceback.tb_frame.f_code.co_filename):
            kept.append(traceback)
        traceback = traceback.tb_next
    shown = None
    for each in reversed(kept):
        shown = types.TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def hide_frames(error: BaseException) -> None:
    """Take the frames of libraries out of the tracebacks of an error and of what it came from.

    The setting ``jax_traceback_filtering`` of JAX decides: ``"off"`` leaves all frames, and with
    ``"remove_frames"`` the causes, of which JAX makes one to show them, keep theirs.
    """
    mode = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    if mode == "off":
        return
    error.__traceback__ = filtered(error.__traceback__)
    if mode == "remove_frames":
        return
    callers = _callers(inspect.currentframe())
    waiting = [error.__cause__, error.__context__]
    seen = {id(error)}
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen or each.__traceback__ is None:
            continue
        # One that the user was handling when they called: not ours to change.
        if id(each.__traceback__.tb_frame) in callers:
            continue
        seen.add(id(each))
        each.__traceback__ = filtered(each.__traceback__)
        waiting += [each.__cause__, each.__context__]


def _callers(frame: types.FrameType | None) -> set[int]:
    """Return the identities of a frame and of those that called it."""
    found = set()
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found


def ends_with_users_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that users call: an error leaves it without the frames of libraries.

    The last frame of its traceback is then the user's own line: of the step, if the error arose
    there, else the call of ``function``.

    >>> import traceback
    >>> @ends_with_users_line
    ... def call(fn):
    ...     return fn()
    >>> try:
    ...     call(lambda: 1 / 0)
    ... except ZeroDivisionError as error:
    ...     print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
    ['<module>', 'call', '<lambda>']
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            # A bare raise takes the traceback from the error and adds no entry for this frame.
            raise

    return wrapper


def user_location(frame: types.FrameType | None) -> str | None:
    """Return file and line of the innermost frame that is the user's: ``train.py:12``.

    Args:
      frame: where to begin; the frames that called it come next.
    """
    while frame is not None and is_hidden(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def stack_as_traceback(
    frame: types.FrameType | None, inner: types.TracebackType | None
) -> types.TracebackType | None:
    """Return the traceback of a call that another thread waits for.

    Args:
      frame: the innermost frame of that thread.
      inner: what happened in the call.

    Returns:
      The frames of the thread, outermost first, and then those of ``inner``.
    """
    while frame is not None:
        inner = types.TracebackType(inner, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return inner
