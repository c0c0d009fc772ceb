"""Groups that meet in the background, a fragment at a time: by real tasks, and by plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spartito as sp
from tests.strategies.jobs import blobs, make_strategy, mlp, weights

EXAMPLES, BATCH, EPOCHS = 120, 8, 2  # 15 updates of an epoch
LR, MOMENTUM = 0.7, 0.9
Changes = dict[int, list[int]]
"""Which parameters learn, by the update after which they are those of the optimizer."""


class Keeps(Optimizer):
    """Nesterov's momentum, whose state begins with the first gradient itself, not with a copy."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            state["old"] = grad if "old" not in state else MOMENTUM * state["old"] + grad
            parameter.sub_(LR * (grad + MOMENTUM * state["old"]))


def trained(options: dict[str, Any], keeps: bool = False, changes: Changes | None = None) -> Any:
    """The weights of a training."""
    strategy = make_strategy("local_sgd", **{"outer": Keeps if keeps else "diloco", **options})
    net = mlp()
    x, y = blobs(EXAMPLES)

    class Change(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if changes and trainer.step in changes:
                own = list(net.parameters())
                chosen = [own[n] for n in changes[trainer.step]]
                trainer.optimizer.param_groups[0]["params"] = chosen

    trainer = sp.Trainer(
        net, optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )  # fmt: skip
    data = sp.data.arrays(x, y).batch(BATCH)
    trainer.fit(data, epochs=EPOCHS, callbacks=[Change()], verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found


def by_torch(
    every: int, delay: int, mixing: float, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Streaming DiLoCo of two groups and two fragments, its outer momentum written out."""
    x, y = blobs(EXAMPLES)
    nets = [mlp(), mlp()]
    here = [list(net.parameters()) for net in nets]
    start = [p.detach().clone() for p in here[0]]
    old: dict[int, Tensor] = {}
    parts = [[0, 1], [2, 3]]
    weighs = [[0.0, 0.0], [0.0, 0.0]]
    flights: dict[int, tuple[int, dict[int, Tensor]]] = {}
    learning, updates = [0, 1, 2, 3], 0

    def send(part: int) -> dict[int, Tensor]:
        own, weighs[part], nothing = weighs[part], [0.0, 0.0], torch.zeros(())
        return {
            n: sum(
                (w * (start[n] - p[n].detach()) for w, p in zip(own, here, strict=True)), nothing
            )
            / sum(own)
            for n in parts[part]
            if sum(own)
        }

    @torch.no_grad()
    def receive(part: int, moved: dict[int, Tensor], keep: float) -> None:
        for n, mean in moved.items():
            old[n] = MOMENTUM * old[n] + mean if n in old else mean.clone()
            start[n] -= LR * (mean + MOMENTUM * old[n])
        for n in parts[part]:
            for parameters in here:
                parameters[n].copy_(keep * parameters[n] + (1 - keep) * start[n])
        if not keep:
            weighs[part] = [0.0, 0.0]

    def end() -> None:
        for part in sorted(flights, key=lambda part: flights[part][0]):
            receive(part, flights[part][1], mixing)
        flights.clear()
        for part in (0, 1):
            receive(part, send(part), 0.0)

    for _ in range(EPOCHS):
        now = 0
        for at in range(0, EXAMPLES, BATCH):
            chosen = (changes or {}).get(updates, learning)
            grads = []
            for g, net in enumerate(nets):
                rows = slice(at + g * BATCH // 2, at + (g + 1) * BATCH // 2)
                loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
                grads.append(torch.autograd.grad(loss, [here[g][n] for n in chosen]))
            if chosen != learning:  # all meet first, before the update
                end()
                now, learning = 0, chosen
                for n in [n for n in old if n not in learning]:
                    del old[n]
                parts = [[n for n in part if n in learning] for part in ([0, 1], [2, 3])]
                if not parts[0]:  # the first fragment has a layer, if any has
                    parts.reverse()
            with torch.no_grad():
                for g, own in enumerate(grads):
                    for n, grad in zip(learning, own, strict=True):
                        here[g][n].sub_(0.1 * grad)
            for eaten in weighs:
                eaten[:] = [each + BATCH // 2 for each in eaten]
            now, updates = now + 1, updates + 1
            for part in (0, 1):
                if part in flights and flights[part][0] == now:
                    receive(part, flights.pop(part)[1], mixing)
                if (now + delay - every * (part + 1) // 2) % every == 0:
                    flights[part] = now + delay, send(part)
        end()
    return dict(zip(mlp().state_dict(), start, strict=True))
