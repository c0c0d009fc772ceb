from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spartito.models.layers import PointwiseConv2d, dilation_pays


def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input, the weight and the bias."""
    x = x.clone().requires_grad_()
    output: Tensor = layer(x)
    output.square().sum().backward()
    return [output.detach(), *(t.grad for t in (x, *layer.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("dilated", [True, False, None])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=str
)
@pytest.mark.parametrize("count", [0, 1, 3, 17])
def test_equals_a_plain_convolution(
    dilated: bool | None, dtype: torch.dtype, tolerance: float, count: int
) -> None:
    layer = PointwiseConv2d(5, 7, dilated=dilated).to(dtype)
    plain = nn.Conv2d(5, 7, 1).to(dtype)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(count, 5, 6, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    found, expected = run(layer, x), run(plain, x)
    assert len(found) == len(expected) == 4
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=tolerance, atol=tolerance * 10)


def test_decides_by_the_processor_unless_told() -> None:
    assert PointwiseConv2d(2, 2).dilated is dilation_pays()
    assert PointwiseConv2d(2, 2, dilated=True).dilated
    assert not PointwiseConv2d(2, 2, dilated=False).dilated


def test_passes_channels_last_on() -> None:
    x = torch.rand(2, 5, 6, 4).contiguous(memory_format=torch.channels_last)
    for dilated in (True, False):
        output = PointwiseConv2d(5, 7, dilated=dilated)(x)
        assert output.is_contiguous(memory_format=torch.channels_last)
