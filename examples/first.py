"""The first script: your module, your arrays, any strategy.

python examples/first.py                                       one device
spartito run --strategy mirrored --workers 2 examples/first.py
"""

import torch
from torch import nn

import spartito as sp

strategy = sp.strategy()
with strategy.scope():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

# Two rings, one inside of the other.
angle = torch.linspace(0, 50, 4000)
label = torch.arange(4000) % 2
radius = 1 + label + 0.1 * torch.randn(4000, generator=torch.Generator().manual_seed(1))
points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

train = sp.data.arrays(points[:3200], label[:3200]).shuffle().batch(64)
validation = sp.data.arrays(points[3200:], label[3200:]).batch(64)

trainer = sp.Trainer(
    net,
    optimizer=optimizer,
    loss=nn.CrossEntropyLoss(),
    metrics=["accuracy"],
    strategy=strategy,
)
history = trainer.fit(train, epochs=3, validation_data=validation)
if strategy.is_chief:
    print(f"validation accuracy {history.history['val_accuracy'][-1]:.1%}")
strategy.close()
