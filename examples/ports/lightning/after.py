"""An autoencoder of digits as a LightningModule."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spartito as sp


class AutoEncoder(pl.LightningModule):
    def __init__(self, width=8, rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, width))
        self.decoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self(x), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), x), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


pl.seed_everything(0)
images = torch.rand(256, 64)
train = DataLoader(TensorDataset(images[:192]), batch_size=32)
val = DataLoader(TensorDataset(images[192:]), batch_size=64)

trainer = sp.Trainer(AutoEncoder(), gradient_clip_val=1.0)
saved = sp.callbacks.ModelCheckpoint("saved")
history = trainer.fit(train, max_epochs=3, validation_data=val, callbacks=[saved])
print("loss", history.history["val_loss"][-1])
