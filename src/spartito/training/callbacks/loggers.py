"""Send the figures of every epoch to Weights & Biases or MLflow: optional packages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from spartito.packages import package
from spartito.report.figures import scalars
from spartito.training.callback import Callback, Logs


class Logger(Callback):
    """What loggers share: the chief alone writes, one row per epoch, counted from 1.

    Figures that are lists (confusion matrices) are left out. A run that fails is marked so.
    """

    def on_train_begin(self) -> None:
        if self.trainer.is_chief:
            self.begin(self._settings())

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.trainer.is_chief:
            self.write(epoch + 1, scalars(logs))

    def on_train_end(self) -> None:
        if self.trainer.is_chief:
            self.end(failed=False)

    def on_train_error(self, error: BaseException) -> None:
        if self.trainer.is_chief:
            self.end(failed=True)

    @abstractmethod
    def begin(self, settings: Mapping[str, Any]) -> None:
        """Open a run.

        Args:
            settings: What the training is: strategy, batch size, seed, and so on.
        """

    @abstractmethod
    def write(self, epoch: int, figures: Mapping[str, Any]) -> None:
        """Send the figures of one epoch.

        Args:
            epoch: Its number, counted from 1.
            figures: Its figures by name.
        """

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Close the run; calling it again changes nothing.

        Args:
            failed: Whether the training ended by an exception.
        """

    def _settings(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "strategy": str(trainer.strategy),
            "replicas": trainer.strategy.num_replicas,
            "epochs": trainer.epochs,
            "batch_size": trainer.batch_size,
            "precision": trainer.precision,
            "deterministic": trainer.deterministic,
            "seed": trainer.seed,
            **trainer.about,
        }


class WandbLogger(Logger):
    """Logs to Weights & Biases: one run per `fit`.

    Args:
        project: The name of the project.
        name: The name of the run; None lets wandb choose.
        options: Anything else that ``wandb.init`` takes (``mode="offline"``, ``dir=...``).

    Raises:
        UserError: The package wandb is not installed.
    """

    def __init__(self, project: str | None = None, name: str | None = None, **options: Any) -> None:
        self._wandb = _package("wandb", "wandb")
        self._options = {"project": project, "name": name, **options}
        self.run: Any = None

    def begin(self, settings: Mapping[str, Any]) -> None:
        given = self._options.get("config") or {}
        self.run = self._wandb.init(**{**self._options, "config": {**settings, **given}})

    def write(self, epoch: int, figures: Mapping[str, Any]) -> None:
        self.run.log({**figures, "epoch": epoch}, step=self.trainer.step)

    def end(self, *, failed: bool) -> None:
        if self.run is not None:
            self.run.finish(exit_code=int(failed))
        self.run = None


class MLflowLogger(Logger):
    """Logs to MLflow: one run per `fit`.

    Args:
        experiment: The name of the experiment, which is made when it is not there.
        run_name: The name of the run; None lets MLflow choose.
        tracking_uri: Where the runs are kept; None: ``MLFLOW_TRACKING_URI``.
        tags: Of the run.

    Raises:
        UserError: The package mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str = "Default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        mlflow = _package("mlflow", "mlflow-skinny")
        self._client = mlflow.MlflowClient(tracking_uri)
        self._experiment, self._run_name, self._tags = experiment, run_name, tags
        self.run_id: str | None = None

    def begin(self, settings: Mapping[str, Any]) -> None:
        client = self._client
        known = client.get_experiment_by_name(self._experiment)
        number = (
            client.create_experiment(self._experiment) if known is None else known.experiment_id
        )
        run = client.create_run(number, run_name=self._run_name, tags=dict(self._tags or {}))
        self.run_id = run.info.run_id
        for name, value in settings.items():
            client.log_param(self.run_id, name, value)

    def write(self, epoch: int, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self.run_id, name, value, step=epoch)

    def end(self, *, failed: bool) -> None:
        if self.run_id is not None:
            self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
        self.run_id = None


def _package(name: str, distribution: str) -> Any:
    remedy = f"pip install {distribution}, or pip install 'spartito[loggers]'."
    return package(name, f"the package {name} cannot be imported", remedy)
