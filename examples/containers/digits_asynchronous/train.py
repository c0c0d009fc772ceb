"""Handwritten digits, 20 virtual epochs of 20 steps; the same script under every strategy.

python train.py                             one device
spartito run --workers 2 train.py           two replicas on this machine
"""

import torch
from torch import nn

import spartito as sp

BATCH = 16  # global: 8 examples for each of two workers

strategy = sp.strategy()
with strategy.scope():
    torch.manual_seed(1337)
    net = sp.models.MnistMLP()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

trainer = sp.Trainer(
    net,
    optimizer=optimizer,
    loss=nn.CrossEntropyLoss(),
    metrics=["accuracy"],
    strategy=strategy,
)
trainer.fit(
    sp.data.digits("training").shuffle().batch(BATCH),
    epochs=20,
    steps_per_epoch=20,
    validation_data=sp.data.digits("validation").batch(500),
    callbacks=[sp.callbacks.ModelCheckpoint(monitor="val_accuracy", keep=1)],
)
strategy.close()
