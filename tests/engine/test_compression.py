"""Sums of gradients in codes: what a code leaves out comes with the next sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spartito.collectives.collective import IdentityCollective
from spartito.engine.gradients.compression import choose, make_compression


@pytest.mark.parametrize("way", ["8bit", "4bit"])
@pytest.mark.parametrize("sizes", [(5,), (300, 7)])
def test_what_a_code_leaves_out_comes_later(way: str, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    flat = torch.empty(sum(sizes))
    compression = make_compression(choose(way))
    work = compression.summing(parameters, IdentityCollective(), flat)
    gradient = torch.randn(sum(sizes), generator=generator)
    sent = torch.zeros_like(flat)
    for _ in range(64):
        flat.copy_(gradient)
        work()
        sent += flat
    assert not torch.equal(flat, gradient)
    assert (sent / 64 - gradient).abs().max() < 0.01
