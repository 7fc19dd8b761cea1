"""What counts as an array in a batch, and how the arrays of other libraries become NumPy's."""

from __future__ import annotations

import reprlib
from typing import Any

import jax
import numpy as np

from distrib.errors import InputError
from distrib.platform.pytree_paths import leaves_with_paths


def comes_from(value: Any, package: str, class_name: str | None = None) -> bool:
    """Say whether the class of ``value`` is ``package``'s or derives from one of its classes.

    Decided by the names of modules and classes, so that ``package`` is never imported.

    Args:
      value: any object.
      package: the name of a top-level package.
      class_name: where given, only a class of this name counts.

    >>> comes_from(np.zeros(3), "numpy"), comes_from([], "numpy")
    (True, False)
    """
    return any(
        str(cls.__module__).partition(".")[0] == package
        and (class_name is None or cls.__name__ == class_name)
        for cls in type(value).__mro__
    )


def is_array(value: Any) -> bool:
    """Say whether ``value`` is an array: NumPy's, JAX's, or one that converts to NumPy."""
    return (
        hasattr(value, "shape")
        and hasattr(value, "dtype")
        and (hasattr(value, "__array__") or hasattr(value, "numpy"))
    )


def host_batch(batch: Any) -> Any:
    """Return ``batch`` with its arrays as NumPy arrays; JAX arrays are left as they are.

    Args:
      batch: a pytree whose leaves are arrays of NumPy, JAX, torch, TensorFlow or any library
        whose arrays convert to NumPy.

    Returns:
      The same tree: ``batch`` itself where nothing had to be converted.

    Raises:
      InputError: if a leaf is not an array; it names the leaf's path and type.

    >>> host_batch({"x": np.arange(2), "y": np.float32(1)})
    {'x': array([0, 1]), 'y': array(1., dtype=float32)}
    """
    leaves, structure = jax.tree_util.tree_flatten(batch)
    if all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves):
        return batch
    return structure.unflatten([_host_array(leaf, path) for path, leaf in leaves_with_paths(batch)])


def _host_array(leaf: Any, path: str) -> Any:
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf
    if not is_array(leaf):
        raise InputError(
            f"leaf {path} is a {type(leaf).__name__}, {reprlib.repr(leaf)}; every leaf of a batch "
            "must be an array [examples, ...]: batch the dataset and convert with np.asarray."
        )
    try:
        if comes_from(leaf, "torch"):
            return leaf.detach().cpu().numpy()
        return np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        # torch's bfloat16 is the usual case: NumPy has no such type.
        raise InputError(
            f"leaf {path}, a {type(leaf).__name__} of {leaf.dtype}, does not convert to NumPy "
            f"({error}): convert it in the loader, for example to float32."
        ) from error
