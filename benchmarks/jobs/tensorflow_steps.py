"""TensorFlow's side of a race: MultiWorkerMirroredStrategy under Keras' `fit`.

Runs in an interpreter that has tensorflow-cpu and tf_keras, and imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = int(os.environ["MASTER_PORT"])
os.environ |= {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_USE_LEGACY_KERAS": "1",  # Keras 3 has no multi-worker training
    "TF_CONFIG": json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{PORT + rank}" for rank in range(WORLD_SIZE)]},
            "task": {"type": "worker", "index": RANK},
        }
    ),
}

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

keras: Any = tf.keras
layers: Any = tf.keras.layers


def main() -> None:
    """Train, and print the seconds per step of every window but the first."""
    options = argparse.ArgumentParser()
    options.add_argument("model", choices=("mlp", "xception"))
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--precision", default="fp32")
    given = options.parse_args()
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if given.precision == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    is_mlp = given.model == "mlp"
    with strategy.scope():
        model = mlp() if is_mlp else xception()
        loss = (
            keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            if is_mlp
            else keras.losses.BinaryCrossentropy(from_logits=True)
        )
        model.compile(keras.optimizers.Adam(1e-3), loss)
    clock = Clock(given.steps)
    model.fit(
        strategy.distribute_datasets_from_function(lambda _: batches(is_mlp)),
        epochs=given.windows + 1,
        steps_per_epoch=given.steps,
        verbose=0,
        callbacks=[clock],
    )
    if RANK == 0:
        print(json.dumps(clock.windows[1:]), flush=True)


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds per step of every epoch."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.windows: list[float] = []
        self._steps = steps
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.windows.append((time.perf_counter() - self._began) / self._steps)


def batches(is_mlp: bool) -> Any:
    """Local batches that are ready in memory, again and again."""
    random = np.random.default_rng(RANK)
    if is_mlp:
        x = random.random((500, 32, 784), dtype=np.float32)
        y = random.integers(0, 10, (500, 32))
    else:
        x = random.random((4, 8, 180, 180, 3), dtype=np.float32) * 255
        y = random.integers(0, 2, (4, 8, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat()


def mlp() -> Any:
    """784-256-256-10."""
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(256, "relu"),
            layers.Dense(256, "relu"),
            layers.Dense(10),
        ]
    )


def xception() -> Any:
    """The small Xception of Keras' example, with a logit at its end."""
    image = keras.Input((180, 180, 3))
    x = layers.Rescaling(1 / 255)(image)
    for width, stride in ((32, 2), (64, 1)):
        x = layers.Conv2D(width, 3, stride, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    for width in (128, 256, 512, 728):
        beside = layers.Conv2D(width, 1, 2, padding="same")(x)
        for _ in range(2):
            x = layers.SeparableConv2D(width, 3, padding="same")(layers.ReLU()(x))
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
        x = layers.add([x, beside])
    x = layers.SeparableConv2D(1024, 3, padding="same")(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dropout(0.5)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, layers.Dense(1, dtype="float32")(x))


if __name__ == "__main__":
    main()
