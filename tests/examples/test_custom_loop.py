"""``examples/mnist/custom_loop.py``: the same numbers whatever the strategy, without Flax."""

import ast
import pathlib

import pytest

from tests.support.example_runs import REPO_ROOT, STRATEGIES, accuracy_of


@pytest.fixture(scope="module")
def accuracy_on_one_device(digits_dir: pathlib.Path) -> float:
    return accuracy_of(
        "custom_loop.py",
        "--strategy=one_device",
        f"--data_dir={digits_dir}",
        "--train_examples=1250",
    )[0]


def test_it_learns(accuracy_on_one_device: float):
    assert accuracy_on_one_device > 75  # After 22 steps; guessing gives 10.


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_three_replicas_learn_what_one_does(
    strategy: str, accuracy_on_one_device: float, digits_dir: pathlib.Path
):
    # The last batch has 50 examples: 17, 17 and 16. Nothing is random but weights and order, so
    # what differs is the rounding of sums, for which a few of the 10,000 answers may change.
    accuracy, _ = accuracy_of(
        "custom_loop.py",
        f"--strategy={strategy}",
        f"--data_dir={digits_dir}",
        "--train_examples=1250",
        "--num_devices=3",
    )
    assert accuracy == pytest.approx(accuracy_on_one_device, abs=0.05)


@pytest.mark.needs("mnist")
@pytest.mark.slow
def test_two_epochs_of_mnist_reach_97_percent(mnist_dir: pathlib.Path):
    accuracy, _ = accuracy_of("custom_loop.py", "--num_devices=2", f"--data_dir={mnist_dir}")
    assert accuracy >= 97


def test_it_needs_neither_flax_nor_optax():
    tree = ast.parse((REPO_ROOT / "examples" / "mnist" / "custom_loop.py").read_text())
    imported = [
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    ]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "distrib" in imported
    assert not {name.split(".")[0] for name in imported} & {"flax", "optax"}
