"""Spartito: train any PyTorch model under any distribution strategy.

import spartito as sp

strategy = sp.strategy()
trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, metrics=["accuracy"], strategy=strategy)
history = trainer.fit(train, epochs=20, validation_data=val)
"""

from typing import TYPE_CHECKING

from spartito._lazy import attach as _attach
from spartito.errors import (
    CorruptSampleError,
    PreemptedError,
    SpartitoError,
    TaskLostError,
    UserError,
    install_excepthook,
)
from spartito.late_compiler import put_off as _put_off_compiler
from spartito.notes import configure as _configure
from spartito.system import check_platform as _check_platform

if TYPE_CHECKING:
    from spartito import data, extend, models
    from spartito.cluster.spec import ClusterSpec, Task
    from spartito.data.batch import Batch
    from spartito.engine.gradients.compression import PowerSGD
    from spartito.engine.logged import log
    from spartito.engine.meta.value_recipes import meta
    from spartito.engine.randomness.seed import seed_everything
    from spartito.launch import Launch as _Launch
    from spartito.strategies import (
        CentralStorageStrategy,
        LocalSGDStrategy,
        MeshStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ParameterServerStrategy,
        PipelineStrategy,
        ShardedStrategy,
        Strategy,
        TPUStrategy,
        strategy,
    )
    from spartito.training import callbacks, metrics
    from spartito.training.callback import Callback
    from spartito.training.files.weights import load_model
    from spartito.training.history import History
    from spartito.training.summary import summary
    from spartito.training.trainer import Trainer

    launch: _Launch

__version__ = "0.1.0"

__getattr__ = _attach(
    __name__,
    {
        "Batch": "spartito.data.batch",
        "Callback": "spartito.training.callback",
        "CentralStorageStrategy": "spartito.strategies",
        "ClusterSpec": "spartito.cluster.spec",
        "History": "spartito.training.history",
        "LocalSGDStrategy": "spartito.strategies",
        "MeshStrategy": "spartito.strategies",
        "MirroredStrategy": "spartito.strategies",
        "MultiWorkerMirroredStrategy": "spartito.strategies",
        "OneDeviceStrategy": "spartito.strategies",
        "ParameterServerStrategy": "spartito.strategies",
        "PipelineStrategy": "spartito.strategies",
        "PowerSGD": "spartito.engine.gradients.compression",
        "ShardedStrategy": "spartito.strategies",
        "Strategy": "spartito.strategies",
        "TPUStrategy": "spartito.strategies",
        "Task": "spartito.cluster.spec",
        "Trainer": "spartito.training.trainer",
        "load_model": "spartito.training.files.weights",
        "log": "spartito.engine.logged",
        "meta": "spartito.engine.meta.value_recipes",
        "seed_everything": "spartito.engine.randomness.seed",
        "strategy": "spartito.strategies",
        "summary": "spartito.training.summary",
    },
    {
        "callbacks": "spartito.training.callbacks",
        "data": "spartito.data",
        "extend": "spartito.extend",
        "launch": "spartito.launch",
        "metrics": "spartito.training.metrics",
        "models": "spartito.models",
    },
)

__all__ = [
    "Batch",
    "Callback",
    "CentralStorageStrategy",
    "ClusterSpec",
    "CorruptSampleError",
    "History",
    "LocalSGDStrategy",
    "MeshStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "PowerSGD",
    "PreemptedError",
    "ShardedStrategy",
    "SpartitoError",
    "Strategy",
    "TPUStrategy",
    "Task",
    "TaskLostError",
    "Trainer",
    "UserError",
    "callbacks",
    "data",
    "extend",
    "launch",
    "load_model",
    "log",
    "meta",
    "metrics",
    "models",
    "seed_everything",
    "strategy",
    "summary",
]

install_excepthook()
_check_platform()
_put_off_compiler()
_configure()
