"""Functions that take turns: their order, their meetings, and how each of them may fail."""

import contextvars
import io
import os
import pdb
import signal
import threading

import pytest

from distrib.engines.turns import Request, take_turns
from distrib.errors import MeetingError, ReplicaDeadlineError


def replica_threads():
    return [t for t in threading.enumerate() if t.name.startswith("distrib-replica-")]


@pytest.fixture(autouse=True)
def no_replica_left():
    yield
    assert replica_threads() == []


def request(payload, kind="sum"):
    return Request(kind, f"{kind}({payload})", payload)


def total(requests):
    return [sum(r.payload for r in requests)] * len(requests)


def test_one_after_the_other_up_to_each_meeting():
    log = []

    def body(turn):
        log.append(f"a{turn.index}")
        first = turn.ask(request(turn.index + 1))
        log.append(f"b{turn.index}")
        second = turn.ask(request(first))
        log.append(f"c{turn.index}")
        return second + turn.index

    def meet(requests):
        log.append("meet")
        return total(requests)

    assert take_turns([body] * 3, meet) == [18, 19, 20]
    assert log == ["a0", "a1", "a2", "meet", "b0", "b1", "b2", "meet", "c0", "c1", "c2"]


def test_each_gets_its_own_answer():
    result = take_turns(
        [lambda turn: turn.ask(request(turn.index))] * 2,
        lambda requests: [f"for {r.payload}" for r in requests],
    )
    assert result == ["for 0", "for 1"]


def test_without_meetings():
    names = take_turns([lambda turn: threading.current_thread().name] * 2, total)
    assert names == ["distrib-replica-0", "distrib-replica-1"]


def test_many_meetings_leave_no_thread():
    def body(turn):
        value = 1
        for _ in range(200):
            value = turn.ask(request(value)) % 1000
        return value

    expected = 1
    for _ in range(200):
        expected = expected * 4 % 1000
    assert take_turns([body] * 4, total) == [expected] * 4


def test_they_see_the_context_variables_of_the_caller():
    variable = contextvars.ContextVar("variable", default="nothing")
    variable.set("the caller's")

    def body(turn):
        seen = variable.get()
        variable.set(f"of replica {turn.index}")
        return seen

    assert take_turns([body] * 2, total) == ["the caller's"] * 2
    assert variable.get() == "the caller's"


def test_different_meetings_name_both():
    def body(turn):
        return turn.ask(request(turn.index, "sum" if turn.index < 2 else "gather"))

    with pytest.raises(
        MeetingError, match=r"Replica 0 calls sum\(0\), and replica 2 calls gather\(2\)"
    ):
        take_turns([body] * 3, total)


@pytest.mark.parametrize(("early", "waiting"), [(0, 1), (1, 0)])
def test_one_that_returns_early_is_named(early, waiting):
    def body(turn):
        return None if turn.index == early else turn.ask(request(5))

    with pytest.raises(
        MeetingError,
        match=rf"Replica {waiting} waits in sum\(5\), and replica {early} has returned without it",
    ):
        take_turns([body] * 2, total)


def test_one_that_returns_after_a_meeting_is_named():
    def body(turn):
        turn.ask(request(1))
        return None if turn.index == 1 else turn.ask(request(2))

    with pytest.raises(MeetingError, match="Replica 0 waits .* replica 1 has returned"):
        take_turns([body] * 2, total)


def test_the_first_error_comes_out_and_the_others_are_unwound():
    log = []

    def body(turn):
        if turn.index == 1:
            raise LookupError("of replica 1")
        try:
            turn.ask(request(1))
        except Exception:
            log.append("the end of a replica is not an error of its code")
        finally:
            log.append(f"unwound {turn.index}")

    with pytest.raises(LookupError, match="of replica 1") as raised:
        take_turns([body] * 3, total)
    assert log == ["unwound 0"]  # Replica 2 never began.
    assert [entry.name for entry in raised.traceback][-1] == "body"


def test_a_replica_that_asks_again_while_it_is_unwound():
    log = []

    def body(turn):
        if turn.index == 1:
            raise LookupError
        try:
            turn.ask(request(1))
        finally:
            try:
                turn.ask(request(2))
            finally:
                log.append("unwound")

    with pytest.raises(LookupError):
        take_turns([body] * 2, total)
    assert log == ["unwound"]


def test_an_error_of_the_meeting_comes_out():
    def meet(requests):
        raise ZeroDivisionError("in the meeting")

    with pytest.raises(ZeroDivisionError, match="in the meeting"):
        take_turns([lambda turn: turn.ask(request(1))] * 2, meet)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_any_kind_of_error_comes_out(error):
    def body(turn):
        raise error

    with pytest.raises(error):
        take_turns([body] * 2, total)


def test_a_stuck_replica_is_given_up():
    free = threading.Event()

    def body(turn):
        if turn.index == 1:
            free.wait()
        return turn.ask(request(1))

    try:
        with pytest.raises(ReplicaDeadlineError, match="Replica 1 has run for 0.2 s without"):
            take_turns([body] * 2, total, seconds=0.2)
    finally:
        free.set()
        for thread in replica_threads():
            thread.join()


def test_a_replica_in_a_debugger_may_take_its_time():
    reader, writer = os.pipe()
    with os.fdopen(reader) as commands, os.fdopen(writer, "w") as user:

        def body(turn):
            answer = turn.index + 1
            debugger = pdb.Pdb(stdin=commands, stdout=io.StringIO(), nosigint=True, readrc=False)
            if turn.index == 1:
                debugger.set_trace()
            return turn.ask(request(answer))

        def type_continue():
            user.write("continue\n")
            user.flush()

        timer = threading.Timer(2.5, type_continue)
        timer.start()
        assert take_turns([body] * 2, total, seconds=1.0) == [3, 3]
        timer.join()


def test_an_interrupt_while_a_replica_runs():
    free = threading.Event()
    main = threading.main_thread().ident

    def body(turn):
        if turn.index == 1:
            signal.pthread_kill(main, signal.SIGINT)
            free.wait()
        return turn.ask(request(1))

    try:
        with pytest.raises(KeyboardInterrupt):
            take_turns([body] * 2, total)
    finally:
        free.set()
        for thread in replica_threads():
            thread.join()
    assert take_turns([lambda turn: turn.index] * 2, total) == [0, 1]
