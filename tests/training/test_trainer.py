"""One trainer on one device: its errors, its figures, and going on."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.errors import UserError
from tests.replicas import Replicas
from tests.training.jobs import data, net, on_replicas, stop_early, trainer, uneven_sizes


def weights(made: sp.Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"metrics": ["acc"]}, "the metric 'acc' is called 'accuracy'"),
        ({"loss": nn.MSELoss}, "loss=MSELoss is a class"),
        ({"model": nn.Linear}, "is no module"),
        ({"loss": nn.MSELoss(reduction="sum")}, r"MSELoss\(reduction='sum'\)"),
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"optimizer": torch.optim.SGD(net().parameters(), 0.1)}, "are not the model's"),
        ({"optimizer": lambda parameters: 3}, "the optimizer function returned int"),
        (
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(
                    torch.optim.SGD(net().parameters(), 0.1), 3
                )
            },
            "the StepLR schedules another optimizer",
        ),
    ],
)
def test_trainers_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        trainer(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": -1}, r"fit\(epochs=-1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"validation_data": data(), "validation_steps": 0}, r"fit\(validation_steps=0\)"),
        ({"data": sp.data.arrays(*data()).batch(4).repeat()}, "data that repeats without end"),
        (
            {"validation_data": sp.data.arrays(*data()).batch(4).repeat()},
            "validation data that repeats without end",
        ),
        ({"data": (torch.zeros(0, 3), torch.zeros(0))}, "the data set has no examples"),
        ({"data": "photos"}, "str is no data"),
        ({"callbacks": [sp.callbacks.TerminateOnNaN]}, "TerminateOnNaN is a class"),
        ({"callbacks": [print]}, "is no callback"),
    ],
)
def test_fits_that_cannot_be(options: dict[str, Any], text: str) -> None:
    made = trainer()
    before = weights(made)
    with pytest.raises(UserError, match=text):
        made.fit(options.pop("data", data()), verbose=0, **options)
    assert equal(weights(made), before)
    wrong: list[Any] = [-1, 1.5]
    for steps in wrong:
        with pytest.raises(UserError, match=rf"evaluate\(steps={steps}\)\n  A whole number"):
            made.evaluate(data(), steps=steps)
        with pytest.raises(UserError, match=rf"predict\(steps={steps}\)\n  A whole number"):
            made.predict(data(), steps=steps)


def test_an_output_that_does_not_fit_the_loss() -> None:
    x, y = data()
    with pytest.raises(UserError, match="MSELoss does not fit an output of") as info:
        trainer(loss=nn.MSELoss()).fit((x, y.double()), batch_size=5, verbose=0)
    assert "(5, 2) float64" in str(info.value)
    assert "a target of (5,) float64" in str(info.value)


def test_without_an_optimizer_one_can_only_look() -> None:
    with pytest.raises(UserError, match="without an optimizer"):
        trainer(optimizer=None).fit(data(), verbose=0)
    figures = trainer(optimizer=None).evaluate(data())
    assert set(figures) == {"loss"}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("deterministic", [False, True])
def test_models_of_torchscript_are_refused(deterministic: bool) -> None:
    script = torch.jit.script(nn.Linear(2, 1))
    for made in (script, nn.Sequential(script)) if deterministic else (script,):
        optimizer = torch.optim.SGD(made.parameters(), 0.1)
        with pytest.raises(UserError, match=r"Linear, is compiled by torch\.jit"):
            sp.Trainer(
                made, optimizer=optimizer, loss=nn.MSELoss(), strategy=sp.OneDeviceStrategy(),
                deterministic=deterministic,
            )  # fmt: skip


def test_lbfgs_is_for_loops_of_ones_own() -> None:
    """Its step computes the loss several times."""
    model, (x, y) = net(), data()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UserError, match="LBFGS computes the loss of a batch several times"):
        trainer(model=model, optimizer=optimizer)
    strategy = sp.OneDeviceStrategy()
    prepared, _ = strategy.prepare(model, optimizer)
    for batch in strategy.distribute(sp.data.arrays(x, y).batch(20)):
        before = nn.functional.cross_entropy(prepared(batch.x), batch.y)

        def closure() -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(prepared(x), y)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        assert nn.functional.cross_entropy(prepared(x), y) < before
        strategy.backward(nn.functional.cross_entropy(prepared(batch.x), batch.y), batch)
        for step in (lambda: strategy.update(optimizer), lambda: optimizer.step(closure)):
            with pytest.raises(UserError, match=r"loss\.backward\(\) in the closure"):
                step()


def refused(strategy: sp.Strategy) -> list[str]:
    """What two replicas say of optimizers that they cannot share."""
    messages = []
    for name in ("used", "LBFGS"):
        model = net()
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
        if name == "LBFGS":
            optimizer = torch.optim.LBFGS(model.parameters())
        else:
            model(data()[0]).sum().backward()
            optimizer.step()
        try:
            trainer(strategy, model=model, optimizer=optimizer)
        except UserError as error:
            messages.append(str(error))
    try:
        trainer(strategy).fit(data(), batch_size=1, verbose=0)
    except UserError as error:
        messages.append(str(error))
    return messages


def test_what_two_replicas_refuse() -> None:
    for used, lbfgs, batch in on_replicas(refused, 2):
        assert "an Adam with state of 4 parameters for 2 replicas" in used
        assert "LBFGS calls a closure" in lbfgs
        assert "a global batch of 1 for 2 replicas" in batch


def test_figures_and_predictions_in_their_order() -> None:
    x, y = data(11)
    made = trainer(metrics=["accuracy"])
    made.model.train()
    output = made.model(x)
    shuffled = sp.data.arrays(x, y).shuffle().batch(4)
    for given in ((x, y), shuffled):
        predicted = made.predict(given, batch_size=4)
        torch.testing.assert_close(predicted, output.detach(), rtol=0, atol=1e-12)
    assert torch.equal(made.predict(x, batch_size=3, steps=2), made.predict(x[:6], batch_size=3))
    figures = made.evaluate(shuffled)
    assert list(figures) == ["loss", "accuracy"]
    assert figures["loss"] == pytest.approx(nn.functional.cross_entropy(output, y).item())
    assert figures["accuracy"] == pytest.approx((output.argmax(1) == y).double().mean().item())
    first = made.evaluate((x, y), batch_size=4, steps=2)
    assert first["loss"] == pytest.approx(nn.functional.cross_entropy(output[:8], y[:8]).item())
    assert made.model.training
    with pytest.raises(UserError, match=r"predict\(steps=0\)"):
        made.predict(x, steps=0)
    made.model.register_forward_hook(lambda _, given, output: output.t())
    with pytest.raises(UserError, match=r"an output of \(2, 4\) for 4 examples"):
        made.predict(x, batch_size=4)


def test_float64_arrays_for_a_float32_model() -> None:
    made = trainer(model=net().float())
    history = made.fit(data(), epochs=1, verbose=0)
    assert math.isfinite(history.history["loss"][0])
    assert made.predict(data()[0].numpy()).dtype == torch.float32


def test_a_model_that_changes_its_input_leaves_the_users_arrays_alone() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            x /= 10
            return self.net(x)  # type: ignore[no-any-return]

    x, y = data()
    before = x.clone()
    made = trainer(model=Scaled())
    made.fit((x, y), epochs=2, batch_size=5, validation_data=(x, y), verbose=0)
    made.predict(x)
    assert torch.equal(x, before)


def test_several_trainers_share_a_strategy() -> None:
    """k-fold, or a notebook whose cells run twice: each trainer keeps to its own model."""
    for shared, alone, seconds in on_replicas(folds, 2):
        assert shared == alone
        assert seconds == 1


def test_trainers_that_are_given_no_strategy_have_one_in_a_job(replicas: Replicas) -> None:
    assert replicas(without_a_strategy, 2) == [(True, True, [0, 1])] * 2


def without_a_strategy() -> tuple[bool, bool, list[int]]:
    """Whether two have one, whether a third has another after the end, and who trained."""
    first, second = (sp.Trainer(net(), optimizer=sgd, loss=nn.CrossEntropyLoss()) for _ in "ab")
    trained = []
    for number, each in enumerate((second, first)):
        each.fit(data(), batch_size=8, epochs=1, verbose=0)
        if each.step == 3:
            trained.append(number)
    is_one = first.strategy is second.strategy
    first.strategy.close()
    third = sp.Trainer(net(), optimizer=sgd, loss=nn.CrossEntropyLoss())
    third.fit(data(), batch_size=8, epochs=1, verbose=0)
    return is_one, third.strategy is not first.strategy, trained


def test_tasks_with_other_data_are_refused(replicas: Replicas) -> None:
    whole, other = replicas(with_data_of_its_own, 2)
    refused = "worker 1 was given other data than worker 0"
    assert whole == other == ["", "", *[refused] * 4]


def with_data_of_its_own() -> list[str]:
    """What two tasks say of data that differ by rounding, and of data that differ."""
    x, y = data()
    said = []
    rank = int(os.environ["RANK"])
    whole = torch.utils.data.TensorDataset(x, y)
    pairs: Any = [*zip(x, y, strict=True)]
    part: Any = torch.utils.data.Subset
    given: list[Any] = [
        torch.utils.data.TensorDataset(torch.where(x > 0, x + 1e-9 * rank, x), y),
        part(whole, range(1, 20)),
        torch.utils.data.TensorDataset(torch.where(x > 0, x + 1.0 * rank, x), y),
        part(whole, range(rank, 20, 2)),
        torch.utils.data.ConcatDataset([part(pairs, range(9)), part(pairs, [rank])]),
        pairs[: 8 + rank],
    ]
    for mine in given:
        made = sp.Trainer(net(), optimizer=sgd, loss=nn.CrossEntropyLoss())
        try:
            made.fit(mine, batch_size=8, verbose=0)
            said.append("")
        except UserError as error:
            said.append(str(error).partition(" (")[0].partition("\n")[0])
    return said


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def test_sparse_gradients_of_one_device_are_torchs() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))

    x, y = torch.arange(24).view(8, 3) % 9, torch.arange(8) % 2
    ours, plain = made(), made()
    trainer(model=ours).fit((x, y), batch_size=8, epochs=1, verbose=0)
    nn.CrossEntropyLoss()(plain(x), y).backward()
    sgd(plain.parameters()).step()
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=0, atol=1e-7)


def folds(strategy: sp.Strategy) -> tuple[list[Any], list[Any], int]:
    """What two interleaved trainers come to, what each comes to alone, and pairs of one net."""
    x, y = data(24)

    def fold(number: int, on: sp.Strategy) -> sp.Trainer:
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
        return trainer(on, model=model.double(), seed=number, deterministic=True)

    def look(made: sp.Trainer) -> list[Any]:
        return [made.history.history, made.evaluate((x, y)), made.predict(x).tolist()]

    def fit(made: sp.Trainer, **options: Any) -> None:
        made.fit((x, y), epochs=2, batch_size=8, verbose=0, **options)

    first, second = fold(1, strategy), fold(2, strategy)

    class Peek(sp.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            second.evaluate((x, y))

    fit(first, callbacks=Peek())
    fit(second)
    shared = [*look(first), *look(second)]
    alone = []
    for number in (1, 2):
        made = fold(number, strategy)
        fit(made)
        alone += look(made)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        trainer(strategy, model=model, optimizer=optimizer)
    return (
        shared,
        alone,
        sum(pair.optimizer is optimizer for pair in strategy.engine.team.pairs.all),
    )


def test_what_is_lazy_gets_its_size_on_one_device_only() -> None:
    x, y = data()
    made = trainer(model=nn.Sequential(nn.LazyLinear(2)).double())
    made.fit((x, y), batch_size=5, verbose=0)
    assert made.model[0].weight.shape == (2, 3)  # type: ignore[index]
    for text in on_replicas(lazy, 2):
        assert "2 lazy parameters, the first '0.weight', on several tasks" in text
        assert "net(x[:1])" in text


def lazy(strategy: sp.Strategy) -> str:
    with pytest.raises(UserError) as info:
        trainer(strategy, model=nn.Sequential(nn.LazyLinear(2)))
    return str(info.value)


def test_targets_that_are_all_left_out(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    nobody = torch.full_like(y, -100)
    made = trainer()
    with pytest.raises(UserError, match="an evaluation of 20 examples of which none counts"):
        made.evaluate((x, nobody))
    before = weights(made)
    made.fit((x, nobody), verbose=0)
    assert equal(weights(made), before)
    assert "none of the 20 examples of this epoch counts" in caplog.text
    with pytest.raises(UserError, match="an evaluation without examples"):
        made.evaluate(sp.data.per_worker(lambda context: [(x[:0], y[:0])]))


def test_a_loss_that_is_no_number_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    x[0] = torch.nan
    trainer().fit((x, y), epochs=2, verbose=0)
    assert caplog.text.count("the loss of this epoch is nan") == 1


def test_a_generator_is_read_once() -> None:
    x, y = data()
    made = trainer()
    with pytest.raises(UserError, match="the generator that was given as data is used up"):
        made.fit(((x[n : n + 5], y[n : n + 5]) for n in (0, 5)), epochs=2, verbose=0)
    assert made.step == 2


def test_early_stopping_on_two_replicas() -> None:
    deltas = [0.0, -0.5, 3.0, 3.0, 3.0, 3.0]
    results = on_replicas(stop_early, 2, deltas)
    assert results[0] == results[1]
    epochs, history, best = results[0]
    assert (epochs, history) == (best + 3, list(range(best + 3)))
    assert epochs < len(deltas)


def test_a_loss_that_is_no_number_ends_it() -> None:
    x, y = data()
    x[7] = float("nan")
    made = trainer()
    callbacks = [sp.callbacks.TerminateOnNaN()]
    history = made.fit((x, y), epochs=5, batch_size=5, callbacks=callbacks, verbose=0)
    assert made.step <= 3  # the second batch has it
    assert len(history.epoch) == 1
    assert made.stop_training


def test_unequal_batches_of_each_worker_are_weighted() -> None:
    """Rank 0 has twice the examples of rank 1; the update is that of all of them together."""
    x, y = data(12)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in (slice(0, 6), slice(6, 9), slice(9, 12)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for result in on_replicas(uneven_sizes, 2):
        for got, expected in zip(result, model.parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-12)


def test_a_model_of_several_dtypes_gets_data_as_it_is() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
            self.net = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            out: Tensor = self.net(x) * self.scale
            return out

    made = trainer(model=Scaled())
    made.fit((torch.randn(6, 3), torch.zeros(6, dtype=torch.long)), epochs=1, verbose=0)
