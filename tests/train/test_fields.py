"""Fields that a subclass of a train state declares."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from distrib.train.fields import is_tree_of_arrays, taken_defaults


def test_defaults_are_taken_off_the_class():
    class Fields:
        given: int
        label: str = "net"
        tree: dict = dataclasses.field(default_factory=dict)
        number: float = dataclasses.field(default=0.5)
        shared: ClassVar[int] = 3
        constant = 4

    assert taken_defaults(Fields) == {"label": "net", "tree": {}, "number": 0.5}
    assert not hasattr(Fields, "label")
    assert (Fields.shared, Fields.constant) == (3, 4)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a": jnp.ones(2), "b": [np.ones(2), 1, 2.0, np.float32(3)]}, True),
        ((), True),
        (None, False),
        ("text", False),
        ({"a": True}, False),
        ([jnp.ones(2), print], False),
    ],
)
def test_trees_of_arrays(tree, expected):
    assert is_tree_of_arrays(tree) is expected
