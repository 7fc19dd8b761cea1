import threading

import pytest

from distrib.context import stack
from distrib.context.stack import Frame


def test_the_default_frame_is_current_outside_of_every_block():
    assert stack.current_frame() is stack.default_frame()
    assert not stack.inside_scope()


def test_frames_nest_and_leave_in_order():
    outer, inner = Frame("outer"), Frame("inner")
    with stack.entered(outer) as entered:
        assert entered is outer
        with stack.entered(inner):
            assert stack.current_frame() is inner
            assert stack.inside_scope()
        assert stack.current_frame() is outer
    assert stack.current_frame() is stack.default_frame()


def test_a_frame_leaves_when_its_block_raises():
    with pytest.raises(KeyError), stack.entered(Frame("strategy")):
        raise KeyError("boom")
    assert stack.current_frame() is stack.default_frame()


def test_base_lies_under_the_blocks():
    base, block = Frame("base"), Frame("block")
    stack.set_base(base)
    try:
        assert stack.current_frame() is base
        assert not stack.inside_scope()
        with stack.entered(block):
            assert stack.current_frame() is block
        assert stack.current_frame() is base
    finally:
        stack.set_base(None)
    assert stack.current_frame() is stack.default_frame()


def test_each_thread_has_its_own_stack():
    seen = []
    stack.set_base(Frame("base"))
    try:
        with stack.entered(Frame("block")):
            thread = threading.Thread(target=lambda: seen.append(stack.current_frame()))
            thread.start()
            thread.join()
    finally:
        stack.set_base(None)
    assert seen == [stack.default_frame()]
