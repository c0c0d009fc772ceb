"""Photos of cats and dogs, 20 virtual epochs of 20 steps; the same script under every strategy.

python train.py PetImages                   one device
spartito run --workers 2 train.py PetImages two replicas on this machine
"""

import sys

import torch
from torch import nn

import spartito as sp

BATCH = 16  # global: 8 photos for each of two workers

folder = sys.argv[1] if len(sys.argv) > 1 else "PetImages"
train = (
    sp.data.image_folder(folder, validation_split=0.2, subset="training")
    .shuffle()
    .map(sp.data.RandomFlip("horizontal"))
    .map(sp.data.RandomRotation(0.1))
    .batch(BATCH)
)
validation = sp.data.image_folder(folder, validation_split=0.2, subset="validation").batch(32)

strategy = sp.strategy()
with strategy.scope():
    torch.manual_seed(1337)
    net = sp.models.CatsVsDogs()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

trainer = sp.Trainer(
    net,
    optimizer=optimizer,
    loss=nn.BCEWithLogitsLoss(),
    metrics=["accuracy"],
    strategy=strategy,
)
trainer.fit(
    train,
    epochs=20,
    steps_per_epoch=20,
    validation_data=validation,
    validation_steps=10,  # 320 photos: a look after every 20 steps shall be short
    callbacks=[sp.callbacks.ModelCheckpoint(monitor="val_accuracy", keep=1)],
)
strategy.close()
