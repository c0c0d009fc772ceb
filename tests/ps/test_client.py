"""Links to real servers in threads of the test: what is said is heard once, or an error tells."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import LINE, Span
from spartito.ps.protocol.memory import allocate, areas
from spartito.ps.protocol.messages import (
    Outcome,
)
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.slots import State
from spartito.ps.protocol.timetable import Timetable
from tests.ps.served import (
    WAYS,
    Start,
    assert_close,
    compute,
    exchange,
    make,
    push,
)

# Values and gradients


@given(st.integers(0, 300), st.integers(1, 5000))
def test_the_two_areas_of_a_segment_lie_apart_and_within_it(start: int, lines: int) -> None:
    span = Span(8 * start, 8 * start + 8 * lines)
    push_at, pull_at, size = areas(span)
    assert push_at % LINE == pull_at % LINE == span.phase
    assert push_at + span.size <= pull_at
    assert pull_at + span.size <= size


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize(("count", "rules"), [(1, Rules(2)), (3, Rules(2)), (3, Rules(2, 1))])
def test_training_over_links_is_training(
    job: Start, way: dict[str, Any], kind: type[Optimizer], count: int, rules: Rules
) -> None:
    run = job(count, rules, kind=kind, **way)
    control = run.control()
    servers, model, vector = run.worker()
    assert [link.shared for link in servers.links] == [way["shares"]] * count
    expected = deepcopy(run.model)
    optimizer = make(expected, kind)
    with torch.no_grad():
        for tensor in vector.tensors:
            tensor.zero_()
    servers.pull(admit=True)
    assert_close(model, expected)
    for step in range(4):
        compute([model, expected], step)
        absent, finite = servers.fill()
        assert finite
        servers.push(push(step), absent)
        replies = servers.replies()
        optimizer.step()
        assert_close(model, expected)
        assert {reply.outcome for reply in replies} == {Outcome.APPLIED}
        assert servers.progress.version == step + 1
    servers.release()
    size = sum(span.size for span in run.spans)
    assert 4 * size <= sum(link.sent for link in servers.links) <= 4 * size + 20_000
    states = control.states()
    for span, (values, state, _) in zip(run.spans, states, strict=True):
        SpanCopies(run.vector, span, values).load()
        assert bool(state) == (kind is Adam)
    assert_close(run.model, expected)
    servers.close()
    servers.close()


UNKNOWN = 777  # elements of a parameter that the optimizer is not given


class Picky(Adam):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__([p for p in parameters if p.numel() != UNKNOWN], lr=lr)


def frozen() -> nn.Module:
    """A large part that learns nothing, a small one that does, and one that nobody steps."""
    torch.manual_seed(5)
    parts = {
        "back": nn.Linear(30, 20_000 // 30),
        "norm": nn.BatchNorm1d(20_000 // 30),
        "head": nn.Linear(20_000 // 30, 2),
    }
    model = nn.Sequential(*parts.values()).double()
    model.register_parameter("average", nn.Parameter(torch.ones(UNKNOWN, dtype=torch.float64)))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rules", [Rules(1), Rules(1, 0)])
@pytest.mark.parametrize("kind", [Adam, Picky])
def test_what_is_frozen_does_not_travel(
    job: Start, way: dict[str, Any], count: int, rules: Rules, kind: type[Optimizer]
) -> None:
    """Until it changes: by being unfrozen, by the user's own hand, by a checkpoint."""
    run = job(count, rules, kind=kind, build=frozen, **way)
    control = run.control()
    servers, model, vector = run.worker()
    expected = frozen()
    stepped = make(expected, run.kind)
    with torch.no_grad():
        for tensor in vector.tensors:
            tensor.zero_()
    servers.pull(admit=True)
    assert_close(model, expected, 0.0)

    def moved() -> int:
        return sum(link.sent + link.received for link in servers.links)

    def train(steps: range) -> int:
        before = moved()
        for step in steps:
            compute([model, expected], step)
            absent, finite = servers.fill()
            assert finite
            more = {"group": step + 1, "index": 0, "parties": 1} if rules.together else {}
            exchange(servers, push(step, **more), absent)
            stepped.step()
            assert_close(model, expected)
        return moved() - before

    whole = 2 * sum(span.size for span in run.spans)
    assert train(range(5)) < 5 * whole / 4
    model[0].requires_grad_(True)  # type: ignore[index]
    expected[0].requires_grad_(True)  # type: ignore[index]
    assert train(range(5, 8)) > 3 * whole / 2
    with torch.no_grad():
        for twin in (model, expected) if kind is Picky else ():
            twin.average.mul_(0.5)  # type: ignore[operator]
    train(range(8, 9))
    for span, (values, *_) in zip(run.spans, control.states(), strict=True):
        SpanCopies(run.vector, span, values).load()
    assert_close(run.model, expected)
    other = frozen()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    loaded = [allocate(span) for span in run.spans]
    for span, memory in zip(run.spans, loaded, strict=True):
        SpanCopies(Vector(other, make(other, run.kind)), span, memory).store()
    control.load("job", loaded, [{} for _ in loaded], settings(run.optimizer))
    servers.pull(admit=True)
    assert_close(model, other, 0.0)


class Crowded(SGD):
    """As many groups as a large model has parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for _ in range(3000):
            self.add_param_group({"params": []})


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_thousands_of_groups_and_passes_fit_into_a_message(job: Start, way: dict[str, Any]) -> None:
    run = job(kind=Crowded, **way)
    control = run.control()
    servers, model, _ = run.worker()
    servers.pull(admit=True)
    control.schedule(Timetable(0, [settings(make(model, Crowded))]))
    for step in range(9000):
        compute([model], 0) if not step else None
        absent, _ = servers.fill()
        key = (1, step, 0, 0)  # a pass of one work item
        exchange(servers, push(0, keys=[key], dropped=step > 0), absent)
    assert len(control.applied(0, 2)) == 9000
    assert len(control.states()) == 1


def test_half_the_bytes_arrive_nearly_right(job: Start) -> None:
    run = job(2, wire_dtype="bfloat16")
    run.control()
    servers, model, _ = run.worker()
    expected = deepcopy(run.model)
    servers.pull(admit=True)
    assert_close(model, expected, 2**-8)
    compute([model], 0)
    absent, _ = servers.fill()
    servers.push(push(0), absent)
    servers.replies()
    size = sum(span.size for span in run.spans)
    assert sum(link.sent for link in servers.links) < 0.3 * size + 10_000  # of doubles


@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_was_given_comes_back(job: Start, way: dict[str, Any]) -> None:
    run = job(2, kind=Adam, **way)
    control = run.control()
    values: list[Tensor] = []
    states: list[State] = []
    for number, server in enumerate(run.servers):
        memory = allocate(run.spans[number])
        SpanCopies(run.vector, run.spans[number], memory).store()
        values.append(memory)
        states.append({})
        for slot, cut_run in enumerate(server.store.shard.slots):
            size = (cut_run.stop - cut_run.start) // 8
            states[-1][slot, "exp_avg"] = torch.rand(size, dtype=torch.float64)
            states[-1][slot, "exp_avg_sq"] = torch.rand(size, dtype=torch.float64)
            states[-1][slot, "step"] = torch.tensor(7.0)
    control.load("job", values, states, settings(run.optimizer))
    for before, own, (after, found, _) in zip(values, states, control.states(), strict=True):
        assert torch.equal(before, after)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[target], value) for target, value in own.items())
