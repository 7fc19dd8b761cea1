"""Each benchmark runs and prints a ratio. No time is asserted: the machine may be shared."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

RATIO = re.compile(r": ours .*, reference .*, ratio \d+\.\d+ \(medians \d+\.\d+, minima \d+\.\d+\)")


def run_benchmark(repo_root: pathlib.Path, name: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *arguments],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def ratios_of(output: str) -> int:
    return sum(bool(RATIO.search(line)) for line in output.splitlines())


def test_run_overhead(repo_root, tmp_path):
    path = tmp_path / "results.json"
    output = run_benchmark(
        repo_root, "run_overhead", "--quick", "--profile", "--devices=2", f"--json={path}"
    )
    assert ratios_of(output) == 2
    assert "Own time a call under cProfile" in output
    results = json.loads(path.read_text())
    assert [result["name"] for result in results] == [
        "run, MLP, 2 CPU devices",
        "Python of a call, 200 variables",
    ]
    for result in results:
        assert result["rounds"] == 2
        assert result["ratio"] > 0
        assert 0 < result["ours"]["min"] <= result["ours"]["median"]


def test_input_loop(repo_root, tmp_path):
    path = tmp_path / "results.json"
    output = run_benchmark(
        repo_root, "input_loop", "--quick", "--models=mlp", "--devices=2", f"--json={path}"
    )
    assert ratios_of(output) == 1
    assert [result["name"] for result in json.loads(path.read_text())] == [
        "an epoch of 4 steps, MLP, 2 devices",
    ]


def test_import_time(repo_root, tmp_path):
    path = tmp_path / "results.json"
    output = run_benchmark(repo_root, "import_time", "--quick", f"--json={path}")
    assert ratios_of(output) == 1
    assert json.loads(path.read_text())[0]["looked_up_devices"] is False


def test_compressed_gradients(repo_root, tmp_path):
    path = tmp_path / "results.json"
    output = run_benchmark(
        repo_root,
        "compressed_gradients",
        "--quick",
        "--steps=2",
        "--algorithm=ring",
        f"--json={path}",
    )
    assert output.startswith("2 steps, 2 replicas, ring, 1 seeds:")
    results = {result["name"]: result for result in json.loads(path.read_text())}
    assert list(results) == ["none", "bfloat16", "int8", "int8, no feedback"]
    assert results["none"]["away"] == 0
    assert 0 < results["bfloat16"]["away"] < results["int8"]["away"] < 0.1
    assert all(0 <= result["accuracy"] <= 1 for result in results.values())


def test_tf_mirrored_without_tensorflow_times_ours(repo_root, tmp_path):
    """An interpreter without site-packages has no TensorFlow, wherever the tests run."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    output = run_benchmark(repo_root, "tf_mirrored", "--quick", f"--tf_python={python}")
    first, second = output.splitlines()
    assert first == f"{python} has no TensorFlow (see --tf_python): ours only."
    assert re.fullmatch(r"MLP step, 2 CPU devices: ours .* us \(min .*\), no reference", second)


@pytest.mark.slow
@pytest.mark.needs("tensorflow")
def test_tf_mirrored_with_tensorflow(repo_root):
    output = run_benchmark(repo_root, "tf_mirrored", "--quick")
    assert ratios_of(output) == 3


def test_gpu_check_says_plainly_that_there_is_no_gpu(repo_root):
    # The root's conftest has put JAX_PLATFORMS=cpu into the environment: no GPU is ever seen here.
    output = run_benchmark(repo_root, "gpu_check", "--quick")
    assert output == "There is no GPU that JAX can use on this machine: nothing was checked.\n"


@pytest.mark.slow
@pytest.mark.needs("mnist")
def test_gpu_check_runs_a_tiny_version_on_the_cpu(repo_root, mnist_dir):
    output = run_benchmark(
        repo_root, "gpu_check", "--quick", "--allow_cpu", f"--data_dir={mnist_dir}"
    )
    _, _, summary = output.partition("Summary")
    assert ratios_of(summary) == 3
    assert summary.count(": passed (") == 4
    assert summary.count("test accuracy") == 3


@pytest.mark.parametrize(
    ("ours", "reference", "ratio", "medians", "minima", "difference"),
    [
        ([2.0, 4.0, 6.0], [1.0, 4.0, 2.0], 2.0, 2.0, 2.0, 1.0),
        ([1.0, 9.0, 2.0], [2.0, 3.0, 2.0], 1.0, 1.0, 0.5, 0.0),
    ],
)
def test_the_figures_of_a_comparison(
    repo_root, monkeypatch, ours, reference, ratio, medians, minima, difference
):
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    import alternating

    compared = alternating.Comparison("x", ours, reference, most=1.0)
    assert compared.ratio == ratio
    assert compared.ratio_of_medians == medians
    assert compared.ratio_of_minima == minima
    assert compared.difference == difference
    assert compared.met is (ratio <= 1.0)


def test_both_are_timed_in_turn_and_each_is_first_in_half_of_the_rounds(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    import alternating

    order = []

    def seconds(name: str, result: float):
        def run(calls: int) -> float:
            order.append((name, calls))
            return result * calls

        return run

    compared = alternating.alternate(
        "x", seconds("ours", 3.0), seconds("reference", 2.0), rounds=2, calls=20
    )
    assert order[:2] == [("ours", 2), ("reference", 2)]  # the warming up
    assert [name for name, _ in order[2:]] == ["ours", "reference", "reference", "ours"]
    assert compared.ratio == 1.5
    assert compared.met is None


def test_many_steps(repo_root, tmp_path):
    path = tmp_path / "results.json"
    output = run_benchmark(
        repo_root, "many_steps", "--quick", "--devices=2", "--batches=32", f"--json={path}"
    )
    assert ratios_of(output) == 1
    assert [result["name"] for result in json.loads(path.read_text())] == [
        "4 times 4 steps, batch 32, 2 CPU devices",
    ]


@pytest.mark.parametrize("engine", ["compiled", "threads, jitted gradient"])
def test_uneven(repo_root, tmp_path, engine):
    path = tmp_path / "results.json"
    output = run_benchmark(
        repo_root,
        "uneven",
        "--quick",
        "--models=mlp",
        "--devices=2",
        f"--engine={engine}",
        f"--json={path}",
    )
    assert re.match(
        rf"{engine}, MLP, 2 devices: ordinary .* ms; first .* steps, further .* steps, later "
        r".* steps \(targets: first at most 20 (met|MISSED), later at most 5 (met|MISSED)\)",
        output,
    )
    (result,) = json.loads(path.read_text())
    assert min(result[name] for name in ("ordinary", "first", "further", "later")) > 0
