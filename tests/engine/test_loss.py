"""Losses in every form that users write, and the errors of those that fit nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartito.data.batch import Batch
from spartito.engine.losses.loss import (
    align,
    describe,
    evaluate_loss,
    forward,
    in_dtype,
    make_loss,
    own_loss,
    weigh,
)
from spartito.errors import UserError


def batch(*data: Any, size: int = 4) -> Batch:
    whole: Any = data if len(data) > 1 else data[0]
    return Batch(whole, size, size, torch.arange(size), 0, 0)


FOUR = torch.arange(4.0)


@pytest.mark.parametrize(
    ("result", "total", "weight"),
    [
        (torch.tensor(2.0), 8.0, 4.0),  # a mean over 4 examples
        (FOUR, 6.0, 4.0),
        (torch.stack([FOUR, FOUR + 2], 1), 10.0, 4.0),  # means over what each example has
        ((torch.tensor(9.0), 3), 9.0, 3.0),
        ((torch.tensor(9.0), torch.tensor(2.5)), 9.0, 2.5),
    ],
)
def test_every_form_weighs_alike(result: Any, total: float, weight: float) -> None:
    found = weigh(result, batch(FOUR))
    assert found.value.item() * found.scale == total
    assert found.weight == weight


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.zeros(3), r"a loss of shape \(3,\) for 4 examples"),
        (0.5, "a loss of float"),
        ((FOUR, 4), r"a loss of \(\(4,\) float32, int\)"),
        ((1.0, 4), r"a loss of \(float, int\)"),
        ({"loss": FOUR}, "a loss of dict"),
        ((torch.tensor(1.0), torch.tensor(2.0, requires_grad=True)), "weight has a gradient"),
    ],
)
def test_other_results_are_refused(result: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        weigh(result, batch(FOUR))


@pytest.mark.parametrize(
    ("output", "target", "shape", "dtype"),
    [
        ((4, 1), torch.ones(4, dtype=torch.int64), (4, 1), torch.float32),
        ((4,), torch.ones(4, 1), (4,), torch.float32),
        ((4, 3), torch.ones(4, 3, dtype=torch.bool), (4, 3), torch.float32),
        ((4, 3), torch.ones(4, dtype=torch.int64), (4,), torch.int64),  # classes
        ((4, 3), torch.ones(3, 4), (3, 4), torch.float32),  # the same number, not the same thing
        ((4,), torch.ones(4).double(), (4,), torch.float64),
    ],
)
def test_targets_align(
    output: tuple[int, ...], target: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    got = align(torch.zeros(output), target)
    assert (tuple(got.shape), got.dtype) == (shape, dtype)


def test_what_is_no_tensor_does_not_align() -> None:
    assert align({"a": 1}, [2]) == [2]
    classes = torch.tensor([1, 2])
    assert align(torch.tensor([1, 2]), classes) is classes


@pytest.mark.parametrize(
    ("loss", "output", "target"),
    [
        (nn.MSELoss(), torch.zeros(4, 2), torch.zeros(4, 3)),
        (nn.MSELoss(), torch.zeros(4, 4), torch.zeros(4)),  # torch would only warn, and broadcast
        (nn.BCEWithLogitsLoss(), torch.zeros(4, 2), torch.zeros(4)),
        (nn.CrossEntropyLoss(), torch.zeros(4, 3), torch.zeros(3, dtype=torch.int64)),
        (nn.CrossEntropyLoss(), torch.zeros(4, 3), torch.full((4,), 3)),
        (nn.L1Loss(), {"a": torch.zeros(4)}, torch.zeros(4)),
        (nn.L1Loss(), torch.zeros(4), None),
    ],
)
def test_a_misfit_names_both(loss: nn.Module, output: Any, target: Any) -> None:
    with pytest.raises(UserError, match=f"{type(loss).__name__} does not fit an output of") as info:
        evaluate_loss(loss, output, batch(FOUR, target) if target is not None else batch({}))
    assert describe(output) in str(info.value)
    assert target is None or describe(target) in str(info.value)


def test_a_loss_of_low_precision_is_computed_in_fp32() -> None:
    target = torch.tensor([1.0, 0.0, 1.0, 0.0])
    output = torch.randn(4, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = evaluate_loss(nn.BCEWithLogitsLoss(), output, batch(FOUR, target)).value
    assert got.dtype == torch.float32
    assert got == nn.BCEWithLogitsLoss()(output.float(), target)


def test_only_classes_that_count_weigh() -> None:
    output = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 3, (4, 5), generator=torch.Generator().manual_seed(1))
    target[:, 2:] = -100
    total, weight = evaluate_loss(nn.CrossEntropyLoss(), output, batch(FOUR, target))
    assert weight == 8
    expected = nn.functional.cross_entropy(output, target, reduction="sum")
    torch.testing.assert_close(total, expected)
    everything = torch.full((4,), -1)
    total, weight = evaluate_loss(
        nn.CrossEntropyLoss(ignore_index=-1),
        output[..., 0].requires_grad_(),
        batch(FOUR, everything),
    )
    assert (total.item(), weight) == (0.0, 0.0)
    total.backward()  # a batch in which nothing counts has gradients, of 0
    labels = torch.tensor([156, 3, 200, 3], dtype=torch.uint8)
    for weights in (torch.arange(201.0), None):
        loss = nn.CrossEntropyLoss(weight=weights)
        scores = torch.randn(4, 201, generator=torch.Generator().manual_seed(2))
        got = weigh(evaluate_loss(loss, scores, batch(FOUR, labels)), batch(FOUR, labels))
        torch.testing.assert_close(got.value * got.scale / got.weight, loss(scores, labels))
    probabilities = torch.full((4, 3), 1 / 3)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    got = evaluate_loss(weighted, output[..., 0].detach(), batch(FOUR, probabilities)).value
    assert got == weighted(output[..., 0], probabilities)


def test_sums_are_refused() -> None:
    with pytest.raises(UserError, match=r"BCELoss\(reduction='sum'\)"):
        make_loss(nn.BCELoss(reduction="sum"))
    for good in (None, nn.BCELoss(), nn.BCELoss(reduction="none"), lambda out, y: out):
        make_loss(good)


class Output:
    loss = FOUR


def test_models_with_their_own_loss() -> None:
    assert own_loss(FOUR) is FOUR
    assert own_loss({"loss": FOUR, "output": 1}) is FOUR
    assert own_loss(Output()) is FOUR
    assert evaluate_loss(None, {"loss": FOUR}, batch(FOUR)) is FOUR
    with pytest.raises(UserError, match="no loss function, and the model returned dict"):
        own_loss({"output": FOUR})


class Echo(nn.Module):
    def forward(self, *args: Any, **named: Any) -> Any:
        return args, named


def test_what_the_model_gets() -> None:
    net = Echo()
    assert forward(net, (1, 2)) == ((1,), {})
    assert forward(net, (1, 2), has_loss=False) == ((1, 2), {})
    assert forward(net, {"a": 1, "y": 2}) == ((), {"a": 1})
    assert forward(net, {"a": 1, "y": 2}, has_loss=False) == ((), {"a": 1, "y": 2})
    assert forward(net, 5) == ((5,), {})


def test_floating_data_comes_in_the_models_dtype() -> None:
    x, y = FOUR.double(), torch.arange(4)
    got = in_dtype(batch(x, y), torch.float32)
    assert [part.dtype for part in got.data] == [torch.float32, torch.int64]
    assert got.size == 4
    same = batch(FOUR, y)
    assert in_dtype(same, torch.float32) is same
    assert in_dtype(batch({"a": x, "b": y}), torch.float32).data["a"].dtype == torch.float32
    assert in_dtype(batch(x), torch.float32).data.dtype == torch.float32
    without_parameters = batch(x, y)
    assert in_dtype(without_parameters, None) is without_parameters


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.NLLLoss()])
@pytest.mark.parametrize("shape", [(4, 1), (4,), (4, 1, 2)])
def test_one_class_is_no_classification(loss: Any, shape: tuple[int, ...]) -> None:
    output = torch.zeros(shape, requires_grad=True)
    target = torch.ones(4, *shape[2:], dtype=torch.int64)
    with pytest.raises(UserError, match="it has one class"):
        evaluate_loss(loss, output, batch(output, target))


def test_torchs_functions_are_its_modules() -> None:
    assert isinstance(make_loss(nn.functional.cross_entropy), nn.CrossEntropyLoss)
    assert isinstance(make_loss(nn.functional.mse_loss), nn.MSELoss)
    with pytest.raises(UserError, match="loss=CrossEntropyLoss is a class"):
        make_loss(nn.CrossEntropyLoss)


@pytest.mark.parametrize("form", ["mapping", "attributes"])
def test_a_models_own_mean_over_items(form: str) -> None:
    logits = torch.ones(4, requires_grad=True)

    def output(loss: Tensor, items: Any) -> Any:
        parts = {"loss": loss, "logits": logits, "num_items": items}
        return parts if form == "mapping" else SimpleNamespace(**parts)

    for items in (10, torch.tensor(10)):
        found = weigh(own_loss(output(logits.sum() / 10, items)), batch(FOUR))
        assert found.value.item() * found.scale == pytest.approx(4.0)
        assert found.weight == 10
    nothing = weigh(own_loss(output(logits.sum() / 0 * 0, 0)), batch(FOUR))
    nothing.value.backward()
    assert (nothing.value.item(), nothing.weight) == (0.0, 0.0)
    assert logits.grad is not None
    assert logits.grad.tolist() == [0.0] * 4
    with pytest.raises(UserError, match="beside num_items"):
        own_loss(output(FOUR, 10))


def test_images_that_nobody_rescaled() -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    for model in (nn.Conv2d(3, 4, 3), nn.Sequential(nn.Flatten(), nn.Linear(192, 2))):
        for dtype in (torch.uint8, torch.int64):
            with pytest.raises(
                UserError, match=r"does not take an input of \(2, 3, 8, 8\)"
            ) as info:
                forward(model, (images.to(dtype), torch.zeros(2)))
            assert "(2, 3, 8, 8)" in str(info.value)
            assert "x / 255" in str(info.value)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        forward(nn.Linear(3, 2), (torch.zeros(2, 4), images))


def test_nested_data_meets_the_models_dtype() -> None:
    parts = ((torch.zeros(4).double(), {"deep": torch.zeros(4).double()}), torch.zeros(4).long())
    (left, named), y = in_dtype(batch(*parts), torch.float32).data
    assert (left.dtype, named["deep"].dtype, y.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )
