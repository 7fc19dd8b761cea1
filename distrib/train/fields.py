"""The fields of a train state that a subclass declares, or that are given to ``create``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


def taken_defaults(cls: type) -> dict[str, Any]:
    """Take the defaults of annotated fields off a class and return them.

    As attributes of the class they would hide the fields of its objects.
    """
    defaults = {}
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        if name in vars(cls) and "ClassVar" not in str(annotation):
            default = vars(cls)[name]
            if isinstance(default, dataclasses.Field):
                missing = default.default is dataclasses.MISSING
                default = default.default_factory() if missing else default.default  # pyright: ignore[reportCallIssue]
            defaults[name] = default
            delattr(cls, name)
    return defaults


def is_tree_of_arrays(tree: Any) -> bool:
    """Tell whether all leaves of a tree can be values of variables.

    >>> is_tree_of_arrays({"decay": 0.5}), is_tree_of_arrays(None), is_tree_of_arrays("text")
    (True, False, False)
    """
    leaves = jax.tree.leaves(tree)
    return tree is not None and all(
        isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)
        and not isinstance(leaf, bool)
        for leaf in leaves
    )
