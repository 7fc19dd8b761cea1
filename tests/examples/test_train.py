"""``examples/mnist/train.py``, run as a user runs it."""

import pathlib

import pytest

from tests.support.example_runs import REPO_ROOT, STRATEGIES, accuracy_of, result_of, run_script
from tests.support.fresh_python import run_python

SMALL = ("--train_examples=1200", "--num_devices=2")
NAMES = {
    "one_device": "<distrib.OneDeviceStrategy of 1 on CPU:0>",
    "mirrored": "<distrib.MirroredStrategy of 2 on CPU:0, CPU:1>",
    "central_storage": "<distrib.CentralStorageStrategy of 2 on CPU:0, CPU:1>",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns(strategy: str, digits_dir: pathlib.Path):
    accuracy, name = accuracy_of(
        "train.py", f"--strategy={strategy}", f"--data_dir={digits_dir}", *SMALL
    )
    assert name == NAMES[strategy]
    assert accuracy > 78  # After 20 steps; guessing gives 10.


@pytest.mark.slow
def test_batches_need_not_divide_and_replicas_may_be_empty(digits_dir: pathlib.Path):
    # A step of 120 examples, and one of 2, which leaves the third replica nothing.
    accuracy, name = accuracy_of(
        "train.py", f"--data_dir={digits_dir}", "--train_examples=122", "--num_devices=3"
    )
    assert name == "<distrib.MirroredStrategy of 3 on CPU:0, CPU:1, CPU:2>"
    assert accuracy > 15


@pytest.mark.needs("mnist")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_epochs_of_mnist_reach_98_5_percent(mnist_dir: pathlib.Path):
    accuracy, _ = accuracy_of(
        "train.py", "--strategy=mirrored", "--num_devices=2", f"--data_dir={mnist_dir}"
    )
    assert accuracy >= 98.5


def test_without_network_it_trains_on_the_digits_of_scikit_learn(tmp_path: pathlib.Path):
    nowhere = {"XDG_CACHE_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    done = run_script("train.py", "--strategy=mirrored", **nowhere)
    accuracy, _ = result_of(done)
    assert accuracy > 90
    assert "This uses the 1,797 digits of scikit-learn" in done.stderr


def test_a_folder_without_mnist_is_named(tmp_path: pathlib.Path):
    done = run_script("train.py", f"--data_dir={tmp_path}")
    assert done.returncode == 1
    assert f"in the MNIST folder {tmp_path}" in done.stderr


def test_arguments_that_are_no_flags_are_refused():
    done = run_script("train.py", "mirrored")
    assert done.returncode == 1
    assert "train.py takes flags only, and got ['mirrored']." in done.stdout + done.stderr


def test_an_unknown_strategy_is_refused_with_those_that_there_are():
    done = run_script("train.py", "--strategy=horovod")
    assert done.returncode == 1
    for strategy in STRATEGIES:
        assert strategy in done.stdout + done.stderr


@pytest.mark.parametrize("module", ["train", "custom_loop", "nnx_train"])
def test_an_import_looks_up_no_device(module: str):
    run_python(
        f"""
        import sys
        sys.path.insert(0, "examples/mnist")
        import {module}
        from distrib.platform.jax_compat import backends_initialized
        assert not backends_initialized()
        """
    )


def test_the_tutorial_stays_short():
    script = REPO_ROOT / "examples" / "mnist" / "train.py"
    assert len(script.read_text().splitlines()) < 150
