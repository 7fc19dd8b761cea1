"""A step follows the names by which it finds variables."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import distrib
from distrib.engines.captures import captures


@pytest.fixture
def strategy():
    return distrib.MirroredStrategy(["CPU:0", "CPU:1"])


def counter(strategy):
    with strategy.scope():
        return distrib.Variable(0.0, aggregation=distrib.VariableAggregation.MEAN)


def test_a_name_in_a_closure_that_means_another_variable_is_followed(strategy):
    first = current = counter(strategy)

    def step():
        current.assign_add(jnp.asarray(1.0))

    strategy.run(step)
    current = second = counter(strategy)
    strategy.run(step)
    strategy.run(step)
    assert (float(first), float(second)) == (1.0, 2.0)


_current = None


def _global_step():
    _helper()


def _helper():
    _current["v"].assign_add(jnp.asarray(1.0))


def test_a_global_name_is_followed_through_functions_of_the_module(strategy):
    global _current
    _current = first = {"v": counter(strategy)}
    strategy.run(_global_step)
    _current = second = {"v": counter(strategy)}
    strategy.run(_global_step)
    assert (float(first["v"]), float(second["v"])) == (1.0, 1.0)
    _current = None


def test_an_attribute_is_followed_when_the_old_object_dies(strategy):
    class Trainer:
        def __init__(self):
            self.v = counter(strategy)

        def step(self):
            self.v.assign_add(jnp.asarray(1.0))

    trainer = Trainer()
    strategy.run(trainer.step)
    trainer.v = counter(strategy)
    strategy.run(trainer.step)
    assert float(trainer.v) == 1.0


@pytest.mark.parametrize("keep_old", [True, False])
def test_an_attribute_a_key_and_an_item_are_followed(strategy, keep_old):
    class Trainer:
        pass

    def by_attribute():
        trainer.v.assign_add(jnp.asarray(1.0))

    def by_key():
        table["v"].assign_add(jnp.asarray(1.0))

    def by_item():
        items[0].assign_add(jnp.asarray(1.0))

    trainer, table, items, old = Trainer(), {}, [None], []
    for step, put, get in (
        (by_attribute, lambda v: setattr(trainer, "v", v), lambda: trainer.v),
        (by_key, lambda v: table.update(v=v), lambda: table["v"]),
        (by_item, lambda v: items.__setitem__(0, v), lambda: items[0]),
    ):
        for _ in range(3):
            put(counter(strategy))
            strategy.run(step)
            assert float(get()) == 1.0
            if keep_old:
                old.append(get())
    assert all(float(v) == 1.0 for v in old)


def test_an_object_that_a_method_belongs_to_is_followed(strategy):
    class Trainer:
        def step(self):
            self.v.assign_add(jnp.asarray(1.0))

    trainer = Trainer()
    trainer.v = first = counter(strategy)
    strategy.run(trainer.step)
    trainer.v = second = counter(strategy)
    strategy.run(trainer.step)
    assert (float(first), float(second)) == (1.0, 1.0)


def test_an_object_among_the_arguments_is_followed(strategy):
    class Holder:
        pass

    def step(holder):
        holder.v.assign_add(jnp.asarray(1.0))

    holder = Holder()
    holder.v = first = counter(strategy)
    strategy.run(step, args=(holder,))
    holder.v = second = counter(strategy)
    strategy.run(step, args=(holder,))
    assert (float(first), float(second)) == (1.0, 1.0)


def test_only_names_that_hold_variables_are_captured(strategy):
    v, number, array = counter(strategy), 3, jnp.ones(2)

    def step():
        return v.value() * number + array

    assert len(captures(step)) == 1
    assert captures(len) == []


def test_a_function_that_its_closure_leads_back_to_is_not_kept_alive(strategy):
    class Trainer:
        pass

    def make():
        trainer = Trainer()
        trainer.v = counter(strategy)
        table = {"trainer": trainer}

        def step():
            table["trainer"].v.assign_add(jnp.asarray(1.0))

        trainer.step = table["step"] = step
        strategy.run(step)
        return weakref.ref(step), weakref.ref(trainer), weakref.ref(trainer.v)

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


class Slotted:
    __slots__ = ("v",)


_slotted = Slotted()


def _slotted_step():
    _slotted.v.assign_add(jnp.asarray(1.0))


class ByClass:
    v = None

    def step(self):
        self.inner()

    def inner(self):
        self.v.assign_add(jnp.asarray(1.0))
        if _current is not None:
            _current["v"].assign_add(jnp.asarray(1.0))


def test_slots_class_attributes_and_globals_of_methods_are_followed(strategy):
    global _current
    for step, put in (
        (_slotted_step, lambda v: setattr(_slotted, "v", v)),
        (ByClass().step, lambda v: setattr(ByClass, "v", v)),
    ):
        variables = [counter(strategy) for _ in range(2)]
        for v in variables:
            put(v)
            strategy.run(step)
        assert [float(v) for v in variables] == [1.0, 1.0]
    trainer, variables = ByClass(), [counter(strategy) for _ in range(2)]
    for v in variables:
        _current = {"v": v}
        strategy.run(trainer.step)
    _current = None
    assert [float(v) for v in variables] == [1.0, 1.0]


def test_a_large_object_beside_does_not_hide_them(strategy):
    class Trainer:
        def step(self):
            self.models["a"].assign_add(jnp.asarray(1.0))

    trainer = Trainer()
    trainer.vocabulary = [(f"w{i}", i) for i in range(5000)]
    trainer.models = {"a": counter(strategy)}
    first = trainer.models["a"]
    strategy.run(trainer.step)
    trainer.models["a"] = second = counter(strategy)
    strategy.run(trainer.step)
    assert (float(first), float(second)) == (1.0, 1.0)
