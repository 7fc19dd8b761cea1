"""Fixtures for all tests. The devices and JAX's settings are made in the conftest of the root."""

import gc
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


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    """The root of the repository."""
    return _REPO_ROOT


@pytest.fixture(scope="session")
def mnist_dir() -> pathlib.Path:
    """The folder of the real MNIST, which stands beside the repository; skips where it does not."""
    folder = _REPO_ROOT.parent / "shared" / "data" / "mnist"
    if not folder.is_dir():
        pytest.skip("the real MNIST is not beside this checkout")
    return folder


@pytest.fixture
def eagerly() -> Iterator[None]:
    """Run the replicas of a test in threads."""
    distrib.config.run_functions_eagerly(True)
    yield
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
