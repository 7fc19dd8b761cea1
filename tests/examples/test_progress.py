"""``examples/mnist/progress.py``: a bar on a terminal, lines elsewhere, all batches on both."""

import importlib
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mnist"
sys.path.insert(0, str(EXAMPLE))
progress = importlib.import_module("progress")


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)
    with caplog.at_level(logging.INFO, logger="absl"):
        assert list(progress.track("abc", 3, "Epoch 1")) == ["a", "b", "c"]
    assert caplog.messages == [
        "Epoch 1: 0 of 3 batches",
        "Epoch 1: 1 of 3 batches",
        "Epoch 1: 2 of 3 batches",
    ]


def test_a_short_epoch_says_nothing(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="absl"):
        assert list(progress.track(range(3), 3, "Epoch 1")) == [0, 1, 2]
    assert not caplog.messages


def test_on_a_terminal_there_is_a_bar():
    code = "import progress; print(sum(progress.track(range(5), 5, 'Epoch 7')))"
    outer, inner = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=EXAMPLE,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=inner,
            text=True,
            timeout=60,
            check=True,
        )
        shown = os.read(outer, 1 << 16).decode()
    finally:
        os.close(inner)
        os.close(outer)
    assert done.stdout == "10\n"
    assert "Epoch 7" in shown and "5/5" in shown
