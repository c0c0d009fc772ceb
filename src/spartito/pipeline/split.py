"""Where the stages of a model begin: by the names of modules, or balanced by measured times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartito.engine.modules.kept_values import gradients_aside
from spartito.errors import UserError
from spartito.names import nearest
from spartito.pipeline.cut import Cut
from spartito.pipeline.kept_state import untouched
from spartito.pipeline.microbatches import each_tensor
from spartito.pipeline.program import Entry, Program, changes_first
from spartito.pipeline.stage import Call, run

BYTES_PER_SECOND = 2e9
"""What messages between stages move about; a part of the cost of a start."""
MOST = 48
"""Starts that are looked at; more are thinned out."""
LITTLE = 1.1
"""So many times as slow may the slowest stage be where starts are further outside in the model."""


ROUNDS = 5
"""Of measurements of stages, at most."""
COUNTED = (1, 2, 4)
"""Numbers of stages with which `slowdowns` cuts the model."""


@dataclass(frozen=True, slots=True)
class Start:
    """A call of a module with which a stage can begin.

    Args:
        path: The module.
        call: How often it was called before in a forward pass.
    """

    path: str
    call: int = 0

    def index(self, program: Program) -> int:
        """Its operation in ``program``; `UserError` where it is not called there."""
        found = program.find(self.path, self.call)
        if found is None:
            raise UserError(
                f"a stage begins with {self.path!r}, which is not called in this forward pass",
                "Name modules by split=[...] that are called in training and in evaluation.",
            )
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """What lies between two operations with which a stage can begin.

    Attributes:
        path: The module whose call begins it; "" for the first one.
        call: How often that was called before.
        cost: Seconds of its forward and backward pass, or how many parameters it has.
        entering: Bytes that come from the part before.
        parameters: Those that it is the first to use.
    """

    path: str
    call: int
    cost: float
    entering: int
    parameters: tuple[str, ...]


def named(program: Program, model: nn.Module, split: Sequence[str], stages: int) -> list[Start]:
    """The starts that a user named.

    Args:
        program: The model's operations.
        model: It has the modules.
        split: Paths of modules with which a new stage begins.
        stages: How many there are to be.

    Returns:
        Where each stage but the first begins.

    Raises:
        UserError: Another number of them, or modules that are not there, or not called.
    """
    if len(split) != stages - 1:
        raise UserError(
            f"split={list(split)} begins {len(split) + 1} stages, and there are {stages}",
            f"Name {stages - 1}: the modules with which stages 1 to {stages - 1} begin.",
        )
    paths = [path for path, _ in model.named_modules() if path]
    starts = []
    for path in split:
        if path not in paths:
            raise UserError(f"split: the model has no module {path!r}", nearest(path, paths))
        if program.find(path, 0) is None:
            raise UserError(
                f"split: {path!r} is not called by the model's forward pass",
                f"Name one that is called: {', '.join(_called(program)[:8])}.",
            )
        starts.append(Start(path))
    indices = [start.index(program) for start in starts]
    if sorted(set(indices)) != indices or 0 in indices:
        order = [entry.path for entry in program.entries if entry.path in split]
        raise UserError(
            f"split={list(split)}: each stage needs operations, in the order of the forward pass",
            f"They are called in this order: {', '.join(dict.fromkeys(order))}.",
        )
    for start, index in zip(starts, indices, strict=True):
        if (why := _aliased(program, index)) is not None:
            raise UserError(
                f"split: no stage can begin with {start.path!r}: {why}",
                "Begin it with another module, as one further outside.",
            )
    return starts


def balanced(program: Program, model: nn.Module, stages: int, call: Call | None) -> list[Start]:
    """Starts that make the slowest stage as fast as can be, or by `LITTLE` slower.

    The latter where stages then begin with modules further outside: whole blocks of the model.

    Args:
        program: The model's operations.
        model: It has all of its parameters, or is without data.
        stages: How many there are to be.
        call: Makes a forward pass to be measured; None: the parameters are counted.

    Returns:
        Where each stage but the first begins.

    Raises:
        UserError: The model has fewer starts at which a stage can begin.
    """
    parts = parts_of(program, model, call)
    layers = sum(bool(part.parameters) for part in parts)
    if layers < stages:
        paths = [part.path for part in parts[1:]]
        raise UserError(
            f"{stages} stages of a model that has {layers} layers in a row"
            + (f", of which one can begin with {paths[0]} to {paths[-1]}" if paths else ""),
            f"Take stages={max(1, layers)} or less, or name the modules that begin stages by "
            "split=[...]: modules that the forward pass calls one after the other.",
        )
    return starts_of(parts, stages)


def starts_of(parts: Sequence[Part], stages: int) -> list[Start]:
    """As `balanced`, of parts that are known, of which so many have parameters."""
    chosen = outermost(
        [part.cost for part in parts],
        [part.entering / BYTES_PER_SECOND for part in parts],
        [bool(part.parameters) for part in parts],
        stages,
        [part.path.count(".") for part in parts[1:]],
    )
    return [Start(parts[number].path, parts[number].call) for number in chosen]


def parts_of(program: Program, model: nn.Module, call: Call | None) -> list[Part]:
    """The parts in a row between which a stage may begin.

    Args:
        program: The model's operations.
        model: As for `balanced`, like the next one.
        call: As for `balanced`.

    Returns:
        One or more.
    """
    found = _thinned(program, _candidates(program))
    cut = Cut(program, tuple(entry.index for entry in found))
    costs = _counted(cut, model) if call is None else _measured(cut, model, call)
    return [
        Part(entry.path, entry.call, cost, _nbytes(cut, number), tuple(owned))
        for number, (entry, cost, owned) in enumerate(
            zip([Entry("", 0, 0), *found], costs, _owned(cut), strict=True)
        )
    ]


def outermost(
    costs: Sequence[float],
    moves: Sequence[float],
    owned: Sequence[bool],
    stages: int,
    depths: Sequence[int],
) -> list[int]:
    """As `partition`, with the outermost starts whose slowest stage is by `LITTLE` slower at most.

    Args:
        costs: As of `partition`, like the next three.
        moves: Of each part.
        owned: Of each part.
        stages: How many.
        depths: How deep in the model each part but the first begins.

    Returns:
        The parts with which stages begin, but for the first.
    """
    best = partition(costs, moves, owned, stages)
    most = LITTLE * _slowest(costs, moves, best)
    for depth in sorted(set(depths)):
        kept = [0, *(part for part, own in enumerate(depths, 1) if own <= depth)]
        spans = list(zip(kept, [*kept[1:], len(costs)], strict=True))
        has = [any(owned[begin:end]) for begin, end in spans]
        if sum(has) < stages:
            continue
        whole = [sum(costs[begin:end]) for begin, end in spans]
        found = partition(whole, [moves[begin] for begin in kept], has, stages)
        cuts = [kept[part] for part in found]
        if _slowest(costs, moves, cuts) <= most:
            return cuts
    return best


def _slowest(costs: Sequence[float], moves: Sequence[float], cuts: Sequence[int]) -> float:
    """The cost of the costliest of the stages that begin at ``cuts``."""
    spans = zip([0, *cuts], [*cuts, len(costs)], strict=True)
    ends = [*moves, 0.0]
    return max(
        sum(costs[begin:end]) + (moves[begin] if begin else 0.0) + ends[end] for begin, end in spans
    )


def partition(
    costs: Sequence[float], moves: Sequence[float], owned: Sequence[bool], stages: int
) -> list[int]:
    """Cut parts in a row into stages, of which the costliest costs as little as can be.

    Args:
        costs: Of each part.
        moves: What it costs to begin a stage with the part, for both stages.
        owned: Whether a part has parameters; each stage gets some.
        stages: How many.

    Returns:
        The parts with which stages begin, but for the first.
    """
    count = len(costs)
    sums, has = [0.0], [0]
    for cost, own in zip(costs, owned, strict=True):
        sums.append(sums[-1] + cost)
        has.append(has[-1] + own)
    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {(0, 0): (0.0, 0.0, ())}
    for stage in range(1, stages + 1):
        for end in range(1, count + 1):
            options = []
            for start in range(end):
                before = best.get((stage - 1, start))
                if before is None or has[end] == has[start]:
                    continue
                cost = sums[end] - sums[start] + (moves[start] if start else 0.0)
                cost += moves[end] if end < count else 0.0
                cuts = (*before[2], start) if start else before[2]
                moved = before[1] + (moves[start] if start else 0.0)
                options.append((max(before[0], cost), moved, cuts))
            if options:
                best[stage, end] = min(options)
    return list(best[stages, count][2])


def _called(program: Program) -> list[str]:
    return list(dict.fromkeys(entry.path for entry in program.entries))


def _candidates(program: Program) -> list[Entry]:
    """Calls with which a stage can begin: the outermost of those that begin at one operation."""
    found: dict[int, Entry] = {}
    for entry in program.entries:
        if 0 < entry.index < len(program.functions):
            found.setdefault(entry.index, entry)
    return [
        e for e in found.values() if program.crossing(e.index) and not _aliased(program, e.index)
    ]


def _thinned(program: Program, entries: list[Entry]) -> list[Entry]:
    """Those at which the least crosses, if there are many."""
    if len(entries) <= MOST:
        return entries
    sizes = {e.index: sum(v.here.nbytes for v in program.crossing(e.index)) for e in entries}
    few = sorted(
        entries, key=lambda entry: (sizes[entry.index], entry.path.count("."), entry.index)
    )
    return sorted(few[:MOST], key=lambda entry: entry.index)


def _owned(cut: Cut) -> list[list[str]]:
    """The parameters that each part is the first to use."""
    found: list[list[str]] = [[] for _ in range(cut.stages)]
    for name, stages in cut.owners(cut.program.parameters).items():
        found[stages[0]].append(name)
    return found


def _aliased(program: Program, index: int) -> str | None:
    """Why no stage can begin here: what crosses shares memory, in which one is written."""
    for name in program.changed:
        if len({use < index for use in program.buffers.get(name, ())}) > 1:
            return f"the buffer {name!r}, which the forward pass changes, is used before and after"
    memory: dict[int, int] = {}
    for value in program.crossing(index):
        key = value.here.untyped_storage()._cdata
        memory[key] = memory.get(key, 0) + 1
    if all(count == 1 for count in memory.values()):
        return None
    for function in program.functions[index:]:
        if changes_first(function):
            name = function.__name__
            return f"views of one tensor cross there, and {name}() may write into it later"
    return None


def _nbytes(cut: Cut, stage: int) -> int:
    return sum(value.here.nbytes for value in cut.enters(stage))


def _counted(cut: Cut, model: nn.Module) -> list[float]:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return [float(sum(sizes[name] for name in names)) + 1.0 for names in _owned(cut)]


def slowdowns(
    program: Program, parts: Sequence[Part], model: nn.Module, call: Call, seconds: float
) -> dict[int, float]:
    """How many times as long the passes of all stages take as those of the model that is whole.

    Each stage goes through the whole forward pass and leaves out what others compute.

    Args:
        program: The model's operations.
        parts: Of it, with their times.
        model: It has all of its parameters.
        call: Makes a forward pass.
        seconds: After which no further round of measurements begins; the quickest one counts.

    Returns:
        That, by the number of stages: some of `COUNTED`.
    """
    layers = sum(bool(part.parameters) for part in parts)
    cuts = {
        count: Cut(program, tuple(start.index(program) for start in starts_of(parts, count)))
        for count in COUNTED
        if count <= layers
    }
    whole = list[float]()
    cut_up = {count: list[float]() for count in cuts}
    began = time.perf_counter()
    with gradients_aside(list(model.parameters())):
        while not whole or (len(whole) < ROUNDS and time.perf_counter() < began + seconds):
            with untouched(model), torch.enable_grad():
                whole.append(_whole_pass(call))
            for count, cut in cuts.items():
                with untouched(model), torch.enable_grad():
                    cut_up[count].append(sum(_one_pass(cut, call)))
    return {count: min(each) / min(whole) for count, each in cut_up.items()}


def _whole_pass(call: Call) -> float:
    began, roots = time.perf_counter(), list[Tensor]()
    each_tensor(call(), roots.append)
    roots = [tensor for tensor in roots if tensor.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
    return time.perf_counter() - began


def _measured(cut: Cut, model: nn.Module, call: Call) -> list[float]:
    """Seconds of the forward and backward pass of each part, the shorter of two."""
    times = [float("inf")] * cut.stages
    with gradients_aside(list(model.parameters())):
        for _ in range(2):
            with untouched(model), torch.enable_grad():
                times = list(map(min, times, _one_pass(cut, call)))
    return times


def _one_pass(cut: Cut, call: Call) -> list[float]:
    received: list[Tensor] = []
    times = []
    for stage in range(cut.stages):
        began = time.perf_counter()
        passed = run(cut, stage, received, call)
        sent = list(passed.sent)
        if not sent:
            each_tensor(passed.output, sent.append)
        roots = [tensor for tensor in sent if tensor.requires_grad]
        received = [tensor.detach().clone() for tensor in passed.sent]
        passed.backward(roots, [torch.ones_like(tensor) for tensor in roots])
        times.append(time.perf_counter() - began)
    return times
