"""Every pair of synchronization and aggregation, in replica and in cross-replica context.

The numbers are those of tf.distribute 2.21.
"""

import jax.numpy as jnp
import pytest

import distrib
from distrib.errors import ContextError
from tests.support.strategies import central, mirrored

Aggregation = distrib.VariableAggregation
Synchronization = distrib.VariableSynchronization

COLUMNS = [
    (change, context)
    for change in ("read", "assign", "assign_add", "assign_sub", "scatter_add")
    for context in ("replica", "cross")
]

# A variable that starts from 6. In a replica it is changed by the replica's number, from 1, outside
# by 3. Of each change: the copies afterwards, or the error. Reads come after replicas have added
# their numbers to an ON_READ variable of several copies; they stand as each replica gets them.
#
# tf.distribute assigns to an ON_READ variable without aggregation outside of replicas as well,
# and raises when its result is read (read_value=False leaves that out): here it returns the copies.
MEASURED = """
Mirrored 2 ON_WRITE NONE 6,6 6 1,2 3,3 7,8 9,9 5,4 3,3 7,8 9,9
Mirrored 2 ON_WRITE SUM 6,6 6 3,3 3,3 9,9 9,9 3,3 3,3 9,9 9,9
Mirrored 2 ON_WRITE MEAN 6,6 6 1.5,1.5 3,3 7.5,7.5 9,9 4.5,4.5 3,3 7.5,7.5 9,9
Mirrored 2 ON_WRITE FIRST 6,6 6 1,1 3,3 7,7 9,9 5,5 3,3 7,7 9,9
Mirrored 2 ON_READ NONE 7,8 value! 1,2 3,3 7,8 9,9 5,4 3,3 none! none!
Mirrored 2 ON_READ SUM 7,8 15 1,2 1.5,1.5 7,8 value! 5,4 value! none! none!
Mirrored 2 ON_READ MEAN 7,8 7.5 1,2 3,3 7,8 9,9 5,4 3,3 none! none!
Mirrored 2 ON_READ FIRST 7,8 7 1,2 3,3 7,8 9,9 5,4 3,3 none! none!
Mirrored 3 ON_WRITE NONE 6,6,6 6 1,2,3 3,3,3 7,8,9 9,9,9 5,4,3 3,3,3 7,8,9 9,9,9
Mirrored 3 ON_WRITE SUM 6,6,6 6 6,6,6 3,3,3 12,12,12 9,9,9 0,0,0 3,3,3 12,12,12 9,9,9
Mirrored 3 ON_WRITE MEAN 6,6,6 6 2,2,2 3,3,3 8,8,8 9,9,9 4,4,4 3,3,3 8,8,8 9,9,9
Mirrored 3 ON_WRITE FIRST 6,6,6 6 1,1,1 3,3,3 7,7,7 9,9,9 5,5,5 3,3,3 7,7,7 9,9,9
Mirrored 3 ON_READ NONE 7,8,9 value! 1,2,3 3,3,3 7,8,9 9,9,9 5,4,3 3,3,3 none! none!
Mirrored 3 ON_READ SUM 7,8,9 24 1,2,3 1,1,1 7,8,9 value! 5,4,3 value! none! none!
Mirrored 3 ON_READ MEAN 7,8,9 8 1,2,3 3,3,3 7,8,9 9,9,9 5,4,3 3,3,3 none! none!
Mirrored 3 ON_READ FIRST 7,8,9 7 1,2,3 3,3,3 7,8,9 9,9,9 5,4,3 3,3,3 none! none!
CentralStorage 2 ON_WRITE NONE 6,6 6 value! 3 value! 9 value! 3 9 9
CentralStorage 2 ON_WRITE SUM 6,6 6 3 3 9 9 3 3 9 9
CentralStorage 2 ON_WRITE MEAN 6,6 6 1.5 3 7.5 9 4.5 3 9 9
CentralStorage 2 ON_WRITE FIRST 6,6 6 1 3 7 9 5 3 9 9
CentralStorage 2 ON_READ NONE 6,6 6 value! 3 value! 9 value! 3 9 9
CentralStorage 2 ON_READ SUM 6,6 6 3 3 9 9 3 3 9 9
CentralStorage 2 ON_READ MEAN 6,6 6 1.5 3 7.5 9 4.5 3 9 9
CentralStorage 2 ON_READ FIRST 6,6 6 1 3 7 9 5 3 9 9
CentralStorage 3 ON_WRITE NONE 6,6,6 6 value! 3 value! 9 value! 3 12 9
CentralStorage 3 ON_WRITE SUM 6,6,6 6 6 3 12 9 0 3 12 9
CentralStorage 3 ON_WRITE MEAN 6,6,6 6 2 3 8 9 4 3 12 9
CentralStorage 3 ON_WRITE FIRST 6,6,6 6 1 3 7 9 5 3 12 9
CentralStorage 3 ON_READ NONE 6,6,6 6 value! 3 value! 9 value! 3 12 9
CentralStorage 3 ON_READ SUM 6,6,6 6 6 3 12 9 0 3 12 9
CentralStorage 3 ON_READ MEAN 6,6,6 6 2 3 8 9 4 3 12 9
CentralStorage 3 ON_READ FIRST 6,6,6 6 1 3 7 9 5 3 12 9
"""
ERRORS = {"value!": ValueError, "none!": NotImplementedError}


def rows():
    """Yield a parameter for each line: strategy, replicas, modes, and what is expected."""
    for line in MEASURED.strip().splitlines():
        name, count, synchronization, aggregation, *columns = line.split()
        expected = [
            ERRORS[column] if column in ERRORS else [float(x) for x in column.split(",")]
            for column in columns
        ]
        modes = (synchronization, aggregation.replace("FIRST", "ONLY_FIRST_REPLICA"))
        yield pytest.param(
            name, int(count), modes, expected, id=f"{name}-{count}-{synchronization}-{aggregation}"
        )


def made(strategy, synchronization, aggregation):
    with strategy.scope():
        return distrib.Variable(
            [6.0, 6.0],
            name="v",
            synchronization=Synchronization[synchronization],
            aggregation=Aggregation[aggregation],
        )


def number():
    replica_id = distrib.get_replica_context().replica_id_in_sync_group
    return (jnp.asarray(replica_id, jnp.float32) + 1) * jnp.ones(2)


def copies_after(strategy, v, change, context):
    """Return the first element of each copy, or of what each replica reads."""

    def act():
        value = number() if context == "replica" else jnp.full(2, 3.0)
        if change == "read":
            return v.value()
        if change == "scatter_add":
            value = distrib.IndexedSlices(value[:1], jnp.array([0]), (2,))
        getattr(v, change)(value)
        return None

    if change == "read" and len(v.values) > 1 and v.synchronization is Synchronization.ON_READ:
        strategy.run(lambda: v.assign_add(number()))
    result = strategy.run(act) if context == "replica" else act()
    if change == "read":
        return [float(x[0]) for x in strategy.experimental_local_results(result)]
    if change == "scatter_add":
        assert all(float(copy[1]) == 6 for copy in v.values)
    return [float(copy[0]) for copy in v.values]


@pytest.mark.parametrize(("name", "count", "modes", "measured"), list(rows()))
def test_as_measured(name, count, modes, measured, engine):
    strategy = mirrored(count) if name == "Mirrored" else central(count)
    for (change, context), expected in zip(COLUMNS, measured, strict=True):
        v = made(strategy, *modes)
        if isinstance(expected, type):
            with pytest.raises(expected, match="'v'"):
                copies_after(strategy, v, change, context)
        else:
            found = copies_after(strategy, v, change, context)
            assert found == pytest.approx(expected), (change, context)


CHANGES = [
    lambda v: v.assign([1.0, 1.0]),
    lambda v: v.assign_add(jnp.ones(2)),
    lambda v: v.scatter_update(distrib.IndexedSlices([1.0], [0])),
]


@pytest.mark.parametrize("change", CHANGES, ids=["assign", "add", "scatter"])
def test_under_another_strategy(change, engine):
    ours, theirs = mirrored(2), central(2)
    v = made(theirs, "ON_WRITE", "ONLY_FIRST_REPLICA")
    mixing = "Mixing different distrib.Strategy objects"
    of_v = f"{mixing}: <distrib.CentralStorageStrategy .*>, to which variable 'v' belongs, is not"
    with ours.scope(), pytest.raises(ContextError, match=of_v):
        change(v)
    with pytest.raises(ContextError, match=f"{mixing}: variable 'v' belongs .* `with strategy.sc"):
        ours.run(lambda: change(v))
    with pytest.raises(ContextError, match=mixing), ours.scope(), theirs.scope():
        pass
    with ours.scope(), pytest.raises(ContextError, match=mixing):
        theirs.run(lambda: change(v))
    assert v.numpy().tolist() == [6, 6]
    # Read it may be, everywhere.
    assert [x.tolist() for x in ours.run(lambda: v + 1.0).values] == [[7, 7], [7, 7]]


def test_an_on_read_variable_is_not_aggregated_under_another_strategy():
    u = made(mirrored(2), "ON_READ", "SUM")
    for read in (u.read_value, u.numpy, lambda: u + 1.0):
        with mirrored(2).scope(), pytest.raises(ContextError, match="to which variable 'v' bel"):
            read()
    assert u.numpy().tolist() == [12, 12]


@pytest.mark.parametrize("change", CHANGES, ids=["assign", "add", "scatter"])
def test_inside_and_outside_of_its_scope(change, engine):
    strategy = mirrored(2)
    results = []
    for scopes in range(3):
        v = made(strategy, "ON_WRITE", "ONLY_FIRST_REPLICA")
        if scopes == 0:
            change(v)
        elif scopes == 1:
            with strategy.scope():
                change(v)
        else:
            with strategy.scope(), strategy.scope():
                change(v)
                strategy.run(lambda v=v: v.assign_add(jnp.zeros(2)))
        strategy.extended.assert_mirrored(v)
        results.append(v.numpy().tolist())
    assert results[0] == results[1] == results[2] != [6, 6]
    assert not distrib.has_strategy()
