"""What the README shows is what runs."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = ["README.md", "docs/semantics.md", "CONTRIBUTING.md", "examples/mnist/README.md"]


def blocks():
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            yield pytest.param(block, id=f"{name}-{number}")


@pytest.mark.parametrize("block", list(blocks()))
def test_block_runs(block):
    exec(compile(block, "README", "exec"), {})


def test_the_swap_stands_before_line_20_of_the_readme():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert any("strategy = distrib.MirroredStrategy()" in line for line in lines[:20])


def test_links_lead_somewhere():
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
