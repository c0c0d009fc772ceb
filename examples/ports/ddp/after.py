"""A regression under torchrun, with DistributedDataParallel."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spartito as sp

strategy = sp.strategy()
torch.manual_seed(0)
x = torch.randn(250, 20)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
loader = DataLoader(data, batch_size=50)

net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
net, optimizer = strategy.prepare(net, optimizer)
loader = strategy.distribute(loader)

for _ in range(4):
    net.train()
    for batch in loader:
        inputs, targets = batch
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        strategy.backward(loss, batch)
        optimizer.step()

net.eval()
with torch.no_grad():
    loss = nn.functional.mse_loss(net(x), data.tensors[1])
print("loss", loss.item())
