"""Values that arrive in two areas by turns, and parameters that are views of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from spartito.ps.client.incoming import Incoming
from spartito.ps.client.vector import Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.memory import allocate


class Net(nn.Module):
    """Two parameters that learn, a frozen one, one that no optimizer knows, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(30, 50)), nn.Parameter(torch.zeros(7))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.unknown = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(6))


class Arriving:
    """A model, and what a server does to its areas."""

    def __init__(
        self, net: nn.Module | None = None, shared: bool = False, servers: int = 1
    ) -> None:
        self.net = net or Net()
        known = [p for name, p in self.net.named_parameters() if name != "unknown"]
        vector = Vector(self.net, SGD(known, lr=1.0))
        span = cut(vector.layout, servers, 1, False)[0]
        self.incoming = Incoming(vector, span, [allocate(span), allocate(span)], 0, shared)

    def come(self, value: float, changed: frozenset[int] | None = None) -> None:
        """``value`` is all there is in the next area, and comes into the model."""
        self.write(value)
        runs = frozenset(range(len(self.incoming.before._runs)))
        self.incoming.load(runs if changed is None else changed)

    def write(self, value: float) -> None:
        """What a server does between a push and its reply."""
        self.incoming.area.view(torch.float32).fill_(value)


def values(tensors: Any) -> set[float]:
    return {number for tensor in tensors for number in tensor.detach().reshape(-1).tolist()}


def test_parameters_become_views_of_the_areas_by_turns() -> None:
    net = Net()
    arriving, before = Arriving(net), list(net.parameters())
    where = []
    for value in range(1, 6):
        arriving.come(float(value))
        assert values(net.state_dict().values()) == {value}
        where.append(net.first.data_ptr())
        arriving.write(-1.0)  # the next ones are on their way
        assert values(net.state_dict().values()) == {value}
    assert where[0] == where[2] == where[4] != where[1] == where[3]
    assert all(one is other for one, other in zip(before, net.parameters(), strict=True))
    arriving.incoming.leave()
    for area in arriving.incoming.areas:
        area.fill_(0)
    assert values(net.state_dict().values()) == {5.0}


HOLD: dict[str, Callable[[Net], Any]] = {
    "state_dict": lambda net: net.state_dict(),
    "data": lambda net: net.second.data,
    "detach": lambda net: net.first.detach()[1:],
    "numpy": lambda net: net.first.detach().numpy(),
    "graph": lambda net: net.first @ torch.ones(50, 1, requires_grad=True) * net.second[0],
}


def shown(held: Any) -> set[float]:
    held = held.get("first") if isinstance(held, dict) else held
    return values([torch.as_tensor(held)])


@pytest.mark.parametrize("kind", HOLD)
@pytest.mark.parametrize("early", [True, False])
def test_who_looks_at_the_memory_sees_what_copies_would_show(kind: str, early: bool) -> None:
    net = Net()
    arriving = Arriving(net)
    if not early:
        arriving.come(1.0)
    held = HOLD[kind](net)
    at = net.first.data_ptr(), net.second.data_ptr()
    for value in (2.0, 3.0):
        arriving.come(value)
        assert values(net.state_dict().values()) == {value}
        assert at == (net.first.data_ptr(), net.second.data_ptr())
        arriving.write(-1.0)
        if kind == "graph":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                held.sum().backward(retain_graph=True)
        else:
            assert shown(held) == {value}
    del held
    arriving.come(4.0)
    assert values(net.state_dict().values()) == {4.0}
    assert at != (net.first.data_ptr(), net.second.data_ptr())


def test_what_learns_nothing_is_copied_and_what_did_not_change_stays() -> None:
    net = Net()
    arriving = Arriving(net)
    at = net.frozen.data_ptr(), net.unknown.data_ptr(), net.get_buffer("mean").data_ptr()
    arriving.come(1.0)
    with torch.no_grad():
        net.first.fill_(7.0)
        net.frozen.fill_(8.0)
    for _ in range(3):
        arriving.come(2.0, frozenset())
        assert values([net.first, net.frozen, net.second]) == {7.0, 8.0, 1.0}
    assert at == (net.frozen.data_ptr(), net.unknown.data_ptr(), net.get_buffer("mean").data_ptr())


def test_a_graph_that_was_kept_notices_new_values() -> None:
    net = Net()
    arriving = Arriving(net)
    arriving.come(1.0)
    out = (net.first * torch.ones(30, 50, requires_grad=True)).sum()
    arriving.come(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_parts_of_parameters_are_copied() -> None:
    net = Net()
    arriving = Arriving(net, servers=4)
    at = net.first.data_ptr()
    arriving.come(1.0)
    arriving.come(2.0)
    assert net.first.data_ptr() == at
    assert 2.0 in values([net.first])


def test_data_that_a_user_replaced_is_copied_to() -> None:
    net = Net()
    arriving = Arriving(net)
    arriving.come(1.0)
    own = torch.zeros(30, 50)
    net.first.data = own
    arriving.come(2.0)
    assert values([own, net.second]) == {2.0}
    arriving.write(-1.0)
    assert values([own, net.second]) == {2.0}


def test_a_fork_keeps_the_values_that_it_began_with() -> None:
    net = Net()
    arriving = Arriving(net, shared=True)
    arriving.come(1.0)
    first: list[Tensor] = [net.first, net.second]
    areas = [at.data_ptr() for at in arriving.incoming.areas]
    ends = [area + arriving.incoming.areas[0].nbytes for area in areas]
    assert areas[0] <= net.first.data_ptr() < ends[0]
    child = os.fork()
    if child == 0:
        inside = any(a <= p.data_ptr() < e for p in first for a, e in zip(areas, ends, strict=True))
        os._exit(int(inside or values(first) != {1.0}))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arriving.come(2.0)
    assert values(first) == {2.0}
