"""Transfer learning: a frozen backbone, and a new head for two classes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spartito as sp

strategy = sp.strategy()


def pretrained():
    """Stands in for a backbone that is downloaded, as timm.create_model(..., num_classes=0)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )


torch.manual_seed(0)
images = torch.randn(96, 3, 16, 16)
labels = (images.mean((1, 2, 3)) > 0).long()
data = {
    "train": TensorDataset(images[:64], labels[:64]),
    "val": TensorDataset(images[64:], labels[64:]),
}
loaders = {phase: DataLoader(part, batch_size=16) for phase, part in data.items()}

backbone = pretrained()
for parameter in backbone.parameters():
    parameter.requires_grad = False
head = nn.Linear(64, 2)
model = nn.Sequential(backbone, head)

criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model, optimizer = strategy.prepare(model, optimizer)
loaders = {
    phase: strategy.distribute(each, training=phase == "train") for phase, each in loaders.items()
}

for epoch in range(4):
    for phase, loader in loaders.items():
        head.train(phase == "train")
        backbone.eval()
        total, right = 0.0, 0
        for batch in loader:
            inputs, targets = batch
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs)
                loss = criterion(outputs, targets)
            if phase == "train":
                optimizer.zero_grad()
                strategy.backward(loss, batch)
                optimizer.step()
            total += loss.item() * len(inputs)
            right += (outputs.argmax(1) == targets).sum().item()
        total, right = strategy.reduce("sum", torch.tensor([total, right]))
        size = len(data[phase])
        print(f"{epoch} {phase}: accuracy {right / size:.1%}, loss {total / size}")
    scheduler.step()
