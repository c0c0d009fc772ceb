"""Every public name has a docstring that a tool can render: Args, Returns, Raises, and types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe
import pytest

SRC = Path(__file__).parents[1] / "src"
PUBLIC = (
    "spartito",
    "spartito.data",
    "spartito.launch",
    "spartito.models",
    "spartito.training.callbacks",
    "spartito.training.metrics",
)
"""Packages whose ``__all__`` is what a user may import."""


@cache
def package() -> griffe.Module:
    found = griffe.load("spartito", search_paths=[SRC], docstring_parser="google")
    assert isinstance(found, griffe.Module)
    return found


def target(obj: griffe.Object | griffe.Alias) -> griffe.Object:
    return obj.final_target if isinstance(obj, griffe.Alias) else obj


def public_objects() -> Iterator[griffe.Object]:
    """Classes and functions that users import, each class followed by its public methods."""
    seen = set()
    for module in PUBLIC:
        holder = package()[module.removeprefix("spartito.")] if "." in module else package()
        for name in sorted(str(each) for each in holder.exports or ()):
            obj = target(holder[name])
            if obj.path in seen or obj.is_module or obj.is_attribute:
                continue
            seen.add(obj.path)
            yield obj
            if isinstance(obj, griffe.Class):
                for member in obj.all_members.values():
                    found = target(member)
                    ours = found.path.startswith("spartito.") and found.path not in seen
                    ours = ours and not member.name.startswith("_")
                    if ours and member.is_public and (found.is_function or is_property(found)):
                        seen.add(found.path)
                        yield found


def is_property(obj: griffe.Object) -> bool:
    return "property" in obj.labels


def documented(obj: griffe.Object) -> list[griffe.Docstring]:
    """The docstring of ``obj`` and those of what it overrides: together they tell all."""
    found = [obj.docstring]
    if isinstance(obj.parent, griffe.Class):
        bases = [base.members.get(obj.name) for base in obj.parent.mro()]
        found += [base.docstring for base in bases if base is not None]
    return [each for each in found if each is not None and each.value.strip()]


def sections(docstrings: list[griffe.Docstring]) -> dict[griffe.DocstringSectionKind, set[str]]:
    """The kinds of sections, each with the names that it lists."""
    found: dict[griffe.DocstringSectionKind, set[str]] = {}
    for section in (each for text in docstrings for each in text.parse("google", warnings=False)):
        names = section.value if isinstance(section.value, list) else []
        found.setdefault(section.kind, set()).update(
            str(getattr(each, "name", "") or getattr(each, "annotation", "")) for each in names
        )
    return found


def raised(function: griffe.Object) -> set[str]:
    """The errors that the body of ``function`` raises itself."""
    tree = ast.parse(_dedented("".join(f"{line}\n" for line in function.source.splitlines())))
    return {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id.endswith("Error")
    }


def _dedented(source: str) -> str:
    indent = len(source) - len(source.lstrip())
    return "\n".join(line[indent:] for line in source.splitlines())


def faults(obj: griffe.Object) -> list[str]:
    """What the documentation of ``obj`` lacks."""
    kinds = griffe.DocstringSectionKind
    docstrings = documented(obj)
    if not docstrings:
        return ["no docstring"]
    if is_property(obj):
        return []
    function = obj
    if isinstance(obj, griffe.Class) and "__init__" in obj.all_members:
        function = target(obj.all_members["__init__"])
        # Fields of a dataclass are told where they are declared.
        bases = [base.docstring for base in obj.mro() if "dataclass" in base.labels]
        docstrings = docstrings + documented(function) + [each for each in bases if each]
    listed = sections(docstrings)
    own = len(docstrings) == 1  # what it overrides may have more arguments
    wrong = []
    if isinstance(function, griffe.Function):
        given = [p for p in function.parameters if p.name not in ("self", "cls")]
        names = {p.name.lstrip("*") for p in given if not p.name.startswith("_")}
        kind_of_args = (kinds.parameters, kinds.other_parameters, kinds.attributes)
        told = {name.lstrip("*") for kind in kind_of_args for name in listed.get(kind, ())}
        if missing := names - told:
            wrong.append(f"Args lacks {sorted(missing)}")
        if own and (unknown := told - names - set(obj.all_members)):
            wrong.append(f"Args lists {sorted(unknown)}, which are no parameters")
        if untyped := [p.name for p in given if p.annotation is None]:
            wrong.append(f"no type for {untyped}")
    if isinstance(obj, griffe.Function):
        returns = str(obj.returns) not in ("None", "Self", "NoReturn")
        if returns and not {kinds.returns, kinds.yields} & set(listed):
            wrong.append("no Returns")
        if unsaid := raised(obj) - listed.get(kinds.raises, set()):
            wrong.append(f"Raises lacks {sorted(unsaid)}")
    return wrong


def all_faults() -> dict[str, list[str]]:
    return {obj.path: wrong for obj in public_objects() if (wrong := faults(obj))}


def checked(source: str) -> list[str]:
    with griffe.temporary_visited_module(source, docstring_parser="google") as module:
        return faults(target(module["work"]))


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def work() -> None: ...", "no docstring"),
        ('def work(x: int) -> None:\n    """Do it."""', "Args lacks ['x']"),
        ('def work() -> int:\n    """Do it."""', "no Returns"),
        (
            'def work() -> None:\n    """Do it."""\n    raise ValueError("x")',
            "Raises lacks ['ValueError']",
        ),
        ('def work(x) -> None:\n    """Do it.\n\n    Args:\n        x: It.\n    """', "no type"),
        (
            'def work() -> None:\n    """Do it.\n\n    Args:\n        x: It.\n    """',
            "no parameters",
        ),
    ],
)
def test_what_a_docstring_lacks_is_found(source: str, wrong: str) -> None:
    assert wrong in " ".join(checked(source))


def test_every_public_name_is_documented() -> None:
    wrong = all_faults()
    assert not wrong, "\n".join(f"{path}: {'; '.join(each)}" for path, each in wrong.items())
