"""Losses as people write them, on the replicas of a strategy and in a plain loop of torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spartito as sp
from spartito.errors import TaskLostError, UserError
from spartito.notes import logger
from tests.replicas import warns
from tests.strategies.jobs import make_strategy, weights

EXAMPLES, BATCH, TOKENS, FEATURES, CLASSES = 17, 6, 3, 5, 4
"""The last batch has 5: three rows for one replica, two for the other."""

EPOCHS = 1

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


def each_token(o: Tensor, y: Tensor) -> Tensor:
    return ce(o.transpose(1, 2), y.clamp(0), reduction="none")


def in_chunks(o: Tensor, y: Tensor) -> Tensor:
    scores, labels = flat(o, y)
    parts = zip(scores.split(4), labels.split(4), strict=True)
    total = sum((ce(a, b, reduction="sum") for a, b in parts), start=torch.zeros(()).double())
    return total / (y != -100).sum()


def smoother(o: Tensor, y: Tensor) -> Tensor:
    """As Transformers' ``LabelSmoother``: two sums, one of them divided by tokens times classes."""
    scores, padded = -o.log_softmax(-1), (y == -100)[..., None]
    exact = scores.gather(-1, y.clamp(0)[..., None]).masked_fill(padded, 0.0)
    smooth = scores.sum(-1, keepdim=True).masked_fill(padded, 0.0)
    number = padded.numel() - padded.long().sum()
    return 0.9 * exact.sum() / number + 0.1 * (smooth.sum() / (number * CLASSES))


def boxes(o: Tensor, y: Tensor) -> Tensor:
    """As of a detector: sums over what was found, divided by how many, 1 at least."""
    kept = y != -100
    number = max(1, int(kept.sum()))
    far = functional.smooth_l1_loss(o[kept], hot(y)[kept], reduction="sum") / number
    return ce(*flat(o, y), reduction="sum") / number + far


def speech(o: Tensor, y: Tensor) -> Tensor:
    lengths = 1 + y[:, 0].clamp(0) % 2
    scores = o.repeat(1, 3, 1).transpose(0, 1).log_softmax(-1)
    frames = torch.full((len(o),), 3 * TOKENS)
    sums = functional.ctc_loss(scores, y[:, :2].clamp(1), frames, lengths, reduction="sum")
    return sums / lengths.sum()


def weighted_yes_or_no(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).double()[..., None].expand_as(o)
    sums = functional.binary_cross_entropy_with_logits(o, hot(y), mask, reduction="sum")
    return sums / mask.sum()


def policy(o: Tensor, y: Tensor) -> Tensor:
    """As of PPO: clipped ratios, an entropy and values, each a masked mean."""
    mask, gain = (y != -100).double(), hot(y)[..., 0] - 0.3
    chances = -each_token(o, y)
    ratio = torch.exp(chances - chances.detach() + 0.1)
    worse = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    scores = o.log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    values = (o[..., 0] - 1) ** 2
    parts = [(part * mask).sum() / mask.sum().clamp(1) for part in (-worse, values, entropy)]
    return parts[0] + 0.5 * parts[1] - 0.01 * parts[2]


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
    "in_chunks": in_chunks,
    "smoother": smoother,
    "boxes": boxes,
    "speech": speech,
    "weighted_yes_or_no": weighted_yes_or_no,
    "policy": policy,
    "divided_first": lambda o, y: (each_token(o, y) * own_weights(y) / own_weights(y).sum()).sum(),
    "lest_it_is_0": lambda o, y: (
        (each_token(o, y) * (y != -100)).sum() / ((y != -100).sum() + 1e-14)
    ),
    "other_mask": lambda o, y: (
        (each_token(o, y) * (y != -100) * (y > 0)).sum() / (y != -100).sum().clamp(1)
    ),
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
    "mean_then_sum": lambda o, y: each_token(o, y).mean(0).sum(),
    "long_texts": lambda o, y: each_token(o, y).mean(1).mean(0),
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


def normal(o: Tensor) -> Tensor:
    return functional.normalize(o, dim=-1)


def own_weights(y: Tensor) -> Tensor:
    return (y.clamp(0) + 1).double()


DOUBTFUL: dict[str, Loss] = {
    "root": lambda o, y: functional.mse_loss(o, hot(y)).sqrt(),
    "logarithm": lambda o, y: functional.mse_loss(o, hot(y)).log(),
    "contrastive": lambda o, y: ce(normal(o[:, 0]) @ normal(o[:, 1]).T, torch.arange(len(o))),
    "correlations": lambda o, y: (o[:, 0].T @ o[:, 1] / len(o) - torch.eye(CLASSES)).square().sum(),
    "every_pair": lambda o, y: (o[:, None, 0] - o[None, :, 1]).square().mean(),
    "distances": lambda o, y: torch.cdist(o[:, 0], o[:, 1]).mean(),
    "centred": lambda o, y: (o - o.mean(0)).square().mean(),
    "balanced": lambda o, y: (o.softmax(-1).mean((0, 1)) * hot(y).mean((0, 1))).sum(),
    "overlap": lambda o, y: (
        1 - ((o * hot(y)).sum((0, 1)) / (o.square() + hot(y)).sum((0, 1))).mean()
    ),
    "hardest": lambda o, y: each_token(o, y).flatten().topk(2).values.mean(),
    "median": lambda o, y: each_token(o, y).median(),
    "shares": lambda o, y: (each_token(o, y) * (own_weights(y) / own_weights(y).sum())).sum(),
    "even_shares": lambda o, y: (
        each_token(o, y) * (own_weights(y) / own_weights(y).mean())
    ).mean(),
    "different_counts": lambda o, y: ce(*flat(o, y)) + 0.01 * o.square().mean(),
    "a_sum_beside": lambda o, y: functional.mse_loss(o, hot(y)) + 0.1 * o.square().sum(),
    "a_constant": lambda o, y: (o - hot(y)).square().sum() / 10,
    "opaque": lambda o, y: opaque(*flat(o, y)),
}
"""What the parts of a batch do not make, or nobody can know."""


class Opaque(torch.autograd.Function):
    """A mean over tokens that count, as a kernel of one's own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            own = scores.detach().requires_grad_()
            loss = ce(own, labels)
        ctx.save_for_backward(*torch.autograd.grad(loss, own))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0], None


opaque: Any = Opaque.apply


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
    for _ in range(EPOCHS):
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
        trainer.fit(data.batch(BATCH), epochs=EPOCHS, verbose=0)
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
        for _ in range(EPOCHS):
            for batch in data:
                loss = known[each](model(batch.x), batch.y)
                if penalized:
                    loss = loss.mean() + 0.01 * penalty(model)
                strategy.backward(loss, batch)
                strategy.update(optimizer)
        found[each] = {"weights": weights(strategy, model)}
        strategy.close()
    return found


def refusals(name: str, how: str, each: str) -> str:
    """What is said of a doubtful loss: of a function, in a loop of one's own, of a model."""
    strategy, loss = make_strategy(name), DOUBTFUL[each]
    model = net() if how != "model" else OwnLoss(loss)
    data = sp.data.arrays(*labelled()).batch(BATCH)
    try:
        if how == "loop":
            model, optimizer = strategy.prepare(
                model, torch.optim.SGD(model.parameters(), 0.3), deterministic=True
            )
            for batch in strategy.distribute(data):
                strategy.backward(loss(model(batch.x), batch.y), batch)
                strategy.update(optimizer)
        else:
            trainer = sp.Trainer(
                model,
                optimizer=torch.optim.SGD(model.parameters(), 0.3),
                loss=loss if how == "function" else None,
                strategy=strategy,
                deterministic=True,
            )
            trainer.fit(data, verbose=0)
    except (UserError, TaskLostError) as error:  # where one refuses, the others find it gone
        return str(error)
    finally:
        strategy.close()
    return "nothing was said"


def after_a_good_loss(how: str) -> str:
    """What is said of a loss that nobody sees into, after another whose halves agreed."""

    def good(o: Tensor, y: Tensor) -> Tensor:
        found: Tensor = opaque(o[:, 0], y[:, 0].clamp(0))
        return found

    strategy, model, bad = make_strategy("mirrored"), net(), DOUBTFUL["opaque"]
    data, optimizer = sp.data.arrays(*labelled()).batch(BATCH), torch.optim.SGD(model.parameters())
    try:
        if how == "step":
            strategy.prepare(model, optimizer, deterministic=True)
            for loss in (good, bad):
                for batch in strategy.distribute(data):
                    strategy.step(batch, loss)
        else:
            trainer = sp.Trainer(
                model, optimizer=optimizer, loss=good, strategy=strategy, deterministic=True
            )
            trainer.fit(data, verbose=0)
            trainer.loss = bad
            trainer.evaluate(data)
    except (UserError, TaskLostError) as error:
        return str(error)
    finally:
        strategy.close()
    return "nothing was said"


class Said(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    said = Said()
    logger.addHandler(said)
    try:
        yield said.lines
    finally:
        logger.removeHandler(said)


@warns("a loss that ")
def two_trainings(each: str) -> list[list[str]]:
    """What is said in each of two trainings with a doubtful loss, one after the other."""
    found = []
    for _ in range(2):
        strategy, model = make_strategy("mirrored"), net()
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        trainer = sp.Trainer(model, optimizer=optimizer, loss=DOUBTFUL[each], strategy=strategy)
        with listening() as said:
            trainer.fit(sp.data.arrays(*labelled()).batch(BATCH), epochs=2, verbose=0)
        found.append(said)
        strategy.close()
    return found


@warns("a loss that ")
def two_loops(each: str) -> list[list[str]]:
    """The same, in loops of one's own with one strategy."""
    found = []
    with make_strategy("mirrored") as strategy:
        for _ in range(2):
            model = net()
            model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.3))
            with listening() as said:
                for batch in strategy.distribute(sp.data.arrays(*labelled()).batch(BATCH)):
                    strategy.backward(DOUBTFUL[each](model(batch.x), batch.y), batch)
                    strategy.update(optimizer)
            found.append(said)
    return found


class Padded(nn.Module):
    """Computes its loss by plain arithmetic: over what a mask leaves, where it leaves out any."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        each = (self.second(self.first(x)) - 1).square()[:, 0]
        if bool(mask.all()):
            return {"loss": each.mean()}
        return {"loss": (each * mask).sum() / mask.sum()}


def padded() -> list[tuple[Tensor, Tensor]]:
    """Batches without and with padding, which one replica has more of."""
    x = torch.arange(8.0).double()[:, None]
    return [(x, torch.ones(8).double()), (x, torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 0]).double())]


def evaluate_padded(name: str, options: dict[str, Any]) -> list[float]:
    """The figures of evaluations one after the other."""
    strategy, model = make_strategy(name, **options), Padded().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    trainer = sp.Trainer(model, optimizer=optimizer, strategy=strategy, deterministic=True)
    data = [sp.data.arrays({"x": x, "mask": mask}).batch(8) for x, mask in padded()]
    found = [trainer.evaluate(each)["loss"] for each in data]
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


def third(output: Tensor, y: Tensor) -> Tensor:
    """Its divisor is the count of those replicas alone that have three rows."""
    return nn.functional.cross_entropy(output, y, reduction="sum") / 3.0


@warns("a loss that is a sum over the batch divided by 3")
def evaluate_third(name: str, options: dict[str, Any]) -> float:
    """The figure of five rows in an evaluation after an epoch."""
    strategy, model = make_strategy(name, **options), OwnLoss(third)
    trainer = sp.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), 0.0), strategy=strategy
    )
    data = sp.data.arrays(torch.eye(FEATURES).double(), torch.arange(5) % CLASSES).batch(5)
    trainer.fit(data, verbose=0)  # with zero=3 they meet in forward passes from now on
    found: float = trainer.evaluate(data)["loss"]
    strategy.close()
    return found


class Detached(OwnLoss):
    """A model that tells nobody what its loss comes of."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = super().forward(x, y)
        return {"loss": output["loss"].detach()}


@warns("a loss of the model's own without a graph")
def evaluate_detached(name: str, options: dict[str, Any], deterministic: bool) -> list[str]:
    """What is said where nothing tells what a loss is divided by."""
    strategy, model = make_strategy(name, **options), Detached(COUNTED["masked"])
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    trainer = sp.Trainer(model, optimizer=optimizer, strategy=strategy, deterministic=deterministic)
    with listening() as said:
        try:
            trainer.evaluate(sp.data.arrays(*labelled()).batch(BATCH))
        except (UserError, TaskLostError) as error:
            return [str(error)]
        finally:
            strategy.close()
    return said


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
        trainer.fit(data.batch(BATCH), epochs=EPOCHS, verbose=0)
        loss = trainer.evaluate(data.batch(BATCH - 1))["loss"]
        state = weights(strategy, model)
        found[each] = {
            "weights": {key.removeprefix("net."): value for key, value in state.items()},
            "loss": loss,
        }
        strategy.close()
    return found
