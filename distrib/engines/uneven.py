"""Steps whose replicas see different shapes: written below."""
from typing import Any
def make_step(*args: Any) -> Any:
    raise NotImplementedError
