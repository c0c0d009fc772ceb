"""What the package shows to the world, and which of its packages may import which."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import spartito as sp

ROOT = Path(sp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = [
    {
        "aside",
        "errors",
        "system",
        "notes",
        "names",
        "numeric",
        "decoders",
        "failpoints",
        "folders",
        "forks",
        "heartbeat",
        "late_compiler",
        "life",
        "packages",
        "status",
        "threads",
        "urls",
        "waiting",
        "wire",
        "_lazy",
    },
    {"registry"},
    {"declared"},
    {"accelerators", "fingerprints"},
    {"cluster", "collectives", "data", "storage"},
    {"backend"},
    {"ps.protocol"},
    {"engine", "ps.scheduler", "ps.server", "ps.client", "checkpoint"},
    {"ps.chief", "mesh", "outer"},
    {"ps.job", "ps"},
    {"pipeline"},
    {"steps"},
    {"strategies"},
    {"report"},
    {"training"},
    {"launch", "models", "recipes"},
    {"comparison", "doctor", "chaos", "planning"},
    {"cli", "__main__"},
    {"extend"},
]
"""Packages and modules by layer, lowest first: each imports from itself and from those below.

A module belongs to the longest name here that its own begins with.
"""

LAYER = {package: number for number, layer in enumerate(LAYERS) for package in layer}

NEIGHBOURS = {
    ("collectives", "cluster"),
    ("data", "cluster"),
    ("data", "storage"),
    ("planning", "comparison"),
    ("recipes", "models"),
    ("ps.server", "engine"),
}
"""Packages of one layer that may import each other, one way; so may those of the lowest."""

READS_FILES = {"report", "storage", "registry", "declared", *LAYERS[0]}
ONLY = {
    "launch": {"launch", "cluster", "registry", "declared", *LAYERS[0]},
    "report": READS_FILES,
    "comparison.report": {"comparison.report", *READS_FILES},
}
"""What a package may import at all, where that is less than what is below it."""

LIGHT = {
    "launch",
    "chaos",
    "comparison",
    "doctor",
    "planning",
    "cli",
    "__main__",
    "cluster",
    "registry",
    "declared",
    *LAYERS[0],
}
"""Packages that import none of `HEAVY`, nor a module of ours that does: they start at once."""

HEAVY = {"torch", "numpy", "PIL", "matplotlib", "tensorboard"}


def module_name(path: Path) -> str:
    parts = ("spartito", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> Iterator[ModuleType]:
    yield sp
    for found in pkgutil.walk_packages([str(ROOT)], "spartito."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def imports(path: Path, *, of: str = "spartito") -> Iterator[tuple[str, bool]]:
    """Every module ``of`` a package that a file imports, and whether at its import."""
    return ((name, at_once) for name, at_once in all_imports(path) if name.split(".")[0] == of)


@cache
def all_imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports but for its types, and whether at its import."""
    found = list[tuple[str, bool]]()

    def visit(node: ast.AST, at_once: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts: Sequence[ast.AST] = node.orelse
        else:
            parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module and (ROOT.parent / node.module.replace(".", "/")).is_dir():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend((name, at_once) for name in names)
        elif not isinstance(node, ast.expr):
            at_once = at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for part in parts:
                visit(part, at_once)

    visit(ast.parse(path.read_text()), True)
    return found


def package_of(name: str, among: Collection[str] = LAYER) -> str:
    """The longest of the names ``among`` that a module's begins with; "" for `spartito` itself."""
    parts = name.split(".")[1:]
    while parts:
        if ".".join(parts) in among:
            return ".".join(parts)
        parts.pop()
    return ""


@cache
def as_module(name: str) -> str:
    """The module that an imported name lives in."""
    while name != "spartito":
        file = ROOT.parent / name.replace(".", "/")
        if file.with_suffix(".py").exists():
            return name
        if (file / "__init__.py").exists():
            return name
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("package", [sp, sp.data, sp.callbacks], ids=lambda p: p.__name__)
def test_all_is_sorted_complete_and_there(package: ModuleType) -> None:
    names = package.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(package, name) is not None
    tree = ast.parse(Path(str(package.__file__)).read_text())
    shown = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spartito")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    shown -= {"install_excepthook"}
    shown |= {  # a package that can be called, as its type says
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert shown == set(names)


@pytest.mark.parametrize(
    "package",
    [sp, sp.data, sp.callbacks, sp.metrics, sp.models, sp.launch, sp.extend],
    ids=lambda package: package.__name__,
)
def test_the_tab_key_shows_the_api_alone(package: ModuleType) -> None:
    import spartito.storage  # noqa: F401 - what was imported once is an attribute ever after

    assert sorted(name for name in dir(package) if name[0] != "_") == sorted(package.__all__)


def test_names_that_are_not_there() -> None:
    for package in (sp, sp.data):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
            _ = package.Nothing


def test_everything_public_says_what_it_is() -> None:
    silent = []
    for module in modules():
        if not inspect.getdoc(module):
            silent.append(module.__name__)
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", "") != module.__name__:
                continue
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            if not _says(thing):
                silent.append(f"{module.__name__}.{name}")
            if inspect.isclass(thing):
                for part, found in vars(thing).items():
                    call = inspect.isfunction(found) or isinstance(
                        found, property | classmethod | staticmethod
                    )
                    if (
                        call
                        and not part.startswith("_")
                        and not inspect.getdoc(getattr(thing, part))
                    ):
                        silent.append(f"{module.__name__}.{name}.{part}")
    assert silent == []


def _says(thing: object) -> bool:
    """Whether it has words of its own: a dataclass' signature is none."""
    words = inspect.getdoc(thing) or ""
    return bool(words) and not words.startswith(f"{getattr(thing, '__name__', '')}(")


def test_every_module_is_in_a_layer() -> None:
    names = {module_name(path) for path in FILES} - {"spartito"}
    assert {name for name in names if not package_of(name)} == set()
    assert {package_of(name) for name in names} == set(LAYER)


def wrong_imports(own: str, imported: Collection[str]) -> list[str]:
    """What of ``imported`` a module named ``own`` may not import."""
    layer = LAYER[package_of(own)]
    wrong = []
    for name in imported:
        if name in ("spartito", "spartito.__version__"):
            continue
        package, other = package_of(own), package_of(name)
        if not other or LAYER[other] > layer:
            wrong.append(f"{own} imports {name}, which is above it")
        elif LAYER[other] == layer > 0 and other != package and (package, other) not in NEIGHBOURS:
            wrong.append(f"{own} imports {name}, which is beside it")
        only = package_of(own, ONLY)
        if only and not package_of(name, ONLY[only]):
            wrong.append(f"{own} imports {name}; {only} may not")
    return wrong


def test_imports_go_down_only() -> None:
    wrong: list[str] = []
    for path in FILES:
        if path != ROOT / "__init__.py":
            wrong += wrong_imports(module_name(path), [name for name, _ in imports(path)])
    assert wrong == []


@pytest.mark.parametrize(
    ("own", "name", "wrong"),
    [
        ("spartito.data.reading.loader", "spartito.training.loops.training_loop", "above"),
        ("spartito.ps.server.store", "spartito.ps.client.link", "beside"),
        ("spartito.wire.frames", "spartito.ps.job", "above"),
        ("spartito.launch.hosts.job", "spartito.data.reading.loader", "launch may not"),
        ("spartito.cli.run", "spartito.made_up", "above"),
        ("spartito.ps.server.store", "spartito.wire.frames", ""),
        ("spartito.launch.hosts.job", "spartito.launch.processes.local", ""),
        ("spartito.recipes.mnist", "spartito.models.mnist", ""),
    ],
)
def test_an_import_that_goes_up_is_found(own: str, name: str, wrong: str) -> None:
    found = wrong_imports(own, [name])
    assert bool(found) == bool(wrong)
    assert wrong in "".join(found)


@cache
def graph() -> dict[str, set[str]]:
    """What each module of ours imports when it is imported, packages around it among that."""
    return {
        module_name(path): {as_module(name) for name, at_once in imports(path) if at_once}
        for path in FILES
        if path != ROOT / "__init__.py"
    }


def test_quick_modules_import_nothing_heavy() -> None:
    heavy = {
        module_name(path)
        for path in FILES
        for name in HEAVY
        if any(at_once for _, at_once in imports(path, of=name))
    }
    assert len(heavy) > 20
    modules = graph()
    for name in modules:
        if package_of(name, LIGHT):
            seen, new = {name}, [name]
            while new:
                parents = [part.rpartition(".")[0] for part in new]
                new = sorted({x for y in new for x in modules.get(y, ())}.union(parents) - seen)
                seen.update(new)
            assert not seen & heavy, name


def test_no_module_needs_itself() -> None:
    modules = graph()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for other in modules.get(name, ()):
            if other not in (name, "spartito"):
                visit(other, (*trail, name))
        done.add(name)

    for name in modules:
        visit(name, ())


@pytest.mark.parametrize(
    "module",
    [
        "spartito",
        "spartito.launch.processes.supervisor",
        "spartito.launch.processes.local",
        "spartito.cli",
    ],
)
def test_quick_imports_bring_no_torch(module: str) -> None:
    check = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
