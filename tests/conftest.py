"""Fixtures for all tests. The devices and JAX's settings are made in the conftest of the root."""

import gc
import importlib.util
import pathlib
import threading
import time
from collections.abc import Iterator

import hypothesis
import pytest

import distrib.config

# The first example of a property compiles and the machine may be shared: time proves nothing.
hypothesis.settings.register_profile("distrib", deadline=None, print_blob=True)
hypothesis.settings.load_profile("distrib")

_REPO_ROOT = pathlib.Path(__file__).resolve().parent.parent
_THREAD_GRACE_SECONDS = 3.0
_CALL_FAILED = pytest.StashKey[bool]()
_SHARED = _REPO_ROOT.parent / "shared"
# What a test may need beside the repository and its test extra, and whether it is here.
_AVAILABLE = {
    "mnist": lambda: (_SHARED / "data" / "mnist").is_dir(),
    "measurements": lambda: (_SHARED / "conformance" / "cases.json").is_file(),
    "torch": lambda: importlib.util.find_spec("torch") is not None,
    "tensorflow": lambda: importlib.util.find_spec("tensorflow") is not None,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and count as deselected, tests marked with ``needs`` for what is not here."""
    here = {name for name, available in _AVAILABLE.items() if available()}
    kept, left_out = [], []
    for item in items:
        wanted = {name for mark in item.iter_markers("needs") for name in mark.args}
        if not wanted <= set(_AVAILABLE):
            raise pytest.UsageError(f"{item.nodeid} needs {sorted(wanted - set(_AVAILABLE))}")
        (kept if wanted <= here else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    """The root of the repository."""
    return _REPO_ROOT


@pytest.fixture(scope="session")
def mnist_dir() -> pathlib.Path:
    """The folder of the real MNIST, for tests that are marked as needing it."""
    return _SHARED / "data" / "mnist"


@pytest.fixture
def eagerly() -> Iterator[None]:
    """Run the replicas of a test in threads."""
    distrib.config.run_functions_eagerly(True)
    yield
    distrib.config.run_functions_eagerly(False)


@pytest.fixture(params=["compiled", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test under each engine."""
    distrib.config.run_functions_eagerly(request.param == "threads")
    yield request.param
    distrib.config.run_functions_eagerly(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Note for the fixtures of a test whether it failed."""
    report = yield
    if report.when == "call":
        item.stash[_CALL_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a non-daemon thread, or one of distrib's own, running."""
    before = set(threading.enumerate())
    yield
    if request.node.stash.get(_CALL_FAILED, False):
        return  # its traceback may keep the owner of a thread alive, and one report is enough
    left = _threads_that_must_end(before)
    if not left:
        return
    gc.collect()  # a thread ends with its iterator, which may be waiting for the collector
    deadline = time.monotonic() + _THREAD_GRACE_SECONDS
    while left and time.monotonic() < deadline:
        left[0].join(timeout=0.05)
        left = _threads_that_must_end(before)
    if left:
        names = ", ".join(sorted(thread.name for thread in left))
        pytest.fail(f"threads still running {_THREAD_GRACE_SECONDS} s after the test: {names}")


def _threads_that_must_end(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name.startswith("distrib-"))
    ]
