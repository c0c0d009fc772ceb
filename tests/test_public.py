"""What the package shows to the world, and how its rooms stand on each other."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import spartito as sp

ROOT = Path(sp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

FLOORS = [
    {"errors", "device", "log", "names", "_lazy"},
    {"registry"},
    {"cluster", "collectives", "data", "storage"},
    {"engine", "ps"},
    {"strategies", "checkpoint"},
    {"report"},
    {"training"},
    {"launch", "models", "recipes"},
    {"comparison", "doctor"},
    {"cli", "__main__"},
]
"""A room imports from its own floor and from those below."""

FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}

NEIGHBOURS = {
    ("collectives", "cluster"),
    ("recipes", "models"),
    ("__main__", "cli"),
}
"""Rooms of one floor that may know each other, one way."""


def module_name(path: Path) -> str:
    parts = ("spartito", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> Iterator[ModuleType]:
    yield sp
    for found in pkgutil.walk_packages([str(ROOT)], "spartito."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module of ours that a file imports when it runs, and whether at its import."""
    tree = ast.parse(path.read_text())
    only_types: set[ast.AST] = set()
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            only_types |= {part for child in node.body for part in ast.walk(child)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module and (ROOT.parent / node.module.replace(".", "/")).is_dir():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "spartito":
                yield name, node not in inside


def room(name: str) -> str:
    return [*name.split("."), ""][1]


def as_module(name: str) -> str:
    """The module that an imported name lives in."""
    while name != "spartito":
        place = ROOT.parent / name.replace(".", "/")
        if place.with_suffix(".py").exists():
            return name
        if (place / "__init__.py").exists():
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
    assert shown == set(names)


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


def test_every_room_has_its_floor() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert rooms - {"__init__"} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    own = room(module_name(path))
    if not own:  # the roof
        return
    for name, _ in imports(path):
        other = room(name)
        if other in ("", "__version__"):
            # Late and by name only: the package's own version.
            assert name in ("spartito", "spartito.__version__"), name
            continue
        if other == own:
            continue
        assert FLOOR[other] <= FLOOR[own], f"{own} imports {name}, which stands above it"
        if FLOOR[other] == FLOOR[own] and FLOOR[own]:
            assert (own, other) in NEIGHBOURS, f"{own} imports its neighbour {name}"


def test_the_parts_of_ps_meet_in_the_protocol_alone() -> None:
    allowed = {
        "protocol": {"protocol"},
        "scheduler": {"protocol", "scheduler"},
        "server": {"protocol", "server"},
        "client": {"protocol", "client"},
        "chief": {"protocol", "scheduler", "client"},
        "job": {"protocol", "scheduler", "server", "client", "chief"},
    }
    for path in (ROOT / "ps").rglob("*.py"):
        own = [*module_name(path).split("."), ""][2]
        used = {name.split(".")[2] for name, _ in imports(path) if name.startswith("spartito.ps.")}
        assert used <= allowed.get(own, set()), path


def test_no_module_needs_itself() -> None:
    graph = {
        module_name(path): {as_module(name) for name, at_once in imports(path) if at_once}
        for path in FILES
        if path != ROOT / "__init__.py"
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for other in graph.get(name, ()):
            if other not in (name, "spartito"):
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("package", ["report", "comparison/report"])
def test_the_report_reads_files_only(package: str) -> None:
    for path in (ROOT / package).glob("*.py"):
        for name, _ in imports(path):
            below = room(name) in {"report", "errors", "log", "names", "registry", "storage"}
            assert below or name.startswith("spartito.comparison.report"), (path, name)


def test_the_launcher_knows_no_training() -> None:
    for path in (ROOT / "launch").glob("*.py"):
        for name, at_once in imports(path):
            if at_once:
                assert room(name) in {"launch", "registry", "cluster", *FLOORS[0]}


@pytest.mark.parametrize(
    "module", ["spartito", "spartito.launch.supervisor", "spartito.launch.local", "spartito.cli"]
)
def test_quick_imports_bring_no_torch(module: str) -> None:
    heavy = "{'torch', 'numpy', 'PIL', 'matplotlib', 'tensorboard'}"
    check = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_file_is_too_long_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if (lines := len(path.read_text().splitlines())) > 420
    }
    assert long == {}
