"""A model whose rows see each other is found, and no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartito.engine.modules.batchnorm import synchronize_batchnorm
from spartito.engine.modules.row_independence import check_rows
from spartito.errors import UserError

Body = Callable[[Any, Tensor], Any]
ROWS, WIDTH = 6, 4


class Model(nn.Module):
    """Some layers, and what is done with a batch."""

    def __init__(self, body: Body, **parts: nn.Module) -> None:
        super().__init__()
        self.body, self.parts, self.passes = body, nn.ModuleDict(parts), 0

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def check(model: nn.Module, rows: int = ROWS) -> None:
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    x[-1] = 9.0
    check_rows(model, (x,), {}, rows)


TOGETHER: dict[str, Body] = {
    "mean": lambda m, x: x - x.mean(0),
    "deviation": lambda m, x: x / (1 + x.std(0)),
    "softmax": lambda m, x: torch.softmax(x, 0),
    "largest": lambda m, x: x + 1e-3 * x.amax(),
    "attention": lambda m, x: torch.softmax(x @ x.T, 1) @ x,
    "flip": lambda m, x: x + 0.1 * x.flip(0),
    "in a dict": lambda m, x: {"a": 1, "logits": x.cumsum(0) + x.sum(0)},
    "norm": lambda m, x: F.batch_norm(x, None, None, training=True),
    "beside a draw": lambda m, x: F.dropout(x, 0.2) + x.mean(0),
}


@pytest.mark.parametrize("body", TOGETHER.values(), ids=TOGETHER)
def test_rows_that_see_each_other_are_refused(body: Body) -> None:
    with pytest.raises(UserError, match="the examples of a batch see each other in Model's"):
        check(Model(body))


def counting(m: Any, x: Tensor) -> Any:
    m.passes += 1
    return x * m.passes


APART: dict[str, Model] = {
    "norms": Model(
        lambda m, x: m.parts["d"](m.parts["c"](m.parts["b"](m.parts["a"](x)))),
        a=nn.BatchNorm1d(WIDTH),
        b=nn.BatchNorm1d(WIDTH, track_running_stats=False, momentum=None),
        c=nn.LayerNorm(WIDTH),
        d=nn.Dropout(0.4),
    ),
    "draws": Model(lambda m, x: x + torch.randn_like(x) + torch.rand(len(x), 1)),
    "power iteration": Model(
        lambda m, x: m.parts["a"](x),
        a=nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    ),
    "counts": Model(counting),
    "figures": Model(lambda m, x: {"loss": x.mean(), "means": x.mean(0), "pairs": x @ x.T}),
    "views": Model(lambda m, x: torch.cat([x, 2 * x])),
    "too few rows": Model(lambda m, x: x - x[3]),
    "no rows": Model(lambda m, x: [[]]),
}


@pytest.mark.parametrize("model", APART.values(), ids=APART)
def test_other_models_are_let_be(model: Model) -> None:
    model.double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    passes, x = model.passes, torch.randn(ROWS, WIDTH, dtype=torch.float64)
    drawn = torch.get_rng_state()
    check_rows(model, (x,), {}, ROWS)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.passes == passes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_norms_of_all_replicas_are_let_be_and_others_beside_them_are_not() -> None:
    model = Model(lambda m, x: m.parts["b"](m.parts["a"](x)), **norms())
    synchronize_batchnorm(model)
    check(model)
    model.body = lambda m, x: m.parts["a"](x) + F.batch_norm(x, None, None, training=True)
    with pytest.raises(UserError, match="the examples of a batch see each other in Model's"):
        check(model)


def norms() -> dict[str, nn.Module]:
    return {"a": nn.BatchNorm1d(WIDTH).double(), "b": OwnNorm(WIDTH).double()}


class OwnNorm(nn.BatchNorm1d):
    """With a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        found = F.batch_norm(input, None, None, self.weight, self.bias, training=True)
        return torch.relu(found)


def test_a_model_that_is_not_the_same_twice_is_let_be() -> None:
    calls: list[int] = []

    def body(m: Any, x: Tensor) -> Tensor:
        calls.append(1)  # nobody knows to put it back
        return x * len(calls)

    check(Model(body))
    assert len(calls) == 3


def test_inputs_without_rows_are_let_be() -> None:
    check_rows(Model(TOGETHER["mean"]), (torch.zeros(5, WIDTH),), {}, ROWS)


def test_who_has_no_rows_makes_as_many_passes_as_the_others() -> None:
    seen: list[Tensor] = []

    def body(m: Any, x: Tensor) -> Tensor:
        seen.append(x)
        return x - x.mean(0)

    model = Model(body)
    check_rows(model, (torch.zeros(0, WIDTH, dtype=torch.float64),), {}, 0)
    assert [len(x) for x in seen] == [2, 3, 2]
    assert {x.dtype for x in seen} == {torch.float64}


def test_hooks_of_the_users_see_nothing_of_it() -> None:
    model = Model(TOGETHER["mean"], a=nn.Linear(WIDTH, WIDTH).double())
    seen: list[str] = []
    for name in ("first", "second"):
        model.register_forward_hook(lambda *_, name=name: seen.append(name))
    with pytest.raises(UserError):
        check(model)
    assert seen == []
    model(torch.zeros(2, WIDTH))
    assert seen == ["first", "second"]


def test_coarse_numbers_are_compared_coarsely() -> None:
    layers = [nn.Linear(256, 256) for _ in range(8)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    check_rows(model, (torch.randn(ROWS, 256, dtype=torch.bfloat16),), {}, ROWS)
    wide = nn.Sequential(*layers).float()
    with torch.autocast("cpu", torch.bfloat16):
        check_rows(wide, (torch.randn(ROWS, 256),), {}, ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_so_are_those_of_a_model_that_casts_inside(dtype: torch.dtype) -> None:
    x = torch.randn(63, 256, dtype=torch.float64)
    count = Model(lambda m, x: (x.to(dtype) * len(x) / len(x)).abs().double())
    check_rows(count, (x,), {}, len(x))
    mean = Model(lambda m, x: (x.to(dtype) - x.to(dtype).mean(0)).abs().double())
    with pytest.raises(UserError, match="the examples of a batch see each other in Model's"):
        check_rows(mean, (x,), {}, len(x))
