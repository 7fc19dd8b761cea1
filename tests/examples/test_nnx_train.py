"""``examples/mnist/nnx_train.py`` under each strategy."""

import pathlib

import pytest

from tests.support.example_runs import STRATEGIES, accuracy_of


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns(strategy: str, digits_dir: pathlib.Path):
    accuracy, _ = accuracy_of(
        "nnx_train.py",
        f"--strategy={strategy}",
        f"--data_dir={digits_dir}",
        "--train_examples=1200",
        "--num_devices=2",
    )
    assert accuracy > 78  # After 20 steps; guessing gives 10.
