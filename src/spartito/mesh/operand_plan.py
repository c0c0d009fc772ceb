"""What is done with the operands of an operation whose dims have labels.

A rule names the dims of its operands and of its result by letters, as einsum does: a linear layer
is ``bi,oi->bo``. A dim that is cut along an axis cuts its letter there for all operands: those
that have the letter are cut too, those that lack it enter a sharded computation, and where the
result lacks it, it is a sum over the axis. A letter in ``whole`` cannot be cut in this operation,
as the dim that a softmax is over: it is gathered. All of it is decided once for each kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from spartito.mesh import collectives
from spartito.mesh.collectives import Axis
from spartito.mesh.sharded_tensor import Axes, Sharded, made
from spartito.mesh.spec import Blocks, Spec, spec

LETTERS = "bcdefghijklmnopqrstuvwxyzBCDEFGHIJKLMNOPQRSTUVWXYZ"
NOTHING = " "
"""The letter of a dim of size 1 that is repeated: it is never cut."""


class Move(NamedTuple):
    """One collective on an operand: the function, the axis, and where."""

    do: Callable[..., Tensor]
    axis: str
    where: tuple[Any, ...]


class Plan(NamedTuple):
    """What is done with each operand, and how the result lies.

    Attributes:
        moves: For each operand.
        out: How the result of the local operation lies.
        sums: The axes over which it is still to be summed.
        cut: Letter, axis and blocks of each letter that is cut.
    """

    moves: tuple[tuple[Move, ...], ...]
    out: Spec
    sums: tuple[str, ...]
    cut: tuple[tuple[str, str, Blocks], ...]

    def sizes(self, axes: Axes) -> dict[str, int]:
        """Into how many parts each letter is cut."""
        return {letter: axes[axis].size for letter, axis, _ in self.cut}


@cache
def plan(
    specs: tuple[Spec | None, ...],
    letters: tuple[str, ...],
    out: str,
    whole: str = "",
    first: tuple[int, ...] = (),
) -> Plan:
    """Decide.

    Args:
        specs: How each operand is cut; None for a plain one.
        letters: The letters of the dims of each operand.
        out: Those of the result.
        whole: The letters that cannot be cut.
        first: The operands whose letters are cut rather than those of others, by number; the
            others follow in order. Only these, where the last number is -1.
    """
    only = bool(first) and first[-1] == -1
    order = [n for n in first if n >= 0]
    order += [n for n in range(len(specs)) if n not in order] if not only else []
    chosen: dict[str, tuple[str, Blocks]] = {}  # by axis
    taken: set[str] = set(whole + NOTHING)
    for number in order:
        here = specs[number]
        for dim, axis in enumerate(here.dims if here else ()):
            letter = letters[number][dim]
            if here and axis is not None and axis not in chosen and letter not in taken:
                chosen[axis] = letter, here.blocks_of(dim)
                taken.add(letter)
    axes = dict.fromkeys(axis for here in specs if here for axis in here.axes)
    moves = tuple(
        tuple(_moves(here, names, axes, chosen)) for here, names in zip(specs, letters, strict=True)
    )
    dims: list[str | None] = [None] * len(out)
    blocks: list[Blocks] = [()] * len(out)
    sums = []
    for axis, (letter, parts) in chosen.items():
        if letter in out:
            dims[out.index(letter)], blocks[out.index(letter)] = axis, parts
        else:
            sums.append(axis)
    cut = tuple((letter, axis, parts) for axis, (letter, parts) in chosen.items())
    return Plan(moves, spec(tuple(dims), (), tuple(blocks)), tuple(sums), cut)


def _moves(
    here: Spec | None,
    letters: str,
    axes: Sequence[str] | dict[str, None],
    chosen: dict[str, tuple[str, Blocks]],
) -> list[Move]:
    gathers, others = [], []
    for axis in axes:
        letter, blocks = chosen.get(axis, (None, ()))
        now = here.dims.index(axis) if here and axis in here.dims else None
        goal = letters.index(letter) if letter is not None and letter in letters else None
        if now is not None and now == goal and here and here.blocks_of(now) == blocks:
            continue
        enters = letter is not None and goal is None
        if now is not None and here:
            do = collectives.gather_enter if enters else collectives.gather
            gathers.append(Move(do, axis, (now, here.blocks_of(now))))
        elif enters:
            others.append(Move(collectives.enter, axis, ()))
        if goal is not None:
            others.append(Move(collectives.cut, axis, (goal, blocks)))
    return gathers + others


def spec_of(value: Any) -> Spec | None:
    """How an operand is cut; None for a plain tensor."""
    return value.spec if isinstance(value, Sharded) else None


def axes_of(*values: Any) -> Axes:
    """The axes of the first sharded operand."""
    return next(value.axes for value in values if isinstance(value, Sharded))


def moved(operands: Sequence[Any], decided: Plan, axes: Axes) -> list[Any]:
    """The local tensors of the operands, once they lie as planned."""
    found = []
    for value, moves in zip(operands, decided.moves, strict=True):
        local = value.local if isinstance(value, Sharded) else value
        for move in moves if value is not None else ():
            local = collectives.once(move.do, local, axes[move.axis], move.where)
        found.append(local)
    return found


def finished(local: Tensor, decided: Plan, axes: Axes) -> Tensor:
    """The result of a local operation, summed where it is to be."""
    for name in decided.sums:
        local = collectives.reduce(local, axes[name])
    return made(local, decided.out, axes) if any(decided.out.dims) else local


def summed(local: Tensor, decided: Plan, axes: Axes) -> Tensor:
    """As `finished`, of a product: a large sum stays cut by rows, as all that follows it.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022):
    what every task would repeat of a sum (biases, residuals, norms, dropout) each does for its
    rows, and as many bytes cross.
    """
    out = decided.out
    for name in decided.sums:
        axis = axes[name]
        dim = _rows(local, out, axis)
        if dim is None:
            local = collectives.reduce(local, axis)
        else:
            local, out = collectives.reduce_cut(local, axis, dim), out.replace(dim, name)
    return made(local, out, axes) if any(out.dims) else local


def _rows(local: Tensor, out: Spec, axis: Axis) -> int | None:
    """The dim of which a sum keeps its part: the first that divides; None for a small sum."""
    if local.nbytes < axis.rows_from:
        return None
    dims = range(local.dim() - 1)
    return next((d for d in dims if not out.dims[d] and local.shape[d] % axis.size == 0), None)


def run(
    function: Callable[..., Tensor],
    operands: Sequence[Any],
    letters: Sequence[str],
    out: str,
    whole: str = "",
    first: tuple[int, ...] = (),
    end: Callable[[Tensor, Plan, Axes], Tensor] = finished,
) -> Tensor:
    """Call ``function`` with the local parts of ``operands``; see `plan`.

    An operand may be None. ``end`` makes the sums.
    """
    decided = plan(tuple(map(spec_of, operands)), tuple(letters), out, whole, first)
    axes = axes_of(*operands)
    return end(function(*moved(operands, decided, axes)), decided, axes)


@cache
def order(dims: int, skip: str = "") -> str:
    """So many letters, none of ``skip``."""
    return "".join(letter for letter in LETTERS if letter not in skip)[:dims]
