"""Loggers leave runs that the packages themselves read back, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spartito as sp
from spartito.errors import UserError
from tests.training import jobs


def fit(logger: sp.Callback, **options: Any) -> list[float]:
    made = jobs.trainer(metrics=["accuracy", "confusion_matrix"], about={"task": "points"})
    history = made.fit(
        jobs.data(), epochs=2, validation_data=jobs.data(), callbacks=[logger], verbose=0, **options
    ).history
    return history["val_loss"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    uri = (tmp_path / "runs").as_uri()
    logger = sp.callbacks.MLflowLogger("points", "first", uri, {"kind": "test"})
    losses = fit(logger)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("points").experiment_id])
    assert [m.value for m in client.get_metric_history(run.info.run_id, "val_loss")] == losses
    assert [m.step for m in client.get_metric_history(run.info.run_id, "accuracy")] == [1, 2]
    assert (run.info.status, run.data.params["task"]) == ("FINISHED", "points")
    assert run.data.params["strategy"] == "one_device"
    assert "confusion_matrix" not in run.data.metrics
    with pytest.raises(ValueError, match="early"):
        fit(_Chain(logger))
    states = {r.info.status for r in client.search_runs([run.info.experiment_id])}
    assert states == {"FINISHED", "FAILED"}


class _Chain(sp.Callback):
    """A logger in a training that ends by an error."""

    def __init__(self, logger: sp.Callback) -> None:
        self.logger = logger

    def set_trainer(self, trainer: Any) -> None:
        self.logger.set_trainer(trainer)

    def on_train_begin(self) -> None:
        self.logger.on_train_begin()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        raise ValueError("early")

    def on_train_error(self, error: BaseException) -> None:
        self.logger.on_train_error(error)


@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = sp.callbacks.WandbLogger("points", "first", mode="offline", dir=str(tmp_path))
    rows: list[dict[str, Any]] = []
    begin = logger.begin

    def spied(settings: Any) -> None:
        begin(settings)
        log = logger.run.log

        def spy(row: dict[str, Any], **more: Any) -> None:
            rows.append(row)
            log(row, **more)

        logger.run.log = spy
        assert dict(logger.run.config)["task"] == "points"

    monkeypatch.setattr(logger, "begin", spied)
    losses = fit(logger)
    assert [row["val_loss"] for row in rows] == losses
    assert all("val_confusion_matrix" not in row for row in rows)
    assert logger.run is None
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stat().st_size > 0


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (sp.callbacks.WandbLogger, "pip install wandb, or pip install 'spartito\\[loggers\\]'"),
        (sp.callbacks.MLflowLogger, "pip install mlflow-skinny"),
    ],
)
def test_a_package_that_is_missing(make: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def missing(name: str, *_: Any) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=line):
        make()
