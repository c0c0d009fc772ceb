"""Stale pushes, in an order that the test forces, against the same sums in plain torch."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from spartito.errors import UserError
from spartito.ps.protocol.messages import Outcome
from spartito.ps.protocol.rules import Rules, stale_rules
from spartito.ps.server.compensation import check_compensation
from tests.ps.bench import Bench
from tests.ps.bench import push as pushed
from tests.ps.served import WAYS, Start, compute, exchange, make, push

WORKERS = 3
Values = dict[str, Tensor]


class Plain:
    """One model in plain torch that gets gradients which others computed from older values."""

    def __init__(self, model: nn.Module, kind: type[Optimizer], rules: Rules) -> None:
        self.model, self.rules = deepcopy(model), rules
        self.optimizer = make(self.model, kind)
        self.version = 0
        self.means: Values = {}

    def values(self) -> tuple[int, Values]:
        return self.version, {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def push(self, gradients: dict[str, Tensor | None], pulled: tuple[int, Values]) -> None:
        rules, (version, before) = self.rules, pulled
        stale = self.version - version
        for name, parameter in self.model.named_parameters():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.clone()
            if gradient is None:
                continue
            strength: float | Tensor = rules.strength
            if rules.mean_square is not None:
                square = gradient**2
                mean = self.means.get(name, square)
                mean = rules.mean_square * mean + (1 - rules.mean_square) * square
                self.means[name] = mean
                strength = rules.strength / (mean + 1e-7).sqrt()
            if rules.on_stale == "compensate" and stale > (rules.max_staleness or 0):
                moved = parameter.detach() - before[name]
                parameter.grad = gradient + strength * gradient * gradient * moved
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            if rules.on_stale == "scale" and stale > 1:
                group["lr"] /= stale
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.version += 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rules", "kind", "count"),
    [
        (Rules(WORKERS, on_stale="compensate", compensation=30.0), SGD, 1),
        (Rules(WORKERS, on_stale="compensate", compensation=30.0), Adam, 3),
        (Rules(WORKERS, 1, "compensate", compensation=30.0), SGD, 3),
        (Rules(WORKERS, on_stale="compensate", compensation=2.0, mean_square=0.9), SGD, 2),
        (Rules(WORKERS, on_stale="compensate", compensation=0.0), SGD, 1),
        (Rules(WORKERS, on_stale="scale"), SGD, 1),
    ],
    ids=["constant", "adam", "bounded", "adaptive", "nothing", "scaled"],
)
def test_stale_pushes_in_a_forced_order_do_what_plain_torch_does(
    job: Start, way: dict[str, Any], rules: Rules, kind: type[Optimizer], count: int
) -> None:
    run = job(count, rules, kind=kind, **way)
    run.control()
    workers = [run.worker(number) for number in range(WORKERS)]
    plain, dice = Plain(run.model, kind, rules), Random(7)
    without = Plain(run.model, kind, Rules(WORKERS))
    pulled, also = [plain.values()] * WORKERS, [without.values()] * WORKERS
    for servers, *_ in workers:
        servers.pull(admit=True)
    for step in range(24):
        number = dice.randrange(WORKERS)
        servers, model, _ = workers[number]
        compute([model], step)
        if kind is SGD and step % 3 == 1:
            model.get_parameter("2.weight").grad = None
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        plain.push(gradients, pulled[number])
        without.push(gradients, also[number])
        absent, _ = servers.fill()
        replies = exchange(servers, push(step), absent)
        assert {reply.outcome for reply in replies} == {Outcome.APPLIED}
        pulled[number], also[number] = plain.values(), without.values()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), pulled[number][1][name],
                                       rtol=1e-12, atol=1e-12)  # fmt: skip
    most = max(server.store.staleness.max for server in run.servers)
    assert most >= 5
    far = max(
        float((p - q).detach().abs().max())
        for p, q in zip(plain.model.parameters(), without.model.parameters(), strict=True)
    )
    assert (far > 1e-3) == (rules.strength > 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_stale_push_over_a_new_connection_is_computed_again(
    job: Start, way: dict[str, Any]
) -> None:
    """The server knows what a worker pulled by its connection alone."""
    run = job(1, Rules(2, on_stale="compensate"), **way)
    run.control()
    (one, model, _), (other, twin, _) = run.worker(0), run.worker(1)
    for servers in (one, other):
        servers.pull(admit=True)
    compute([model, twin], 0)
    absent, _ = one.fill()
    for connection in list(run.servers[0]._connections):
        connection.close()
    (reply,) = exchange(one, push(0), absent)
    assert reply.outcome is Outcome.APPLIED  # it is not stale: there is nothing to compensate
    absent, _ = other.fill()
    (reply,) = exchange(other, push(1), absent)
    assert reply.outcome is Outcome.STALE
    compute([twin], 1)
    absent, _ = other.fill()
    (reply,) = exchange(other, push(1), absent)
    assert reply.outcome is Outcome.APPLIED
    assert run.servers[0].store.refused == 1


def test_the_means_of_squares_are_in_a_snapshot() -> None:
    rules = Rules(1, on_stale="compensate", compensation=2.0, mean_square=0.5)
    whole = Bench(rules)
    for step in range(3):
        whole.push(0, pushed(step, pulled=step), 1.0 + step, 2.0)
    again = Bench(rules)
    again.store.restore(*whole.store.dump())
    anew = Bench(rules)
    tensors, about = whole.store.dump()
    del tensors["means"]
    anew.store.restore(tensors, about)
    pulled = torch.zeros_like(whole.store.shard.values)
    for bench in (whole, again, anew):
        bench.push(0, pushed(3), 3.0, 1.0, pulled=pulled)
    assert whole.values() == again.values() != anew.values()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"on_stale": "compensat"}, "Did you mean 'compensate'"),
        ({"on_stale": "compensate", "max_staleness": 0}, "never stale"),
        ({"on_stale": "scale", "max_staleness": 0}, "never stale"),
        ({"on_stale": "compensate", "mean_square": 0.9, "servers": 2, "replicas": 2}, "alone"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_asked_for(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        Rules(2, **options)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"compensate": -0.1}, "{'compensate': -0.1}"),
        ({"compensate": float("nan")}, "{'compensate': nan}"),
        ({"compensate": True}, "{'compensate': True}"),
        ({"compensate": "much"}, "{'compensate': 'much'}"),
        ({"compensate": 2, "mean_square": 1.0}, "'mean_square': 1.0"),
        ({"mean_square": 0.9}, "a strength of at least 0"),
        ({"compensat": 0.9}, "Did you mean 'compensate'"),
        ({}, "a strength of at least 0"),
    ],
    ids=str,
)
def test_a_strength_that_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        stale_rules(given)


def test_complex_numbers_have_no_such_squares() -> None:
    rules = Rules(2, on_stale="compensate")
    check_compensation(rules, ["float32", "bfloat16"])
    with pytest.raises(UserError, match="complex64"):
        check_compensation(rules, ["float32", "complex64"])
    check_compensation(Rules(2, on_stale="scale"), ["complex64"])
