"""Where variables live: a copy on each device, or all on one."""

import jax
import jax.numpy as jnp
import pytest

from distrib.errors import VariableError
from distrib.platform import replica_mesh
from distrib.strategies.homes import OnDevice, OnEveryDevice, refuse_unsynchronized
from distrib.variables import (
    MirroredStorage,
    OnReadStorage,
    PlacedStorage,
    VariableAggregation,
    VariableSynchronization,
)

CPUS = jax.devices("cpu")
MODES = VariableSynchronization


def storage(home, mode, value=1.0):
    return home.create_storage(jnp.asarray(value), mode, VariableAggregation.SUM, "v")


def homes_of(made):
    return [next(iter(part.devices())).id for part in made.components()]


@pytest.mark.parametrize(
    ("mode", "kind", "parts"),
    [(MODES.ON_WRITE, MirroredStorage, [1, 1]), (MODES.ON_READ, OnReadStorage, [1, 1])],
)
def test_a_copy_on_each_device(mode, kind, parts):
    home = OnEveryDevice(replica_mesh([CPUS[4], CPUS[2]]))
    assert home.devices == (CPUS[4], CPUS[2])
    made = storage(home, mode)
    assert type(made) is kind
    assert homes_of(made) == [4, 2]
    assert [float(part) for part in made.components()] == parts
    assert made.per_replica == (mode is MODES.ON_READ)


@pytest.mark.parametrize("mode", [MODES.ON_WRITE, MODES.ON_READ, MODES.NONE])
def test_with_one_device_there_is_nothing_to_synchronise(mode):
    made = storage(OnEveryDevice(replica_mesh(CPUS[3:4])), mode)
    assert type(made) is MirroredStorage
    assert homes_of(made) == [3]


@pytest.mark.parametrize("mode", [MODES.ON_WRITE, MODES.ON_READ])
@pytest.mark.parametrize(("device", "devices"), [(None, ()), (CPUS[6], (CPUS[6],))])
def test_one_array_on_one_device(mode, device, devices):
    home = OnDevice(device)
    assert home.devices == devices
    made = storage(home, mode, [1.0, 2.0])
    assert type(made) is PlacedStorage
    assert made.read().tolist() == [1, 2]
    if device is not None:
        assert homes_of(made) == [6]


def test_a_home_owns_what_it_was_given():
    for home in (OnEveryDevice(replica_mesh(CPUS[:2])), OnDevice(CPUS[0]), OnDevice(None)):
        given = jnp.ones(3)
        made = home.create_storage(given, MODES.ON_WRITE, VariableAggregation.NONE, "v")
        buffers = {s.data.unsafe_buffer_pointer() for s in made.cell.array.addressable_shards}
        assert given.unsafe_buffer_pointer() not in buffers


def test_which_programs_take_the_arrays_as_they_are():
    here, there = replica_mesh(CPUS[:2]), replica_mesh(CPUS[1:3])
    assert OnEveryDevice(here).lives_on(replica_mesh(CPUS[:2]))
    assert not OnEveryDevice(here).lives_on(there)
    assert not OnEveryDevice(replica_mesh(CPUS[1::-1])).lives_on(here)  # another order
    assert not OnDevice(CPUS[0]).lives_on(replica_mesh(CPUS[:1]))


@pytest.mark.parametrize(
    "home", [OnEveryDevice(replica_mesh(CPUS[:2])), OnDevice(CPUS[0])], ids=["every", "one"]
)
def test_no_synchronisation_at_all_is_refused(home):
    message = "`NONE` variable synchronization mode is not supported .* for variable: v"
    with pytest.raises(VariableError, match=message):
        storage(home, MODES.NONE)
    with pytest.raises(VariableError, match="for variable: w"):
        refuse_unsynchronized(MODES.NONE, "w")
    refuse_unsynchronized(MODES.ON_READ, "w")


def test_without_a_fixed_device_it_is_a_plain_variable():
    assert storage(OnDevice(None), MODES.NONE).read() == 1.0
