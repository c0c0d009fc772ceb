"""One task's part of a step: its actions in their order, with the messages between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from spartito.pipeline.cut import Cut
from spartito.pipeline.messages import BACK, FORTH, Messages
from spartito.pipeline.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Order, Span
from spartito.pipeline.stage import Call, Keys, Passed, run


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of a batch on its way.

    Args:
        cut: The model's operations for it, and where stages begin.
        call: Makes the model's forward pass with it.
        keys: How it draws one device's random numbers; None where they are a task's own.
    """

    cut: Cut
    call: Call
    keys: Keys | None = None


class Root(NamedTuple):
    """Where a backward pass begins: a loss and its gradient, or None where nothing counts."""

    value: Tensor
    gradient: Tensor | None


def pass_through(
    order: Order,
    microbatches: Sequence[Microbatch],
    messages: Messages,
    finish: Callable[[int, Any], Root | None],
) -> list[Span]:
    """Do the actions of one task.

    Args:
        order: The actions.
        microbatches: The parts of the batch.
        messages: Between the tasks.
        finish: Takes number and output of each microbatch in the last stage, and tells where its
            backward pass begins.

    Returns:
        When each action ran, without what it waited, in seconds of the machine's clock.
    """
    kinds = {action.kind for action in order}
    task = _Task(microbatches, messages, finish, WEIGHTS in kinds, keeps=kinds != {FORWARD})
    task.ask(order[:1])
    spans = []
    for number, action in enumerate(order, 1):
        task.ask(order[number : number + 1])
        spans.append(task.do(action))
    return spans


class _Task:
    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        messages: Messages,
        finish: Callable[[int, Any], Root | None],
        later: bool,
        keeps: bool,
    ) -> None:
        self._microbatches, self._messages, self._finish = microbatches, messages, finish
        self._passed: dict[tuple[int, int], Passed] = {}
        self._roots: dict[int, Root | None] = {}
        self._later, self._keeps = later, keeps

    def ask(self, upcoming: Order) -> None:
        """Have what actions wait for come beside those before them."""
        for action in upcoming:
            cut, stage = self._microbatches[action.microbatch].cut, action.stage
            if action.kind == FORWARD and stage:
                self._messages.ask(cut, stage, action.microbatch, FORTH)
            elif action.kind in (BACKWARD, INPUTS) and stage < cut.stages - 1:
                self._messages.ask(cut, stage + 1, action.microbatch, BACK)

    def do(self, action: Action) -> Span:
        """Wait for what an action needs, do it, and send what came of it."""
        cut = self._microbatches[action.microbatch].cut
        if action.kind == FORWARD:
            began = self._forward(cut, action.stage, action.microbatch)
        elif action.kind == WEIGHTS:
            began = time.perf_counter()
            self._passed.pop((action.stage, action.microbatch)).weights()
        else:
            began = self._backward(cut, action)
        return Span(action, began, time.perf_counter())

    def _forward(self, cut: Cut, stage: int, number: int) -> float:
        microbatch, messages = self._microbatches[number], self._messages
        received = messages.receive(cut, stage, number, FORTH) if stage else []
        began = time.perf_counter()
        passed = run(cut, stage, received, microbatch.call, microbatch.keys, self._later)
        if stage == cut.stages - 1:
            self._roots[number] = self._finish(number, passed.output)
            passed.output = None
        else:
            messages.send(passed.sent, cut, stage + 1, number, FORTH)
        if self._keeps:
            self._passed[stage, number] = passed
        return began

    def _backward(self, cut: Cut, action: Action) -> float:
        stage, number, messages = action.stage, action.microbatch, self._messages
        keep = action.kind == INPUTS
        passed = self._passed[stage, number] if keep else self._passed.pop((stage, number))
        if stage == cut.stages - 1:
            root = self._roots.pop(number)
            counts = root is not None and root.gradient is not None
            roots = [root.value] if root is not None and counts else []
            came = [root.gradient] if root is not None and root.gradient is not None else []
            began = time.perf_counter()
        else:
            came = messages.receive(cut, stage + 1, number, BACK)
            began = time.perf_counter()
            learn = [value.tensor.requires_grad for value in cut.enters(stage + 1)]
            roots = [t for t, learns in zip(passed.sent, learn, strict=True) if learns]
        passed.sent = []
        found = passed.backward(roots, came)
        if stage:
            messages.send(found, cut, stage, number, BACK)
        return began
