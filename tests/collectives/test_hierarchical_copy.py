"""The groups of the hierarchical copy."""

import pytest

from distrib.collectives import hierarchy


@pytest.mark.parametrize("count", range(1, 40))
def test_every_replica_counts_once_and_hears_of_the_total(count):
    plan = hierarchy(count)
    for groups in (plan.within, plan.across):
        assert sorted(r for group in groups for r in group) == list(range(count))
    group_of = {r: i for i, group in enumerate(plan.within) for r in group}
    knowing = [
        r
        for group in plan.across
        for r in group
        if sorted(group_of[other] for other in group) == list(range(len(plan.within)))
    ]
    if plan.leaders:
        assert sorted(knowing) == sorted(plan.leaders) or len(plan.within) == 1
        assert [group_of[r] for r in plan.leaders] == list(range(len(plan.within)))
    else:
        assert sorted(knowing) == list(range(count))
        # With two to add, both orders give the same bits.
        assert all(len(group) == 2 for group in plan.across)
