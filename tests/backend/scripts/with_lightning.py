"""A script of Lightning's users; its argument is the backend."""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Prints what it has logged of each epoch, the mean over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.body(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        right = (self.body(x).argmax(1) == y).double().mean()
        self.log("right", right, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        self.print(f"loss {found['loss'].item():.17g}, right {found['right'].item():.17g}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(100, 8).double(), torch.randint(3, (100,)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=sys.argv[1]),
        precision="64-true",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, 10, shuffle=True), DataLoader(data, 10))
    trainer.print(f"backend {torch.distributed.get_backend()}")


if __name__ == "__main__":
    main()
