"""A training whose first member of some groups is killed, and that ends when its group is back."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import spartito as sp

VICTIM, NUMBER = (
    os.environ["SPARTITO_TEST_VICTIM"],
    signal.Signals[os.environ["SPARTITO_TEST_NUMBER"]],
)
KILLED, BACK = Path("killed"), Path("back")

strategy = sp.strategy()
torch.manual_seed(0)
net = nn.Linear(4, 2)


class Watched(nn.Module):
    """The model, in which a member finds its end once, and leaves a word when it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.batches = net, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += self.training
        if str(strategy.task) == VICTIM and self.batches == 7:
            if KILLED.exists():
                BACK.touch()
            else:
                KILLED.touch()
                os.kill(os.getpid(), NUMBER)
        out: torch.Tensor = self.net(x)
        return out


class UntilBack(sp.Callback):
    """Ends the training when the group is back."""

    def on_epoch_end(self, epoch: int, logs: object) -> None:
        self.trainer.stop_training |= BACK.exists()
        time.sleep(0.1)  # leaves the cores to the group that starts


trainer = sp.Trainer(
    Watched(),
    optimizer=torch.optim.SGD(net.parameters(), 0.1),
    loss=nn.CrossEntropyLoss(),
    strategy=strategy,
)
x = torch.randn(256, 4)
trainer.fit(
    sp.data.arrays(x, (x[:, 0] > 0).long()).batch(16),
    epochs=100_000,
    callbacks=[UntilBack()],
    verbose=0,
)
strategy.close()
print(f"{strategy.task} has ended", flush=True)
