"""Small programs that must give what tf.distribute gives; they stand in ``conformance/``."""

import json
import pathlib
from typing import Any

import pytest

import tests.conformance.central_storage_cases
import tests.conformance.cross_device_ops_cases
import tests.conformance.errors_cases
import tests.conformance.gather_cases
import tests.conformance.input_cases
import tests.conformance.reduce_cases
import tests.conformance.replica_context_cases
import tests.conformance.run_cases
import tests.conformance.variable_cases  # noqa: F401
from tests.conformance.table import CASES, disagreements, mismatches

AREAS = {
    "central_storage",
    "cross_device_ops",
    "errors",
    "gather",
    "input",
    "reduce",
    "replica_context",
    "run",
    "variable",
}

# The cases of these areas that need what is not written yet, and what that is.
LATER = {
    "coord-construct": "coordinator",
    "partitioner-base": "partitioners",
    "var-checkpoint": "checkpoints",
}


@pytest.fixture(scope="module")
def measured(repo_root: pathlib.Path) -> dict[str, Any]:
    path = repo_root.parent / "shared" / "conformance" / "cases.json"
    return {entry["id"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", sorted(name for name in CASES if not CASES[name].eagerly))
def test_gives_what_was_measured(name: str):
    case = CASES[name]
    assert list(mismatches(case.result_of(eager=False), case.expected_of(eager=False))) == []


@pytest.mark.parametrize("name", sorted(CASES))
def test_gives_what_was_measured_eagerly(name: str, eagerly: None):
    case = CASES[name]
    assert list(mismatches(case.result_of(eager=True), case.expected_of(eager=True))) == []


@pytest.mark.needs("measurements")
@pytest.mark.parametrize("name", sorted(CASES))
def test_table_agrees_with_the_measurements(name: str, measured: dict[str, Any]):
    found: dict[str, set[str]] = {"differs": set(), "omits": set()}
    for kind, path in disagreements(CASES[name].expected, measured[name]["expect"]):
        found[kind].add(path)
    assert found["differs"] == set(CASES[name].differs)
    assert found["omits"] == set(CASES[name].omits)


@pytest.mark.needs("measurements")
def test_no_case_is_left_out(measured: dict[str, Any]):
    wanted = {name for name, entry in measured.items() if entry["area"] in AREAS}
    assert wanted - set(CASES) == set(LATER)
    assert set(CASES) <= wanted
