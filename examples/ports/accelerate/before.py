"""A loop of Accelerate: warm-up, clipped gradients, an evaluation over all processes."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(320, 20)
y = x[:, :3].argmax(1)
train = DataLoader(TensorDataset(x[:256], y[:256]), batch_size=32)
test = DataLoader(TensorDataset(x[256:], y[256:]), batch_size=64)

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for epoch in range(3):
    model.train()
    for batch in train:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    losses = []
    for inputs, targets in test:
        with torch.no_grad():
            found = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        losses.append(accelerator.gather_for_metrics(found))
    accelerator.print(f"{epoch}: loss {torch.cat(losses).mean().item()}")
