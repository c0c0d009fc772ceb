"""A regression under torchrun, with DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(250, 20)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
loader = DataLoader(data, batch_size=25, sampler=DistributedSampler(data, shuffle=False))

net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
net = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

for _ in range(4):
    net.train()
    for batch in loader:
        inputs, targets = batch
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

net.eval()
with torch.no_grad():
    loss = nn.functional.mse_loss(net(x), data.tensors[1])
print("loss", loss.item())
dist.destroy_process_group()
