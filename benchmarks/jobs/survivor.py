"""A short training on pictures in files, for faults that files can have: ``FOLDER --out=DIR``.

Interrupted and started again, it goes on at the very next step. The pictures are drawn when there
are none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import spartito as sp

SIZE, OF_EACH, EPOCHS = 12, 160, 3


def draw(folder: Path) -> None:
    """Dark and bright pictures in two folders, unless they are there."""
    generator = torch.Generator().manual_seed(1)
    for name, level in (("dark", 60), ("bright", 180)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(OF_EACH):
            noise = torch.randint(0, 70, (SIZE, SIZE, 3), generator=generator)
            pixels = (noise + level).to(torch.uint8).numpy()
            path = folder / name / f"{number}.png"
            if not path.exists():
                Image.fromarray(pixels).save(path)


def main() -> None:
    """Train as the environment says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 16), nn.ReLU(), nn.Linear(16, 2))
    strategy = sp.strategy()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-6),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        on_nonfinite="skip",
    )
    data = sp.data.image_folder(options.folder, (SIZE, SIZE))
    trainer.fit(
        data.shuffle().batch(4),
        epochs=EPOCHS,
        callbacks=[sp.callbacks.BackupAndRestore(every=20, share=None)],
    )
    strategy.close()


if __name__ == "__main__":
    main()
