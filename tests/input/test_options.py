"""What the options accept, and what they say when they do not."""

import dataclasses
import re

import pytest

from distrib.errors import InputError
from distrib.input import InputContext, InputOptions, InputReplicationMode


def test_context_has_the_defaults_and_the_text_of_tf_distribute():
    context = InputContext()
    assert context.num_input_pipelines == 1
    assert context.input_pipeline_id == 0
    assert context.num_replicas_in_sync == 1
    assert str(context) == "distrib.InputContext(input pipeline id 0, total: 1)"
    assert repr(InputContext(2, 1, 4)) == (
        "InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)"
    )


def test_per_replica_batch_size_divides():
    assert InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(8) == 4


@pytest.mark.parametrize(
    ("size", "replicas", "near"), [(7, 2, "6 or 8"), (3, 4, "such as 4"), (10, 4, "8 or 12")]
)
def test_per_replica_batch_size_that_does_not_divide_names_both_and_the_fix(size, replicas, near):
    context = InputContext(num_replicas_in_sync=replicas)
    with pytest.raises(
        ValueError,
        match=f"size {size} is not divisible by num_replicas_in_sync {replicas}: pass .*{near}",
    ):
        context.get_per_replica_batch_size(size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_input_pipelines": 0}, "num_input_pipelines is 0; it must be an int of at least 1"),
        ({"input_pipeline_id": -1}, "input_pipeline_id is -1; it must be an int of at least 0"),
        ({"num_replicas_in_sync": 2.0}, "num_replicas_in_sync is 2.0; it must be an int"),
        ({"num_replicas_in_sync": True}, "num_replicas_in_sync is True; it must be an int"),
        ({"num_input_pipelines": 2, "input_pipeline_id": 2}, "pass an id of at most 1"),
    ],
)
def test_context_refuses_what_is_out_of_range(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        InputContext(**arguments)


def test_options_have_the_defaults_of_tf_distribute_and_cannot_be_changed():
    options = InputOptions()
    assert options.experimental_fetch_to_device is True
    assert options.experimental_replication_mode is InputReplicationMode.PER_WORKER
    assert options.experimental_place_dataset_on_device is False
    assert options.experimental_per_replica_buffer_size == 1
    assert options.last_batch == "split"
    with pytest.raises(AttributeError):
        options.experimental_fetch_to_device = False  # type: ignore[misc]


def test_replication_mode_may_be_given_by_name():
    options = InputOptions(experimental_replication_mode="Per_Replica")
    assert options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    assert [mode.value for mode in InputReplicationMode] == ["PER_WORKER", "PER_REPLICA"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experimental_fetch_to_device": 1}, "experimental_fetch_to_device is 1; it must be a"),
        ({"experimental_replication_mode": "each"}, "'each'; it must be an InputReplicationMode"),
        ({"experimental_place_dataset_on_device": True}, "leave it False"),
        ({"experimental_per_replica_buffer_size": -1}, "-1; it must be an int of at least 0"),
        ({"experimental_per_replica_buffer_size": 1.5}, "1.5; it must be an int of at least 0"),
        ({"experimental_per_replica_buffer_size": True}, "True; it must be an int"),
        ({"last_batch": "Pad"}, 'last_batch is \'Pad\'; it must be "split", "drop" or "pad"'),
        ({"last_batch": True}, 'pass "split" to cut a short batch over the replicas'),
    ],
)
def test_options_refuse_with_value_rule_and_fix(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        InputOptions(**arguments)


def test_the_fields_of_tf_distribute_come_first_and_in_its_order():
    assert [field.name for field in dataclasses.fields(InputOptions)] == [
        "experimental_fetch_to_device",
        "experimental_replication_mode",
        "experimental_place_dataset_on_device",
        "experimental_per_replica_buffer_size",
        "last_batch",
    ]
