"""The two ways of combining values, and their names."""

import pytest

import distrib
from distrib.reduce_op import ReduceOp


@pytest.mark.parametrize("op", list(ReduceOp))
def test_a_member_its_name_and_its_name_in_any_case(op):
    for given in (op, op.name, op.name.lower(), op.name.title()):
        assert ReduceOp.parse(given) is op


def test_sum_and_mean():
    assert [op.value for op in ReduceOp] == ["SUM", "MEAN"]
    assert distrib.ReduceOp is ReduceOp


@pytest.mark.parametrize(
    "op", ["MAX", "", " SUM", None, 1, distrib.VariableAggregation.SUM], ids=repr
)
def test_anything_else_is_refused_with_what_to_pass(op):
    with pytest.raises(ValueError, match="is not a valid ReduceOp: pass .*'SUM' or 'MEAN'") as e:
        ReduceOp.parse(op)
    assert repr(op) in str(e.value)
