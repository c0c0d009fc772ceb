"""Batches that are filled up to one size: numbers stay; models that would notice see others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spartito as sp
from spartito.engine.devices.full_batches import FullBatches

WIDTH = 3


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)).double()


class Centred(nn.Module):
    """Rows that depend on each other, of which no layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x - x.mean(0))


class Counting(nn.Module):
    """Rows that are apart, and a statistic of all that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen += x.abs().sum().detach()
        return self.inner(x)


class Pooled(nn.Module):
    """One row of output for all of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).sum(0, keepdim=True)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def sizes_of(model: nn.Module) -> list[int]:
    """How many rows the model's own forward pass sees from now on, pass after pass."""
    seen: list[int] = []
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return seen


def examples(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module, run: Callable[..., Any], batches: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    for number, x in enumerate(batches):
        (run(model, (x, None), True) * (number + 1)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def plain(model: nn.Module, data: Any, has_loss: bool) -> Any:
    return model(data[0])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_outputs_and_gradients_are_those_of_the_batches(sizes: list[int]) -> None:
    model, batches = linear(), [examples(n, seed) for seed, n in enumerate(sizes)]
    wanted = gradients(model, plain, batches)
    seen = sizes_of(model)
    for one, other in zip(gradients(model, FullBatches(), batches), wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert seen[-1] == max(sizes)


def test_a_smaller_batch_is_filled_and_the_trial_is_made_once() -> None:
    model, run = linear(), FullBatches()
    seen = sizes_of(model)
    outputs = [run(model, (examples(n), None)) for n in (8, 8, 5, 3, 8, 1)]
    assert [len(output) for output in outputs] == [8, 8, 5, 3, 8, 1]
    assert seen == [8, 8, 8, 8, 8, 8, 8, 8]  # two of them the trial


@pytest.mark.parametrize("make", [Centred, Counting, Pooled, normalized])
def test_models_that_would_notice_get_their_batches(make: Callable[[], nn.Module]) -> None:
    batches = [examples(n, n) for n in (8, 5, 8, 3)]
    torch.manual_seed(1)
    model = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = gradients(model, plain, batches)
    after = {name: value.clone() for name, value in model.state_dict().items()}

    model.load_state_dict(state)
    found = gradients(model, FullBatches(), batches)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


def test_batchnorm_is_filled_where_it_does_not_look_at_the_batch() -> None:
    model, run = normalized().eval(), FullBatches()
    seen = sizes_of(model)
    first, second = examples(6), examples(4, 1)
    run(model, (first, None))
    assert torch.allclose(run(model, (second, None)), model(second), rtol=0, atol=1e-12)
    assert seen == [6, 6, 6, 6, 4]
    model.train()
    run(model, (second, None))  # another program: its largest so far
    assert seen[-1] == 4


def test_a_norm_that_is_unfrozen_gets_its_batches() -> None:
    torch.manual_seed(1)
    model, run = normalized(), FullBatches()
    norm = model.get_submodule("1")
    norm.eval()
    first, second = examples(6), examples(4, 1)
    run(model, (first, None))
    seen = sizes_of(model)
    run(model, (second, None))
    assert seen[-1] == 6
    norm.train()
    run(model, (second, None))
    assert seen[-1] == 4
    norm.eval()
    run(model, (second, None))
    assert seen[3:] == [4, 6]  # what was tried is known


def test_a_trial_leaves_the_generator_where_it_was() -> None:
    model = nn.Sequential(linear(), nn.Dropout(0.5))
    torch.manual_seed(3)
    wanted = [model(examples(6)), model(examples(6, 1))[:4]]
    torch.manual_seed(3)
    run = FullBatches()
    again = [run(model, (examples(6), None)), run(model, (examples(6, 1)[:4], None))]
    assert torch.equal(again[0], wanted[0])
    assert torch.equal(again[1], wanted[1])  # whose draws are those of a whole batch


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Texts(nn.Module):
    """Inputs by name, some without rows, and an output whose parts have names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor | None = None) -> Named:
        hidden = self.inner(x.sum(1)) * mask.sum(1, keepdim=True)
        return Named(hidden if scale is None else hidden * scale, hidden)


def test_inputs_by_name_and_each_length_for_itself() -> None:
    model, run = Texts(), FullBatches()
    seen = sizes_of(model)

    def batch(size: int, length: int, **more: Tensor) -> dict[str, Tensor]:
        x = examples(size * length, size).reshape(size, length, WIDTH)
        return {"x": x, "mask": torch.ones(size, length), "y": torch.zeros(size), **more}

    for size, length in [(4, 5), (6, 2), (3, 5), (2, 2)]:
        data = batch(size, length)
        found = run(model, data)
        seen.pop()
        wanted = model(data["x"], data["mask"])
        seen.pop()
        assert isinstance(found, Named)
        assert torch.allclose(found.logits, wanted.logits, rtol=0, atol=1e-12)
        assert len(found.hidden) == size
    assert seen == [4, 4, 6, 6]  # the trials of both lengths

    for size in (6, 3):  # a number without rows: nobody knows whose it is
        data = batch(size, 4, scale=torch.tensor(2.0))
        assert torch.equal(
            run(model, data).logits, model(data["x"], data["mask"], data["scale"])[0]
        )


def test_a_model_with_its_own_loss_gets_its_batches() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            sizes.append(len(x))
            return x.sum() + y.sum()

    sizes: list[int] = []
    run = FullBatches()
    for size in (4, 2):
        run(Own(), (examples(size), examples(size)), False)
    assert sizes == [4, 2]


@pytest.mark.parametrize("fill", [True, False])
def test_a_training_on_full_batches_is_the_one_on_all(fill: bool) -> None:
    """Of 22 examples the last batch has 6 of 8; evaluations have full ones too."""
    x, y = examples(22), torch.arange(22) % 2

    def train(strategy: sp.Strategy) -> tuple[list[float], list[Tensor], set[int]]:
        model = linear()
        trainer = sp.Trainer(
            model,
            optimizer=torch.optim.Adam(model.parameters(), 0.05),
            loss=nn.CrossEntropyLoss(),
            metrics=["accuracy"],
            strategy=strategy,
        )
        seen = sizes_of(model)
        history = trainer.fit((x, y), epochs=3, batch_size=8, validation_data=(x, y), verbose=0)
        predictions = trainer.predict(x)
        curves = [*history.history["loss"], *history.history["val_loss"]]
        return curves, [predictions, *(p.detach() for p in model.parameters())], set(seen)

    wanted, values, _ = train(sp.OneDeviceStrategy(device="cpu"))
    found, filled, sizes = train(sp.TPUStrategy(device="cpu", fill=fill))
    assert found == pytest.approx(wanted, rel=0, abs=1e-12)
    assert all(
        torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(filled, values, strict=True)
    )
    assert sizes == ({8, 22} if fill else {8, 6, 22})
