"""Sums that stay cut by rows on a mesh, and what is computed again or clipped by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spartito as sp
from spartito.mesh import layout
from tests.mesh.tables import Squared
from tests.replicas import Replicas, warns
from tests.strategies.jobs import blobs
from tests.strategies.test_contracts import close


class Residual(nn.Module):
    """A residual stream with norms, dropout and weights that are read by hand in a checkpoint."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.into = nn.Linear(6, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.head.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(16))
        self.double()

    def by_hand(self, x: Tensor) -> Tensor:
        x = F.gelu(F.linear(x, self.up.weight, self.up.bias))
        return F.linear(x, self.down.weight) + self.down.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(x))
        self.seen = 0.9 * self.seen + self.up(x).detach().mean(0)
        x = x + self.drop(self.down(F.gelu(self.up(x))))
        x = x + Squared.apply(x, self.down.bias)  # type: ignore[no-untyped-call]
        again = checkpoint(self.by_hand, self.norm(x), use_reentrant=False)
        out: Tensor = self.head(
            self.norm(x + again) + checkpoint(self.up, x, use_reentrant=False)[..., :8]
        )
        return out


Hook = Callable[[Tensor], None]


def squared(parameter: Tensor) -> None:
    """As a hook sees it: only of the whole gradient is the square the square."""
    parameter.register_hook(lambda gradient: 10 * gradient * gradient.abs())


def squared_at_once(parameter: Tensor) -> None:
    """The same as soon as the gradient is there."""

    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(10 * parameter.grad.abs())

    parameter.register_post_accumulate_grad_hook(change)


def residual(
    options: dict[str, Any] | None, hook: Hook | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and values after some updates: by plain torch, or on a mesh."""
    net, losses = Residual(), []
    if hook is not None:
        hook(net.head.bias)
    torch.manual_seed(3)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() == 1]},
    ]
    optimizer = torch.optim.Adam(groups, 0.01)
    x, y = blobs(4 * 6)
    if options is None:
        for step in range(4):
            rows = slice(6 * step, 6 * step + 6)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            optimizer.step()
            losses.append(loss.item())
        return losses, net.state_dict()
    with pytest.MonkeyPatch.context() as patch, sp.MeshStrategy(**options) as strategy:
        patch.setattr(layout, "ROWS_FROM", 0)  # of small tensors too
        strategy.prepare(net, optimizer, clip_norm=0.2)
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(6)):
            result = strategy.step(batch, F.cross_entropy)
            losses.append(float(result.loss) / float(result.weight))
        strategy.coordination.compare()
        return losses, strategy.state_dict()["model"]


@pytest.mark.parametrize("rule", [[], [("rows", "model")]], ids=["whole", "rows"])
def test_a_residual_stream_has_the_numbers_of_plain_torch(
    replicas: Replicas, rule: list[tuple[str, str]]
) -> None:
    losses, values = residual(None)
    options = {"layout": [("hidden", "model"), *rule], "mesh": {"model": 2}}
    for found, parameters in replicas(residual, 2, options):
        close([found, dict(parameters)], [losses, dict(values)])


@pytest.mark.parametrize("hook", [squared, squared_at_once])
def test_a_hook_on_a_whole_weight_behind_rows_sees_the_whole_gradient(
    replicas: Replicas, hook: Hook
) -> None:
    losses, values = residual(None, hook)
    options = {"layout": [("hidden", "model"), ("rows", "model")], "mesh": {"model": 2}}
    for found, parameters in replicas(residual, 2, options, hook):
        close([found, dict(parameters)], [losses, dict(values)])


@warns("the buffer 'seen' differed")
def clipped(strategy: str, in_a_hook: bool) -> str:
    """What clipping by hand ends with: in a hook of the optimizer, or in a loop of one's own."""
    net = Residual()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    with sp.strategy(strategy) as chosen:
        chosen.prepare(net, optimizer)
        parameters = list(net.parameters())

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(parameters, 0.1)

        if in_a_hook:
            optimizer.register_step_pre_hook(clip)
        try:
            for batch in chosen.distribute(sp.data.arrays(*blobs(8)).batch(4)):
                x, y = batch.data
                chosen.backward(F.cross_entropy(net(x), y, reduction="none"), batch)
                if not in_a_hook:
                    clip()
                chosen.update(optimizer)
        except sp.UserError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("strategy", "in_a_hook", "text"),
    [
        ("mesh", True, "clip_norm="),
        ("mesh", False, "clip_norm="),
        ("sharded", False, "clip_norm="),
        ("mirrored", True, "nothing"),  # each replica has all of the sums
    ],
)
def test_clipping_a_part_of_the_gradients_by_hand_is_refused(
    replicas: Replicas, strategy: str, in_a_hook: bool, text: str
) -> None:
    for found in replicas(clipped, 2, strategy, in_a_hook):
        assert text in found


def hooked() -> str:
    """What a full backward hook inside of a cut model is told."""
    net = Residual()
    net.norm.register_full_backward_hook(lambda *_: None)
    with sp.MeshStrategy() as strategy, pytest.raises(sp.UserError) as caught:
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    return str(caught.value)


def test_hooks_on_the_backward_pass_of_a_part_are_refused(replicas: Replicas) -> None:
    assert all("norm has a hook" in found for found in replicas(hooked, 2))


def loaded() -> tuple[bool, str]:
    """Whether a model on a mesh takes a whole state, and what it says to one of another shape."""
    net, other = Residual(), Residual()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.rand(parameter.shape))
    whole = {name: value.clone() for name, value in other.state_dict().items()}
    with sp.MeshStrategy() as strategy:
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        net.load_state_dict(whole)
        found = strategy.state_dict()["model"]
        equal = all(torch.equal(found[name], value) for name, value in whole.items())
        halves = {name: value[: len(value) // 2] for name, value in whole.items()}
        with pytest.raises(sp.UserError) as caught:
            net.load_state_dict(halves)
    return equal, str(caught.value)


def test_a_users_state_is_cut_as_the_model_is(replicas: Replicas) -> None:
    for equal, refusal in replicas(loaded, 2):
        assert equal
        assert "of shape (4, 6), here (8, 6)" in refusal
