"""Losses as people write them, on the replicas of a strategy and in a plain loop of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spartito as sp
from tests.strategies.jobs import make_strategy, weights

EXAMPLES, BATCH, TOKENS, FEATURES, CLASSES = 17, 6, 3, 5, 4
"""The last batch has 5: three rows for one replica, two for the other."""

Loss = Callable[[Tensor, Tensor], Any]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def labelled() -> tuple[Tensor, Tensor]:
    """Tokens and their classes; few count, and of some replicas' rows none."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(EXAMPLES, TOKENS, FEATURES, generator=generator).double()
    y = torch.randint(CLASSES, (EXAMPLES, TOKENS), generator=generator)
    y[torch.rand(EXAMPLES, TOKENS, generator=generator) < 0.4] = -100
    y[:, 1] = y[:, 1].clamp(0)
    y[6:9] = -100  # all that one replica has of the second batch
    y[15:] = -100  # and of the last
    return x, y


class Unchanged(nn.CrossEntropyLoss):
    """A subclass that changes nothing."""


class Smoothed(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.flatten(0, 1), target.flatten())


def first(loss: Callable[..., Tensor], **options: Any) -> Loss:
    """Of the first token of each, as of a classifier."""
    return lambda o, y: loss(o[:, 0], y[:, 0], **options)


def flat(o: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return o.flatten(0, 1), y.flatten()


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0]).double()
ce = functional.cross_entropy


def masked(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).double()
    each = ce(o.transpose(1, 2), y.clamp(0), reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


def filled(o: Tensor, y: Tensor) -> Tensor:
    ignored = y == -100
    each = ce(o.transpose(1, 2), y.clamp(0), reduction="none")
    return each.masked_fill(ignored, 0.0).sum() / (~ignored).sum().clamp(min=1)


def chosen(o: Tensor, y: Tensor) -> Tensor:
    kept = y != -100
    return ((o.tanh() - 0.3) ** 2)[kept].mean()


def hot(y: Tensor) -> Tensor:
    return functional.one_hot(y.clamp(0), CLASSES).double()


COUNTED: dict[str, Loss] = {
    "ignored": lambda o, y: ce(*flat(o, y)),
    "classifier": first(ce),
    "partial": lambda o, y: partial(ce, ignore_index=-100)(*flat(o, y)),
    "subclass": lambda o, y: Unchanged()(o.transpose(1, 2), y),
    "own_forward": Smoothed(label_smoothing=0.1),
    "weighted": lambda o, y: ce(*flat(o, y), weight=CLASS_WEIGHTS),
    "smoothed": lambda o, y: ce(*flat(o, y), label_smoothing=0.2),
    "both": lambda o, y: ce(*flat(o, y), weight=CLASS_WEIGHTS, label_smoothing=0.2),
    "shifted": lambda o, y: ce(o[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)),
    "dims": lambda o, y: ce(o.transpose(1, 2), y),
    "images": lambda o, y: ce(o.transpose(1, 2)[..., None], y[..., None]),
    "nll": lambda o, y: functional.nll_loss(*flat(o.log_softmax(-1), y)),
    "scaled": lambda o, y: 2 * ce(*flat(o, y)).float().double() / 3 - 1,
    "sum_by_count": lambda o, y: ce(*flat(o, y), reduction="sum") / (y != -100).sum().clamp(1),
    "masked": masked,
    "filled": filled,
    "chosen": chosen,
    "kept_rows": lambda o, y: ce(o[:, 0][y[:, 0] >= 0], y[:, 0][y[:, 0] >= 0]),
    "two_alike": lambda o, y: 0.7 * ce(*flat(o, y)) + ce(*flat(3 * o, y)),
}
"""Means over what counts. A batch without any is 0, or NaN, in torch: there is none here."""

BY_ROWS: dict[str, Loss] = {
    "mse": lambda o, y: functional.mse_loss(o, hot(y)),
    "l1": lambda o, y: functional.l1_loss(o, hot(y)),
    "smooth_l1": lambda o, y: functional.smooth_l1_loss(o, hot(y)),
    "huber": lambda o, y: functional.huber_loss(o, hot(y)),
    "by_hand": lambda o, y: ((o - hot(y)) ** 2).mean(),
    "by_class": lambda o, y: ((o - hot(y)) ** 2).mean(0).mean(),
    "bce": lambda o, y: functional.binary_cross_entropy(o.sigmoid(), hot(y)),
    "bce_weight": lambda o, y: functional.binary_cross_entropy_with_logits(
        o, hot(y), weight=CLASS_WEIGHTS
    ),
    "bce_pos_weight": lambda o, y: functional.binary_cross_entropy_with_logits(
        o, hot(y), pos_weight=CLASS_WEIGHTS
    ),
    "kl": lambda o, y: functional.kl_div(
        o.log_softmax(-1), (hot(y) + 0.1).softmax(-1), reduction="batchmean"
    ),
    "ctc": lambda o, y: functional.ctc_loss(
        o.transpose(0, 1).log_softmax(-1),
        y[:, :1].clamp(1),
        torch.full((len(o),), TOKENS),
        torch.ones(len(o), dtype=torch.long),
    ),
    "gaussian": lambda o, y: functional.gaussian_nll_loss(o, hot(y), o.exp()),
    "sum_by_rows": lambda o, y: functional.mse_loss(o, hot(y), reduction="sum") / len(o),
    "probabilities": lambda o, y: ce(o[:, 0], hot(y)[:, 0].add(0.1)),
    "each": lambda o, y: ((o - hot(y)) ** 2).mean((1, 2)),
    "loop": lambda o, y: torch.stack([ce(o[n], y[n].clamp(0)) for n in range(len(o))]).mean(),
    "contrast": lambda o, y: functional.multi_margin_loss(o[:, 0], y[:, 0].clamp(0)),
}
"""Means over examples, whatever each has."""

SUMS: dict[str, Loss] = {
    "sum": lambda o, y: ce(*flat(o, y), reduction="sum"),
    "variational": lambda o, y: (
        functional.mse_loss(o, hot(y), reduction="sum") - 0.5 * (1 + o - o.exp()).sum()
    ),
}


def cases() -> Iterator[tuple[str, Loss]]:
    yield from COUNTED.items()
    yield from BY_ROWS.items()
    yield from SUMS.items()


NAMES = [name for name, _ in cases()]


def penalty(model: nn.Module) -> Tensor:
    return sum(
        (p.pow(2).sum() for p in model.parameters()), start=torch.zeros((), dtype=torch.float64)
    )


def of_torch(loss: Loss, penalized: bool = False, accumulate: int = 1) -> dict[str, Any]:
    """A plain loop: losses of the steps, weights, and the loss of all of the data at the end."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    x, y = labelled()
    size = BATCH * accumulate
    for _ in range(2):
        for start in range(0, EXAMPLES, size):
            rows = slice(start, min(start + size, EXAMPLES))
            found = loss(model(x[rows]), y[rows])
            found = found.mean() + (0.01 * penalty(model) if penalized else 0.0)
            optimizer.zero_grad()
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    with torch.no_grad():
        whole = loss(model(x), y).mean()
    return {"weights": model.state_dict(), "loss": whole.item()}


def fit(name: str, options: dict[str, Any], names: list[str], accumulate: int = 1) -> Any:
    """`Trainer.fit` and `evaluate` with each of these losses."""
    known, found = dict(cases()), {}
    for each in names:
        strategy = make_strategy(name, **options)
        model = net()
        trainer = sp.Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), 0.3),
            loss=known[each],
            strategy=strategy,
            clip_norm=0.5,
            accumulate=accumulate,
            deterministic=not name.startswith("parameter"),
        )
        data = sp.data.arrays(*labelled())
        trainer.fit(data.batch(BATCH), epochs=2, verbose=0)
        loss = trainer.evaluate(data.batch(BATCH - 1))["loss"]
        found[each] = {"weights": weights(strategy, model), "loss": loss}
        strategy.close()
    return found


def loop(name: str, options: dict[str, Any], names: list[str], penalized: bool) -> Any:
    """A loop of one's own, in which the loss is computed before Spartito sees it."""
    known, found = dict(cases()), {}
    for each in names:
        strategy = make_strategy(name, **options)
        model = net()
        model, optimizer = strategy.prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.3),
            clip_norm=0.5,
            deterministic=not name.startswith("parameter"),
        )
        data = strategy.distribute(sp.data.arrays(*labelled()).batch(BATCH))
        for _ in range(2):
            for batch in data:
                loss = known[each](model(batch.x), batch.y)
                if penalized:
                    loss = loss.mean() + 0.01 * penalty(model)
                strategy.backward(loss, batch)
                strategy.update(optimizer)
        found[each] = {"weights": weights(strategy, model)}
        strategy.close()
    return found


class OwnLoss(nn.Module):
    """A model with its loss, as those of Transformers."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net(), loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.net(x)
        return {"loss": self.loss(output, y), "output": output}


def fit_own(name: str, options: dict[str, Any], names: list[str]) -> Any:
    """`Trainer.fit` and `evaluate` of models that compute these losses."""
    known, found = dict(cases()), {}
    for each in names:
        strategy = make_strategy(name, **options)
        model = OwnLoss(known[each])
        trainer = sp.Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), 0.3),
            strategy=strategy,
            clip_norm=0.5,
            deterministic=not name.startswith("parameter"),
        )
        data = sp.data.arrays(*labelled())
        trainer.fit(data.batch(BATCH), epochs=2, verbose=0)
        loss = trainer.evaluate(data.batch(BATCH - 1))["loss"]
        state = weights(strategy, model)
        found[each] = {
            "weights": {key.removeprefix("net."): value for key, value in state.items()},
            "loss": loss,
        }
        strategy.close()
    return found
