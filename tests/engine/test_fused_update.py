"""Updates by the kernel alone are bitwise those of `Optimizer.step`, or are left to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spartito.engine.updates import fused_update
from spartito.engine.updates.optimizers import fuse, optimizer_parameters

Make = Callable[..., Optimizer]


class Own(Adam):
    """A user's own kind of Adam, which may do anything."""


KERNELS: list[tuple[Make, dict[str, Any]]] = [
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "betas": (0.5, 0.8), "eps": 1e-3}),
    (Adam, {"maximize": True, "decoupled_weight_decay": True}),
    (AdamW, {"lr": 1}),
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    (Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.3, "weight_decay": 0.1}),
]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Of several shapes and layouts, one without a dimension."""
    torch.manual_seed(0)
    image = torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    values = [torch.randn(33, 17), torch.randn(19), torch.randn(()), image, torch.randn(0, 3)]
    return [nn.Parameter(value.to(dtype)) for value in values]


def fill(optimizer: Optimizer, step: int, absent: int | None = None) -> None:
    """New gradients, the same for twins; none for the parameter ``absent`` and for frozen ones."""
    torch.manual_seed(100 + step)
    for number, parameter in enumerate(optimizer_parameters(optimizer)):
        grad = torch.randn_like(parameter)
        idle = number == absent or not parameter.requires_grad
        parameter.grad = None if idle else grad


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> Iterator[list[int]]:
    """How often torch's own step looked at a group, of optimizers of this kind."""
    calls: list[int] = []
    own = kind._init_group

    def init(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return own(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_init_group", init)
        yield calls


def everything(optimizer: Optimizer) -> list[Tensor]:
    """All numbers that an update changes."""
    members = optimizer_parameters(optimizer)
    state = [optimizer.state[p] for p in members]
    return [*members, *(v for s in state for _, v in sorted(s.items()) if torch.is_tensor(v))]


def twins(
    optimizer: Optimizer, steps: range, change: Any = None, absent: Any = None, prepare: Any = id
) -> int:
    """Steps of both, which must be bitwise equal; how many numbers were compared."""
    compared, step_by_kernel = 0, fused_update.Stepper().step
    other = copy.deepcopy(optimizer)  # without its hooks
    for each in (optimizer, other):
        prepare(each)
    for step in steps:
        for each, make in ((optimizer, step_by_kernel), (other, lambda one: one.step())):
            if change is not None:
                change(each, step)
            fill(each, step, None if absent is None else absent(step))
            make(each)
        for ours, torchs in zip(everything(optimizer), everything(other), strict=True):
            assert torch.equal(ours, torchs), step
            compared += ours.numel()
    return compared


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (kernel, dtype)
        for kernel in KERNELS
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        if dtype != torch.bfloat16 or "momentum" not in kernel[1]  # torch's own differs each time
    ],
)
def test_the_kernel_alone_makes_the_numbers_of_a_step(
    monkeypatch: pytest.MonkeyPatch, kernel: tuple[Make, dict[str, Any]], dtype: torch.dtype
) -> None:
    kind, options = kernel
    members = parameters(dtype)
    optimizer = kind(
        [{"params": members[:2], "lr": 0.03}, {"params": members[2:], "weight_decay": 0.2}],
        fused=True, **options,
    )  # fmt: skip
    fill(optimizer, 0)
    optimizer.step()

    def change(one: Optimizer, step: int) -> None:
        if step == 3:
            one.param_groups[0]["lr"] = 0.4
        if step == 5:
            optimizer_parameters(one)[0].requires_grad_(False)

    with counting(monkeypatch, Adam if kind is AdamW else kind) as calls:  # type: ignore[arg-type]
        assert twins(optimizer, range(1, 8), change, lambda step: 3 if step == 4 else None) > 5000
    assert len(calls) == 2 * 7, "the twin's own"


def test_a_group_that_is_added_begins_as_under_torch() -> None:
    optimizer = Adam(parameters(), fused=True)

    def change(one: Optimizer, step: int) -> None:
        if step == 2:
            one.add_param_group({"params": parameters()})

    twins(optimizer, range(6), change)
    assert len(optimizer.state) == 10


def _with_post_hook(optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda one, *_: one.param_groups[0].update(lr=0.7))


def _with_pre_hook(optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=0.7))


def _with_own_step(optimizer: Optimizer) -> None:
    optimizer.step = lambda: optimizer.param_groups[0].update(lr=0.5)  # type: ignore[method-assign, assignment]


def _with_scaler(optimizer: Optimizer) -> None:
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]


LEFT: dict[str, tuple[Make, dict[str, Any], Callable[[Optimizer], object]]] = {
    "subclass": (Own, {"fused": True}, id),
    "other": (RMSprop, {}, id),
    "not fused": (Adam, {"fused": False}, id),
    "amsgrad": (Adam, {"fused": True, "amsgrad": True}, id),
    "tensor": (Adam, {"fused": True, "lr": torch.tensor(0.1)}, id),
    "scaler": (Adam, {"fused": True}, _with_scaler),
    "pre hook": (Adam, {"fused": True}, _with_pre_hook),
    "post hook": (Adam, {"fused": True}, _with_post_hook),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_asks_for_more_is_left_to_torch(case: str) -> None:
    make, options, prepare = LEFT[case]
    optimizer = make(parameters(), **options)
    fill(optimizer, 0)
    optimizer.step()
    twins(optimizer, range(1, 4), prepare=prepare)
    assert fused_update.kernel_of(optimizer) is None


def test_a_step_of_ones_own_is_called() -> None:
    optimizer = Adam(parameters(), fused=True)
    _with_own_step(optimizer)
    fill(optimizer, 0)
    fused_update.Stepper().step(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


def test_hooks_of_all_optimizers_and_a_profiler_see_the_step() -> None:
    optimizer = Adam(parameters(), fused=True)
    fill(optimizer, 0)
    optimizer.step()
    seen: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        fused_update.Stepper().step(optimizer)
    finally:
        handle.remove()
    assert seen == [1]
    with torch.profiler.profile() as profile:
        fused_update.Stepper().step(optimizer)
    assert "Optimizer.step#Adam.step" in {event.key for event in profile.key_averages()}


def test_a_parameter_that_another_dtype_came_to_is_refused_by_torch() -> None:
    optimizer = Adam(parameters(torch.float32), fused=True)
    fill(optimizer, 0)
    optimizer.step()
    for parameter in optimizer_parameters(optimizer):
        parameter.grad = None
        parameter.data = parameter.data.double()
    fill(optimizer, 1)
    with pytest.raises(RuntimeError, match="expected scalar type Double but found Float"):
        fused_update.Stepper().step(optimizer)


def test_schedules_see_that_the_optimizer_stepped() -> None:
    optimizer = SGD(parameters(), 0.1, momentum=0.9)
    fuse(optimizer, nn.Module())
    fill(optimizer, 0)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert fused_update.kernel_of(optimizer) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(optimizer, 1)
        fused_update.Stepper().step(optimizer)
        schedule.step()


def test_what_a_user_replaces_between_steps_is_followed() -> None:
    def change(optimizer: Optimizer, step: int) -> None:
        first, second, *_ = optimizer_parameters(optimizer)
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step == 3:
            optimizer.state[first]["step"].data = torch.tensor(40.0)
        elif step == 4:
            optimizer.state[second]["step"] = torch.tensor(7.0, dtype=torch.float64)
        elif step == 5:
            optimizer.state[second]["exp_avg"] = torch.ones_like(second)
        elif step == 6:
            first.data = first.detach() * 2
        elif step == 7:
            optimizer.param_groups[0]["params"].reverse()
        elif step == 8:
            optimizer.state[first]["step"].add_(3)

    assert twins(Adam(parameters(), fused=True), range(10), change=change)
