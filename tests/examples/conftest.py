"""The data that the examples are run with."""

import pathlib

import pytest

from tests.support.example_runs import digits_folder


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of MNIST files: the real MNIST where it stands beside the checkout."""
    return digits_folder(tmp_path_factory.mktemp("digits"))
