from __future__ import annotations

import copy

import pytest
import torch

from spartito.errors import UserError
from spartito.models import MnistMLP
from spartito.training.summary import summarize


def test_has_exactly_the_parameters_of_784_256_256_10() -> None:
    found = summarize(MnistMLP())
    assert (found.trainable, found.fixed) == (269_322, 0)


@pytest.mark.parametrize("shape", [(3, 784), (3, 28, 28), (3, 1, 28, 28), (0, 784), (0, 28, 28)])
def test_takes_every_shape_of_a_picture(shape: tuple[int, ...]) -> None:
    logits = MnistMLP()(torch.rand(shape))
    assert logits.shape == (shape[0], 10)


def test_all_shapes_mean_the_same_picture() -> None:
    model, flat = MnistMLP(), torch.rand(3, 784)
    assert torch.equal(model(flat), model(flat.view(3, 1, 28, 28)))


def test_bytes_are_pixels_from_0_to_255() -> None:
    model = MnistMLP().double()
    pixels = torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8)
    torch.testing.assert_close(model(pixels), model(pixels.double() / 255), rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(784,), (28, 28), (3, 783), (3, 28, 27)])
def test_other_shapes_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="784 pixels"):
        MnistMLP()(torch.rand(shape))


def test_equals_the_formula_with_its_gradients() -> None:
    model = MnistMLP().double()
    x, weight = torch.rand(5, 784, dtype=torch.float64), torch.rand(5, 10, dtype=torch.float64)
    parameters = list(model.parameters())
    first, a, second, b, third, c = copied = [p.detach().clone() for p in parameters]
    for tensor in copied:
        tensor.requires_grad_()
    hidden = (x @ first.T + a).clamp(min=0)
    expected = (hidden @ second.T + b).clamp(min=0) @ third.T + c
    found = model(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for mine, true in zip(
        torch.autograd.grad((found * weight).sum(), parameters),
        torch.autograd.grad((expected * weight).sum(), copied),
        strict=True,
    ):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-12)


def test_a_copy_is_independent() -> None:
    model = MnistMLP()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert next(model.parameters()).abs().sum() > 0
