"""Digits in Keras under tf.distribute: several replicas on one machine."""

import tensorflow as tf
from tensorflow.keras import Sequential, callbacks, layers

strategy = tf.distribute.MirroredStrategy()
train = tf.data.Dataset.load("mnist/train").shuffle(60000).batch(64)
test = tf.data.Dataset.load("mnist/test").batch(500)


def decay(epoch, rate):
    return 1e-3 if epoch < 2 else 1e-4


with strategy.scope():
    net = Sequential([layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(10, "softmax")])
    net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

history = net.fit(
    train,
    epochs=3,
    validation_data=test,
    callbacks=[callbacks.LearningRateScheduler(decay), callbacks.ModelCheckpoint("saved")],
)
print("loss", history.history["val_loss"][-1])
