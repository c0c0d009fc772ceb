"""Going on in the middle of an epoch: exactly there, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import spartito as sp
from spartito.errors import UserError
from spartito.training.files.resume import next_epoch
from tests.training.jobs import data, on_replicas, resume_uneven, trainer


class Ahead(torch.optim.Optimizer):
    """Around another optimizer, whose state its own `state_dict` has, as timm's Lookahead."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.Adam(parameters, 0.1)
        super().__init__(self.base.param_groups, {})
        self.base.param_groups = self.param_groups
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        for fast, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.steps % 3 == 0:
                fast.data.copy_(slow.lerp_(fast.data, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.param_groups = self.base.param_groups
        self.slow, self.steps = state["slow"], state["steps"]


class Slower(torch.optim.Optimizer):
    """Counts its steps for all parameters together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}  # type: ignore[index, call-overload]
        for each in self.param_groups[0]["params"]:
            each.data -= each.grad / self.state["all"]["steps"]  # type: ignore[index]


class Summing(torch.optim.Optimizer):
    """Has the values of its parameters in another dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state.setdefault("single", each.detach().float().mul_(0.1))
            state.setdefault("seen", torch.ones_like(each, dtype=torch.bool))
            assert (state["single"].dtype, state["seen"].dtype) == (torch.float32, torch.bool)
            state["single"] -= 0.1 * each.grad.float()
            each.data.copy_(state["single"])


class Centred(nn.Module):
    """A loss whose centre follows what it has seen, as DINO's, beside weights of the script."""

    centre: Tensor
    weight: Tensor

    def __init__(self, weight: float = 1.0, replaces: bool = False) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2).double())
        self.register_buffer("weight", torch.tensor(weight))
        self.replaces = replaces

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = cross_entropy(output - self.centre.clone(), target, reduction="none")
        now = self.centre.lerp(output.detach().mean(0), 0.1)
        self.centre = now if self.replaces else self.centre.copy_(now)
        return losses * self.weight


@pytest.mark.parametrize("replaces", [False, True])
def test_what_a_loss_has_gathered_goes_on(tmp_path: Path, replaces: bool) -> None:
    given = chain()
    whole = trainer(loss=Centred(replaces=replaces))
    resumed = trainer(loss=Centred(replaces=replaces))
    whole.fit(given, epochs=1, verbose=0)
    whole.save(tmp_path / "saved")
    whole.fit(given, epochs=1, verbose=0)
    resumed.load(tmp_path / "saved")
    resumed.fit(given, epochs=2, verbose=0)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    other_weight = trainer(loss=Centred(2.0))
    other_weight.load(tmp_path / "saved")
    assert isinstance(other_weight.loss, Centred)
    assert other_weight.loss.weight == 2.0  # of the script
    assert other_weight.loss.centre.abs().min() > 0
    trainer(loss=nn.CrossEntropyLoss()).load(tmp_path / "saved")  # another one has none


@pytest.mark.parametrize("optimizer", [Ahead, Slower, Summing])
def test_what_an_optimizer_of_ones_own_keeps_goes_on(tmp_path: Path, optimizer: Any) -> None:
    whole, resumed = trainer(optimizer=optimizer), trainer(optimizer=optimizer)
    given = chain()
    whole.fit(given, epochs=1, verbose=0)
    whole.save(tmp_path / "saved")
    whole.fit(given, epochs=1, verbose=0)
    resumed.load(tmp_path / "saved")
    resumed.fit(given, epochs=2, verbose=0)
    assert resumed.step == whole.step
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def chain(count: int = 20, batch: int = 5) -> sp.data.Dataset:
    return sp.data.arrays(*data(count)).shuffle().batch(batch)


def saved(folder: Path, after: int, steps: int | None = None) -> Path:
    """A checkpoint after so many steps."""

    class Save(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.step == after:
                self.trainer.save(folder / "saved")

    trainer().fit(chain(), epochs=2, steps_per_epoch=steps, callbacks=[Save()], verbose=0)
    return folder / "saved"


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (chain(batch=10), {}, "batch_size=5, and this fit has batch_size=10"),
        (chain(40), {}, "examples=20, and this fit has examples=40"),
        (sp.data.arrays(*data()).batch(5), {}, "shuffled=True, and this fit has shuffled=False"),
        (chain().shuffle(8), {}, "seed=0, and this fit has seed=8"),
        (chain().repeat(2), {}, "repeats=1, and this fit has repeats=2"),
        (chain(), {"steps_per_epoch": 3}, "steps_per_epoch=None, and this fit has"),
    ],
)
def test_other_data_in_the_middle_of_an_epoch(
    tmp_path: Path, given: Any, options: dict[str, Any], text: str
) -> None:
    made = trainer()
    made.load(saved(tmp_path, 2))
    with pytest.raises(UserError, match=text) as info:
        made.fit(given, epochs=2, verbose=0, **options)
    assert "after 2 batches of a pass (2 of its epoch)" in str(info.value)
    made.load(tmp_path / "saved")
    history = made.fit(given, epochs=1, initial_epoch=0, verbose=0, **options)  # a whole one
    assert history.epoch == [0]
    assert made.step == 2 + (options.get("steps_per_epoch") or len(given))


def test_between_epochs_all_may_change(tmp_path: Path) -> None:
    before = trainer()
    before.fit(chain(), epochs=1, steps_per_epoch=3, verbose=0)  # ends in the middle of a pass
    before.save(tmp_path)
    made = trainer()
    made.load(tmp_path)
    made.fit(chain(), epochs=2, steps_per_epoch=5, verbose=0)
    assert (made.step, made.epoch) == (8, 2)
    made.load(tmp_path)
    with pytest.raises(UserError, match="this fit has batch_size=4"):
        made.fit(chain(batch=4), epochs=2, steps_per_epoch=3, verbose=0)
    before.fit(chain(), verbose=0)  # ends with its pass
    before.save(tmp_path / "whole")
    made.load(tmp_path / "whole")
    made.fit(chain(30, 6), epochs=2, steps_per_epoch=5, verbose=0)
    assert made.step == 3 + 4 + 5


def test_the_passes_of_other_data_are_whole() -> None:
    made = trainer()
    made.fit(chain(), verbose=0)
    made.fit(chain().repeat(3), verbose=0)
    assert made.step == 4 + 12


def test_sources_of_unequal_length_go_on_where_they_were(tmp_path: Path) -> None:
    for rank, results in enumerate(on_replicas(resume_uneven, 2, str(tmp_path))):
        whole, steps, read = results[0]
        assert (steps, read) == (10, (4, 10)[rank])
        for resumed, its_steps, its_read in results[1:]:
            assert its_steps == 10
            assert its_read <= (5, 10)[rank]  # no pass too much; one batch to know the shape
            for one, other in zip(whole, resumed, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_an_evaluation_does_not_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data(13)
    made = trainer()
    with torch.no_grad():
        expected = cross_entropy(made.model(x), y).item()
    for _ in range(2):
        figures = made.evaluate((x, y), steps=5, batch_size=5)
        assert figures["loss"] == pytest.approx(expected, abs=1e-12)
    assert "5 steps to evaluate, and the data has 3 batches" in caplog.text
    with torch.no_grad():
        some = cross_entropy(made.model(x[:10]), y[:10]).item()
    assert made.evaluate((x, y), steps=2, batch_size=5)["loss"] == pytest.approx(some, abs=1e-12)
    endless = sp.data.arrays(x[:5], y[:5]).batch(5).repeat()
    with torch.no_grad():
        some = cross_entropy(made.model(x[:5]), y[:5]).item()
    assert made.evaluate(endless, steps=3)["loss"] == pytest.approx(some, abs=1e-12)


def test_an_update_is_gone_on_with_as_it_was_begun(tmp_path: Path) -> None:
    class Save(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 0:
                self.trainer.save(tmp_path / "saved")

    trainer(accumulate=2).fit(chain(), epochs=1, callbacks=[Save()], verbose=0)
    other = trainer(accumulate=3)
    other.load(tmp_path / "saved")
    with pytest.raises(UserError, match=r"after 1 of 2 batches of an update, and accumulate=3 now"):
        other.fit(chain(), epochs=1, verbose=0)
    other.load(tmp_path / "saved")
    other.fit(chain(), epochs=1, initial_epoch=0, verbose=0)  # a whole one: nothing waits
    assert other.step == 2  # of 3 batches, and of the last one


@pytest.mark.parametrize(
    ("number", "step", "repeats", "expected"),
    [
        (0, 0, 1, 0),
        (0, 3, 1, 1),  # in the middle of a pass: that order was begun
        (2, 0, 1, 2),
        (2, 0, 2, 2),  # between two epochs
        (1, 0, 2, 2),  # between two passes of one
        (2, 1, 2, 4),
        (3, 1, 2, 4),
        (4, 2, 3, 6),
        (0, 5, None, 1),
    ],
)
def test_the_next_epoch_begins_with_a_pass_that_nobody_began(
    number: int, step: int, repeats: int | None, expected: int
) -> None:
    chain = sp.data.arrays(torch.zeros(4, 1), torch.zeros(4)).batch(2).repeat(repeats)
    found = next_epoch({"pass": number, "step": step}, chain)
    assert found == {"pass": expected, "step": 0}
