"""A backward pass adds what torch's own adds, whatever the loss is made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import spartito as sp


class WithOffset(nn.Module):
    """A linear layer, and a parameter without dimensions that is a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1).double()
        self.offset = nn.Parameter(torch.zeros(()).double())

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - y).square().mean() + self.offset.sum()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


def test_accumulated_gradients_of_a_parameter_that_is_a_term_of_the_loss() -> None:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)).double()
    y = x.sum(1, keepdim=True)
    expected, net = WithOffset(), WithOffset()
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    for _ in range(3):
        for rows, target in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            expected.loss(expected(rows), target).backward()
            optimizer.step()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=net.loss,
        strategy=sp.strategy("one_device"),
        accumulate=2,
    )
    trainer.fit(sp.data.arrays(x, y).batch(4), epochs=3, verbose=0)
    for ours, torchs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-12)
