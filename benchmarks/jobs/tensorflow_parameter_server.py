"""TensorFlow's side of a race of parameter servers: `Model.fit`, or a ClusterCoordinator.

Runs in an interpreter that has tensorflow-cpu and tf_keras, and imports nothing of ours. Who it
is says TF_CONFIG. Workers and servers serve without end: whoever started them stops them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_USE_LEGACY_KERAS": "1",  # Keras 3 has no parameter servers
    "GRPC_FAIL_FAST": "use_caller",  # tasks that start earlier wait for the others
}

import numpy as np
import tensorflow as tf

keras: Any = tf.keras
LOCAL_BATCH, WORKERS = 32, 2
WARM_UP = 100


def main() -> None:
    """Serve, or train and print the seconds of every window per batch of every worker."""
    options = argparse.ArgumentParser()
    options.add_argument("loop", choices=("fit", "schedule"))
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    given = options.parse_args()
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        serve(resolver)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    train = fit if given.loop == "fit" else schedule
    found = train(strategy, given.windows, given.steps * WORKERS)
    print(json.dumps([seconds / given.steps for seconds in found]), flush=True)
    os._exit(0)  # its threads would wait for tasks that never end


def serve(resolver: Any) -> None:
    """Be a worker or a server."""
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=2,  # with one the worker stands still
    )
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
    )
    server.join()
    sys.exit("a server ended")


def fit(strategy: Any, windows: int, batches: int) -> list[float]:
    """Seconds of each window under `Model.fit`."""
    with strategy.scope():
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss)
    clock = Clock()
    model.fit(
        keras.utils.experimental.DatasetCreator(data),
        epochs=windows + 1,
        steps_per_epoch=batches,
        verbose=0,
        callbacks=[clock],
    )
    return clock.windows[1:]


def schedule(strategy: Any, windows: int, batches: int) -> list[float]:
    """Seconds of each window of steps that a ClusterCoordinator gives out."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_on(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            each = loss(y, model(x, training=True))
            mean = tf.nn.compute_average_loss(each, global_batch_size=LOCAL_BATCH)
        gradients = tape.gradient(mean, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return mean

    @tf.function  # type: ignore[untyped-decorator]
    def per_worker() -> Any:
        return strategy.distribute_datasets_from_function(data)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: Any) -> Any:
        return strategy.run(train_on, args=next(batches))

    iterator = iter(coordinator.create_per_worker_dataset(per_worker))

    def run(count: int) -> None:
        for _ in range(count):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    run(WARM_UP)
    return [seconds_of(run, batches) for _ in range(windows)]


def seconds_of(run: Callable[[int], None], count: int) -> float:
    began = time.perf_counter()
    run(count)
    return time.perf_counter() - began


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[float] = []
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.windows.append(time.perf_counter() - self._began)


def data(context: object) -> Any:
    """Local batches that are ready in memory, again and again."""
    random = np.random.default_rng(0)
    x = random.random((500, LOCAL_BATCH, 784), dtype=np.float32)
    y = random.integers(0, 10, (500, LOCAL_BATCH))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().with_options(options)


def mlp() -> Any:
    """784-256-256-10."""
    layers = keras.layers
    first, second = layers.Dense(256, "relu"), layers.Dense(256, "relu")
    return keras.Sequential([keras.Input((784,)), first, second, layers.Dense(10)])


if __name__ == "__main__":
    main()
