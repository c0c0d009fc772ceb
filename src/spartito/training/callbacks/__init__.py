"""What `Trainer.fit` can do besides training: save, stop, show, write down."""

from spartito.training.callback import Callback
from spartito.training.callbacks.backup_and_restore import BackupAndRestore
from spartito.training.callbacks.csv_logger import CSVLogger
from spartito.training.callbacks.early_stopping import EarlyStopping
from spartito.training.callbacks.lambda_callback import LambdaCallback
from spartito.training.callbacks.learning_rate_scheduler import LearningRateScheduler
from spartito.training.callbacks.loggers import MLflowLogger, WandbLogger
from spartito.training.callbacks.model_checkpoint import ModelCheckpoint
from spartito.training.callbacks.profiler import Profiler
from spartito.training.callbacks.progress_bar import ProgressBar
from spartito.training.callbacks.tensorboard import TensorBoard
from spartito.training.callbacks.terminate_on_nan import TerminateOnNaN

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateScheduler",
    "MLflowLogger",
    "ModelCheckpoint",
    "Profiler",
    "ProgressBar",
    "TensorBoard",
    "TerminateOnNaN",
    "WandbLogger",
]


def __dir__() -> list[str]:
    return __all__  # the TAB key shows the API alone
