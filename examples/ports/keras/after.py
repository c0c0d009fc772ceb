"""Digits in Keras under tf.distribute: several replicas on one machine."""

from torch import nn, optim

import spartito as sp
from spartito import callbacks

strategy = sp.strategy()
train = sp.data.digits("training").shuffle().batch(64)
test = sp.data.digits("validation").batch(500)


def decay(epoch, rate):
    return 1e-3 if epoch < 2 else 1e-4


with strategy.scope():
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    net = sp.Trainer(net, optimizer=optim.Adam, loss=nn.CrossEntropyLoss(), metrics="accuracy")

history = net.fit(
    train,
    epochs=3,
    validation_data=test,
    callbacks=[callbacks.LearningRateScheduler(decay), callbacks.ModelCheckpoint("saved")],
)
print("loss", history.history["val_loss"][-1])
