"""The house rules of the design, checked on the source of every module of ``distrib``.

``LAYERS`` is the design's table. Imports point down only; inside a function, under
``TYPE_CHECKING`` and through ``import_module`` they count like any other. Private attributes
(``obj._name``) are ruff's SLF rule; this file looks at what ruff does not.
"""

import ast
import dataclasses
import importlib
import pathlib
from collections.abc import Iterator

import pytest

PACKAGE_DIR = pathlib.Path(__file__).resolve().parent.parent / "distrib"
ROOT = "distrib"

# Every package and module directly beneath distrib, those still to be written too.
LAYERS = {
    ROOT: 12,
    "experimental": 11,
    "estimator": 10,
    "viz": 10,
    "launch": 10,
    "coordinator": 9,
    "train": 9,
    "strategies": 8,
    "ps": 7,
    "engines": 6,
    "input": 6,
    "cluster": 6,
    "metrics": 6,
    "variables": 5,
    "random": 5,
    "nn": 5,
    "collectives": 4,
    "context": 3,
    "values": 2,
    "cluster_resolver": 2,
    "platform": 1,
    "config": 1,
    "errors": 0,
    "reduce_op": 0,
    "deadline": 0,
    "render": 0,
    "logging": 0,
}
# One layer, yet an import: the public switches are a face of what platform does.
SAME_LAYER_ALLOWED = {("config", "platform")}
# Whoever adds a strategy answers the four questions in one file: none imports another.
STRATEGY_FILES = {
    f"distrib.strategies.{name}"
    for name in (
        "one_device",
        "mirrored",
        "central_storage",
        "multi_worker_mirrored",
        "parameter_server",
        "model_parallel",
        "fully_sharded",
    )
}
# The cluster resolvers run in launchers, where JAX may not even be installed.
WITHOUT_JAX = {"cluster_resolver"}
# The only imports allowed inside functions, and only there: `import distrib` stays light.
OPTIONAL_THIRD_PARTY = (
    "IPython",
    "flax.nnx",
    "grain",
    "kubernetes",
    "matplotlib",
    "orbax",
    "rich",
    "tensorboardX",
    "tensorflow",
    "torch",
)
JAX_COMPAT = "distrib.platform.jax_compat"
MOST_LINES = 400
# Path beneath distrib/ and the reason why the file may be longer. Prefer splitting the file.
LONG_FILES: dict[str, str] = {}
FORBIDDEN_STEMS = {"util", "utils", "misc", "common", "helper", "helpers", "lib"}


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its path beneath ``distrib/`` and its text."""

    name: str
    path: str
    source: str

    @property
    def unit(self) -> str:
        """The package or module directly beneath distrib that this one belongs to."""
        return unit_of(self.name)

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=self.path)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: ``names`` are what a ``from`` import takes out of it."""

    target: str
    names: tuple[str, ...]
    line: int
    in_function: bool


def unit_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ROOT


def module_name(path: str) -> str:
    parts = [ROOT, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def load(files: dict[str, str]) -> dict[str, Module]:
    """Return the modules of a package given as path beneath ``distrib/`` -> source."""
    modules = (Module(module_name(path), path, source) for path, source in files.items())
    return {module.name: module for module in modules}


def imports(module: Module, known: set[str]) -> Iterator[Import]:
    """Yield every import of a module, wherever it stands, submodules resolved by ``known``."""
    package = module.name if module.path.endswith("__init__.py") else module.name.rpartition(".")[0]
    stack: list[tuple[ast.AST, bool]] = [(module.tree, False)]
    while stack:
        node, in_function = stack.pop()
        inner = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack.extend((child, inner) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, in_function)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                if deeper in known or (base == ROOT and alias.name in LAYERS):
                    yield Import(deeper, (), node.lineno, in_function)
                else:
                    yield Import(base, (alias.name,), node.lineno, in_function)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            called = called.id if isinstance(called, ast.Name) else called
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield Import(str(argument.value), (), node.lineno, in_function)


def all_imports(modules: dict[str, Module]) -> Iterator[tuple[Module, Import]]:
    known = set(modules)
    for module in modules.values():
        for each in imports(module, known):
            yield module, each


def is_ours(name: str) -> bool:
    return name == ROOT or name.startswith(f"{ROOT}.")


def is_optional(each: Import) -> bool:
    spellings = {each.target, *(f"{each.target}.{name}" for name in each.names)}
    return any(
        spelling == optional or spelling.startswith(f"{optional}.")
        for spelling in spellings
        for optional in OPTIONAL_THIRD_PARTY
    )


# The checks: each takes modules and yields what is wrong with them, one line a fault.


def unplaced_modules(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if module.unit not in LAYERS:
            yield f"{module.path}: {module.unit!r} has no layer; add it to the design and to LAYERS"


def upward_imports(modules: dict[str, Module]) -> Iterator[str]:
    for module, each in all_imports(modules):
        if not is_ours(each.target) or unit_of(each.target) == module.unit:
            continue
        here, there = LAYERS.get(module.unit, -1), LAYERS.get(unit_of(each.target), 99)
        if there >= here and (module.unit, unit_of(each.target)) not in SAME_LAYER_ALLOWED:
            yield (
                f"{module.path}:{each.line}: layer {here} imports {each.target} of layer {there}; "
                "imports point down only"
            )


def strategies_importing_each_other(modules: dict[str, Module]) -> Iterator[str]:
    for module, each in all_imports(modules):
        if module.name in STRATEGY_FILES and each.target in STRATEGY_FILES:
            yield f"{module.path}:{each.line}: a strategy imports {each.target}; compose instead"


def imports_inside_functions(modules: dict[str, Module]) -> Iterator[str]:
    for module, each in all_imports(modules):
        lazy_namespace = module.name == ROOT and is_ours(each.target)
        if each.in_function and not is_optional(each) and not lazy_namespace:
            yield f"{module.path}:{each.line}: {each.target} is imported inside a function"


def eager_optional_imports(modules: dict[str, Module]) -> Iterator[str]:
    for module, each in all_imports(modules):
        if is_optional(each) and not each.in_function:
            yield f"{module.path}:{each.line}: {each.target} is optional; import it where used"


def private_names_of_others(modules: dict[str, Module]) -> Iterator[str]:
    for module, each in all_imports(modules):
        parts = [*each.target.split("."), *each.names]
        private = [part for part in parts if part.startswith("_") and not part.startswith("__")]
        if private and is_ours(each.target):
            yield f"{module.path}:{each.line}: {private[0]} is private to the file that defines it"


def private_jax(modules: dict[str, Module]) -> Iterator[str]:
    for module, each in all_imports(modules):
        parts = [*each.target.split("."), *each.names]
        private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        if private and parts[0] in ("jax", "jaxlib") and module.name != JAX_COMPAT:
            yield f"{module.path}:{each.line}: {'.'.join(parts)} belongs in {JAX_COMPAT}"


def jax_where_it_must_not_be(modules: dict[str, Module]) -> Iterator[str]:
    for module, each in all_imports(modules):
        if module.unit in WITHOUT_JAX and each.target.split(".")[0] in ("jax", "jaxlib", "flax"):
            yield f"{module.path}:{each.line}: {module.unit} must work without JAX"


def import_cycles(modules: dict[str, Module]) -> Iterator[str]:
    """Yield one line for each import that closes a cycle of modules (depth-first search)."""
    graph = {name: set[str]() for name in modules}
    for module, each in all_imports(modules):
        if each.target in graph and each.target != module.name:
            graph[module.name].add(each.target)
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield "cycle: " + " -> ".join([*path[path.index(name) :], name])
            return
        if name in finished:
            return
        for target in sorted(graph[name]):
            yield from visit(target, [*path, name])
        finished.add(name)

    for name in sorted(graph):
        yield from visit(name, [])


def missing_docstrings(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if not ast.get_docstring(module.tree):
            yield f"{module.path}: no module docstring"


def assert_statements(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert):
                yield f"{module.path}:{node.lineno}: raise one of distrib.errors, not assert"


def lengths(modules: dict[str, Module]) -> Iterator[tuple[str, int]]:
    for module in modules.values():
        yield module.path, len(module.source.splitlines())


def long_files(modules: dict[str, Module]) -> Iterator[str]:
    for path, count in lengths(modules):
        if count > MOST_LINES and path not in LONG_FILES:
            yield f"{path}: {count} lines; name the second concept in it and split"


def empty_names(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for part in pathlib.PurePosixPath(module.path).with_suffix("").parts:
            if part in FORBIDDEN_STEMS or part.endswith(("_utils", "_util", "_helpers", "_lib")):
                yield f"{module.path}: {part!r} names no concept"


def statements_in_root(modules: dict[str, Module]) -> Iterator[str]:
    """The root only names things: imports, constants, and the lazy ``__getattr__``/``__dir__``."""
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    for module in modules.values():
        if module.name != ROOT:
            continue
        for node in module.tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
            # `if TYPE_CHECKING:` tells type checkers the names of the lazy namespaces.
            typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            if not (isinstance(node, allowed) or docstring or lazy or typing):
                yield f"{module.path}:{node.lineno}: the root holds names only, no logic"


CHECKS = [
    unplaced_modules,
    upward_imports,
    strategies_importing_each_other,
    imports_inside_functions,
    eager_optional_imports,
    private_names_of_others,
    private_jax,
    jax_where_it_must_not_be,
    import_cycles,
    missing_docstrings,
    assert_statements,
    long_files,
    empty_names,
    statements_in_root,
]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    files = {
        path.relative_to(PACKAGE_DIR).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE_DIR.rglob("*.py"))
    }
    assert "__init__.py" in files
    return load(files)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_the_rule(check, modules):
    faults = list(check(modules))
    assert not faults, "\n" + "\n".join(faults)


def test_every_exception_is_still_needed(modules):
    """A file that was split leaves the table of long files."""
    long = {path for path, count in lengths(modules) if count > MOST_LINES}
    assert set(LONG_FILES) <= long


@pytest.mark.parametrize("name", ["distrib", "distrib.experimental"])
def test_public_names_are_sorted_and_resolve(name):
    namespace = importlib.import_module(name)
    assert list(namespace.__all__) == sorted(set(namespace.__all__))
    missing = [public for public in namespace.__all__ if not hasattr(namespace, public)]
    assert not missing


# A check that never fails proves nothing: each is shown one package that breaks its rule.
DOC = '"""Say what this is."""\n'
BROKEN = [
    (unplaced_modules, {"gadgets/x.py": DOC}),
    (upward_imports, {"context/x.py": DOC + "from distrib.strategies import mirrored"}),
    (upward_imports, {"context/x.py": DOC + "from distrib import strategies"}),
    (upward_imports, {"context/x.py": DOC + "import distrib"}),
    (upward_imports, {"context/x.py": DOC + "from distrib import Variable"}),
    (upward_imports, {"context/x.py": DOC + "from ..strategies import mirrored"}),
    (upward_imports, {"context/x.py": DOC + "from .. import strategies"}),
    (upward_imports, {"input/x.py": DOC + "from distrib.engines import lift"}),
    (upward_imports, {"platform/x.py": DOC + "import distrib.config"}),
    (upward_imports, {"values/x.py": DOC + "def f():\n  from distrib import variables"}),
    (upward_imports, {"values/x.py": DOC + "if TYPE_CHECKING:\n  import distrib.variables"}),
    (upward_imports, {"values/x.py": DOC + "importlib.import_module('distrib.variables')"}),
    (
        strategies_importing_each_other,
        {
            "strategies/mirrored.py": DOC + "from distrib.strategies import one_device",
            "strategies/one_device.py": DOC,
        },
    ),
    (imports_inside_functions, {"values/x.py": DOC + "def f():\n  import jax"}),
    (imports_inside_functions, {"engines/x.py": DOC + "def f():\n  from distrib import errors"}),
    (eager_optional_imports, {"viz/x.py": DOC + "from matplotlib import pyplot"}),
    (eager_optional_imports, {"engines/x.py": DOC + "from flax import nnx"}),
    (private_names_of_others, {"engines/x.py": DOC + "from distrib.values.x import _y"}),
    (private_names_of_others, {"engines/x.py": DOC + "from distrib.engines.z import _y"}),
    (private_names_of_others, {"engines/x.py": DOC + "from distrib.values._x import y"}),
    (private_jax, {"engines/x.py": DOC + "from jax._src import core"}),
    (private_jax, {"engines/x.py": DOC + "from jax import _src"}),
    (jax_where_it_must_not_be, {"cluster_resolver/x.py": DOC + "import jax.numpy as jnp"}),
    (
        import_cycles,
        {
            "values/x.py": DOC + "from distrib.values import y",
            "values/y.py": DOC + "from distrib.values.z import a",
            "values/z.py": DOC + "def f():\n  from distrib.values import x",
        },
    ),
    (
        import_cycles,
        {
            "values/__init__.py": DOC + "from distrib.values.x import a",
            "values/x.py": DOC + "from distrib.values import b",
        },
    ),
    (missing_docstrings, {"values/x.py": "a = 1"}),
    (assert_statements, {"values/x.py": DOC + "def f(a):\n  assert a"}),
    (long_files, {"values/x.py": DOC + "a = 1\n" * MOST_LINES}),
    (empty_names, {"values/utils.py": DOC}),
    (empty_names, {"helpers/x.py": DOC}),
    (empty_names, {"input/input_lib.py": DOC}),
    (statements_in_root, {"__init__.py": DOC + "def f(): pass"}),
]
SOUND = {
    "__init__.py": DOC + "from distrib.strategies import m\ndef __getattr__(n):\n"
    "  return importlib.import_module('distrib.viz')",
    "config.py": DOC + "from distrib.platform import devices",
    "platform/devices.py": DOC + "from distrib import errors\nfrom jax.sharding import Mesh",
    "platform/jax_compat.py": DOC + "from jax._src import core",
    "values/__init__.py": DOC + "from distrib.values.x import a",
    "values/x.py": DOC + "from . import y\nfrom distrib.values.y import f",
    "values/y.py": DOC + "def f():\n  import matplotlib.pyplot",
    "viz/__init__.py": DOC,
}


@pytest.mark.parametrize(("check", "files"), BROKEN)
def test_the_check_finds_the_fault(check, files):
    assert list(check(load(files)))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_passes_a_sound_package(check):
    assert not list(check(load(SOUND)))
