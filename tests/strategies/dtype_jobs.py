"""Trainings of models with tensors of unusual dtypes, saved and loaded, by a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import warns
from tests.strategies import jobs

EXAMPLES, BATCH, EPOCHS = 22, 8, 2


class Filter(nn.Module):
    """A learned filter of frequencies, as of FNO and S4, beside buffers of all kinds."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(5, dtype=dtype))
        self.head = nn.Linear(8, 3)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7, dtype=torch.int16))
        self.register_buffer("scale", torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn))
        self.register_buffer("code", torch.tensor([1, 2, 250], dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.fft.rfft(self.lift(x)) * self.weight
        out: Tensor = self.head(torch.tanh(torch.fft.irfft(seen, n=8)))
        return out


def data() -> tuple[Tensor, Tensor]:
    x, y = jobs.blobs(EXAMPLES, torch.float32)
    return x, y


def build(dtype: torch.dtype = torch.complex64) -> nn.Module:
    torch.manual_seed(3)
    return Filter(dtype)


def by_torch() -> dict[str, Tensor]:
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    x, y = data()
    for _ in range(EPOCHS):
        for rows, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(rows), targets).backward()
            optimizer.step()
    return {name: seen(value) for name, value in net.state_dict().items()}


def seen(tensor: Tensor) -> Tensor:
    """A tensor that may go from process to process: 8-bit floats as their bytes."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def trainer(strategy: Any, net: nn.Module) -> sp.Trainer:
    made = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.02)
    return sp.Trainer(net, optimizer=made, loss=nn.CrossEntropyLoss(), strategy=strategy)


@warns("fft_rfft has no rule for")
def by_strategy(name: str, options: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Train one epoch, save, load into another model, and train the other one."""
    strategy = jobs.make_strategy(name, **options)
    first = trainer(strategy, build())
    chain = sp.data.arrays(*data()).batch(BATCH)
    first.fit(chain, epochs=1, verbose=0)
    first.save(Path(folder) / "saved")
    net = build()
    second = trainer(strategy, net)
    second.load(Path(folder) / "saved")
    second.fit(chain, epochs=EPOCHS, verbose=0)
    with strategy.using(second.optimizer):
        state = strategy.state_dict()["model"]
    found = {name: seen(value).clone() for name, value in state.items()}
    strategy.close()
    return found


def wide(name: str, options: dict[str, Any]) -> None:
    strategy = jobs.make_strategy(name, **options)
    trainer(strategy, build(torch.complex128)).fit(
        sp.data.arrays(*data()).batch(BATCH), epochs=1, verbose=0
    )
