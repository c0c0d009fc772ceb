from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartito.errors import UserError
from spartito.models import CatsVsDogs, MnistMLP
from spartito.training.summary import summarize, summary


def test_prints_layers_shapes_and_exact_totals(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(CatsVsDogs(), (2, 3, 64, 64))
    text = capsys.readouterr().out
    assert text == f"{found}\n"
    lines = text.splitlines()
    assert lines[0] == "CatsVsDogs"
    assert lines[-1] == "2,782,649 parameters and statistics = 2,773,913 trainable + 8,736 not"
    row = next(line for line in lines if line.startswith("entry2 "))
    assert row.split("  ")[-1].strip() == "18,496"
    assert "(2, 64, 32, 32)" in row
    row = next(line for line in lines if line.startswith("blocks.0.norm1"))
    assert row.split()[-1] == "512"
    assert len({len(line) for line in lines[1:-1]}) == 1


def test_silent_on_request_and_without_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    found = summarize(MnistMLP())
    assert capsys.readouterr().out == ""
    assert "output shape" not in str(found)
    assert [layer.count.total for layer in found.layers] == [200_960, 65_792, 2_570]


def test_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout())
    model[2].eval()
    before = {name: state.clone() for name, state in model.state_dict().items()}
    random = torch.get_rng_state()
    summarize(model, torch.randn(2, 1, 5, 5, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model] == [True, True, False]
    assert not any(module._forward_hooks for module in model.modules())
    for name, state in model.state_dict().items():
        assert torch.equal(state, before[name])


def test_frozen_parameters_are_fixed_and_counters_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    found = summarize(model)
    assert (found.trainable, found.fixed) == (4 + 8, 12 + 8)


def test_buffers_that_are_not_saved_do_not_count() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(5, 5), persistent=False)
    model.register_buffer("kept", torch.ones(3))
    assert summarize(model).fixed == 3


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, shift: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.embed(tokens) * self.scale + shift
        return self.head(hidden), {"hidden": hidden}


@pytest.mark.parametrize("named", [True, False])
def test_tied_parameters_count_once_and_inputs_may_be_several(named: bool) -> None:
    parts = {"tokens": torch.zeros(2, 3, dtype=torch.long), "shift": torch.zeros(4)}
    found = summarize(Tied(), parts if named else tuple(parts.values()))
    assert found.count.total == 41
    rows = {layer.name: layer for layer in found.layers}
    assert rows["(model)"].count.total == 1
    assert rows["embed"].count.total + rows["head"].count.total == 40
    assert rows["head"].shape == "(2, 3, 10)"


def test_lazy_parameters_are_not_yet_known_until_an_input_tells() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    found = summarize(model)
    assert found.totals == (
        "10 parameters and statistics = 10 trainable + 0 not; "
        "2 more get their size from the first batch"
    )
    assert str(found).splitlines()[4].split()[-1] == "?"
    told = summarize(model, torch.zeros(1, 3))
    assert (told.trainable, told.count.unknown) == (26, 0)
    lazy = model[0]
    assert isinstance(lazy, nn.LazyLinear)
    assert nn.parameter.is_lazy(lazy.weight)


def test_a_size_is_filled_in_the_models_own_dtype() -> None:
    found = summarize(nn.Linear(3, 2).double(), (5, 3))
    assert found.layers[0].shape == "(5, 2)"


@pytest.mark.parametrize("wrong", [(1, 7), torch.zeros(1, 7), {"nothing": torch.zeros(1)}, ()])
def test_an_example_that_does_not_fit_is_named(wrong: Any) -> None:
    with pytest.raises(UserError, match="Linear does not take"):
        summarize(nn.Linear(3, 2), wrong)


def test_a_module_with_a_buffer_alone() -> None:
    positions = nn.Module()
    positions.register_buffer("table", torch.arange(6.0).view(2, 3))
    found = summarize(nn.Sequential(nn.Linear(3, 3), positions))
    assert [layer.count.fixed for layer in found.layers] == [0, 6]


def test_a_model_without_parameters() -> None:
    found = summarize(nn.Flatten())
    assert found.totals == "0 parameters and statistics = 0 trainable + 0 not"
    assert "Flatten" in str(found)


def test_repr_is_one_line() -> None:
    assert repr(summarize(nn.Linear(1, 1))) == (
        "<Summary of Linear: 2 parameters and statistics = 2 trainable + 0 not>"
    )
