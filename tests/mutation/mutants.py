"""Mutants of a file: small changes inside its functions, each of which some test should notice."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
ONLY_SAID = ("log", "warn", "print", "note", "info")
"""A call whose name has one of these writes words for people, which no mutant changes."""


PLAIN = ast.Name | ast.Attribute | ast.Call | ast.NamedExpr
"""A test of an ``if`` that has no change of its own, and is negated."""

Located = ast.expr | ast.stmt
_Change = tuple[str, Located, str]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    ``function`` is the qualified name of the function that it is in, ``span`` the bytes of the
    file that it replaces, and ``count`` tells equal changes of one function from each other.
    """

    path: str
    function: str
    span: tuple[int, int]
    before: str
    after: str
    count: int = 1

    @property
    def key(self) -> str:
        """What names the mutant, also after other parts of the file have changed."""
        again = f" ({self.count})" if self.count > 1 else ""
        return f"{self.path}: {self.function}: {self.before} -> {self.after}{again}"

    def apply(self, source: bytes) -> bytes:
        """The file with the change."""
        start, end = self.span
        return source[:start] + self.after.encode() + source[end:]

    def lines(self, source: bytes) -> tuple[int, int]:
        """The first and the last line of the file that the change is in."""
        first, last = (source.count(b"\n", 0, at) + 1 for at in self.span)
        return first, last


def mutants(root: Path, packages: Iterable[str]) -> list[Mutant]:
    """All mutants of the packages below ``root``."""
    files = sorted(file for name in packages for file in (root / name).rglob("*.py"))
    return [one for file in files for one in of_source(str(file.relative_to(root)), file)]


def sample(root: Path, found: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """The same ``count`` of them for a seed, of files below ``root``; each compiles.

    A change elsewhere replaces few of these.
    """

    def drawn(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()

    def compiles(mutant: Mutant) -> bool:
        try:
            compile(mutant.apply((root / mutant.path).read_bytes()), mutant.path, "exec")
        except (SyntaxError, ValueError):
            return False
        return True

    return list(islice(filter(compiles, sorted(found, key=drawn)), count))


def of_source(path: str, file: Path) -> list[Mutant]:
    """The mutants of one file."""
    source = file.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    made: list[Mutant] = []
    counts: Counter[Mutant] = Counter()
    for function, node, after in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )
        plain = Mutant(path, function, (0, 0), _worded(node), after)
        counts[plain] += 1
        mutant = replace(plain, span=span, count=counts[plain])
        if mutant.before != after:
            made.append(mutant)
    return made


def _changes(tree: ast.AST, name: str = "", inside: bool = False) -> Iterator[_Change]:
    """All changes below ``tree``: the function's name, what is replaced, and by what."""
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        is_class = isinstance(tree, ast.ClassDef)
        name = f"{name}.<locals>.{tree.name}" if inside else f"{name}.{tree.name}".lstrip(".")
        for part in tree.body:
            yield from _changes(part, name, inside=not is_class)
        return
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    if inside and isinstance(tree, ast.expr | ast.stmt):
        for after in _instead(tree):
            yield name, tree, after
    if inside and isinstance(tree, ast.If) and isinstance(tree.test, PLAIN):
        yield name, tree.test, f"(not {ast.unparse(tree.test)})"
    for child in _parts(tree):
        yield from _changes(child, name, inside)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The children of ``node`` that run and do not only word a message."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return
    if isinstance(node, ast.Expr) and (
        _is_said(node.value) or isinstance(node.value, ast.Constant)
    ):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "type_params"):
            yield from (x for x in (value if isinstance(value, list) else [value]) if _is_node(x))


def _is_node(value: object) -> bool:
    return isinstance(value, ast.AST)


def _is_said(node: ast.AST) -> bool:
    """Whether ``node`` is a call that writes words for people."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).lower()
    return any(word in name for word in ONLY_SAID)


def _instead(node: Located) -> Iterator[str]:
    """What may stand for ``node``."""
    changed = copy.deepcopy(node)
    match node, changed:
        case ast.Compare(ops=[op]), ast.Compare():
            changed.ops = [COMPARED[type(op)]()]
            yield f"({ast.unparse(changed)})"
        case ast.BinOp(op=op, left=left, right=right), ast.BinOp():
            worded = any(isinstance(x, ast.JoinedStr) or _is_text(x) for x in (left, right))
            if type(op) in COMPUTED and not worded:
                changed.op = COMPUTED[type(op)]()
                yield f"({ast.unparse(changed)})"
        case ast.BoolOp(op=op), ast.BoolOp():
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"({ast.unparse(changed)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand), _:
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)), _:
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)), _:
            yield str(value + 1)
        case ast.IfExp(test=test), ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), test)
            yield f"({ast.unparse(changed)})"
        case (ast.Expr(value=ast.Call() as call), _) if not _is_said(call):
            yield "pass"
        case (ast.AugAssign() | ast.Raise() | ast.Delete(), _):
            yield "pass"


def _worded(node: Located) -> str:
    """The code of ``node``, without the words of an error."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return f"raise {ast.unparse(node.exc.func)}"
    return ast.unparse(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
