"""SIGINT is held back for the length of a block, and delivered at its end."""

import signal
import threading

import pytest

from distrib.engines.interrupts import InterruptsDeferred


@pytest.fixture(autouse=True)
def handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before


def test_it_is_delivered_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with InterruptsDeferred():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the block")
        done.append("not this")
    assert done == ["the rest of the block"]


def test_several_are_delivered_once():
    with pytest.raises(KeyboardInterrupt):
        with InterruptsDeferred():
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)


def test_without_an_interrupt_nothing_happens():
    handler = signal.getsignal(signal.SIGINT)
    with InterruptsDeferred():
        assert signal.getsignal(signal.SIGINT) is not handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_in_the_block_comes_out():
    with pytest.raises(ZeroDivisionError):
        with InterruptsDeferred():
            raise ZeroDivisionError


def test_an_error_and_an_interrupt():
    with pytest.raises(KeyboardInterrupt) as raised:
        with InterruptsDeferred():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError
    assert isinstance(raised.value.__context__, ZeroDivisionError)


def test_a_handler_of_the_users_own_is_called():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame)))
    try:
        with InterruptsDeferred():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        ((number, frame),) = calls
        assert number == signal.SIGINT
        assert frame is not None
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptsDeferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_it_does_nothing():
    handler = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with InterruptsDeferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_blocks_inside_of_blocks():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with InterruptsDeferred():
            with InterruptsDeferred():
                signal.raise_signal(signal.SIGINT)
            done.append("after the inner block")
    assert done == ["after the inner block"]
