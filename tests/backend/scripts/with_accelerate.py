"""A script of Accelerate's users; its argument is the backend."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    torch.distributed.init_process_group(sys.argv[1])  # on CPUs Accelerate itself takes gloo alone
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.randn(101, 8).double(), torch.randint(3, (101,)))
    body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    model, optimizer, loader = accelerator.prepare(
        body, torch.optim.Adam(body.parameters(), lr=0.01), DataLoader(data, 10, shuffle=True)
    )
    for _ in range(3):
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean())
        accelerator.print(f"loss {torch.stack(losses).mean().item():.17g}")
    accelerator.print(f"backend {torch.distributed.get_backend()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
