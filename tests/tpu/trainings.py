"""Programs that train on a device of torch_tpu; each prints what a test looks at, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.tpu import chip

chip.begin()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import spartito as sp  # noqa: E402

EXAMPLES, BATCH = 29, 8


def model(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Convolutions and norms, small; without norms in fp32, as those fail in bf16 here."""
    torch.manual_seed(0)
    exact = dtype == torch.float64
    norms = (nn.GroupNorm(2, 4), nn.LayerNorm(16)) if exact else (nn.Identity(), nn.Identity())
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), norms[0], nn.GELU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 16), norms[1], nn.Tanh(), nn.Dropout(dropout)),
        nn.Linear(16, 3),
    ).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Pictures of three kinds."""
    generator = torch.Generator().manual_seed(7)
    y = torch.arange(EXAMPLES) % 3
    x = torch.randn(EXAMPLES, 1, 8, 8, generator=generator, dtype=dtype)
    return x + y.view(-1, 1, 1, 1), y


def train(strategy: sp.Strategy, folder: str = "", **options: Any) -> dict[str, Any]:
    """Three epochs with an odd last batch, clipped and accumulated; then all that is asked of it.

    Args:
        strategy: Where.
        folder: Of a checkpoint to go on from; "" begins.
        **options: Of the trainer.
    """
    dtype = options.pop("dtype", torch.float64)
    net = model(options.pop("dropout", 0.0), dtype)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), 0.01),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics=["accuracy"],
        strategy=strategy,
        **{"clip_norm": 0.5, "accumulate": 2, **options},
    )
    if folder:
        trainer.load(folder)
    both = data(dtype)
    history = trainer.fit(
        both, epochs=6 if folder else 3, batch_size=BATCH, validation_data=both, verbose=0
    )
    if not folder and strategy.num_replicas == 1:
        trainer.save(f"after-{strategy.engine.team.device.type}")
    values = trainer.predict(both[0]).flatten().tolist()
    state = strategy.state_dict()["model"]
    values += [value for tensor in state.values() for value in tensor.cpu().flatten().tolist()]
    return {"curves": history.history, "values": values}


def numbers() -> Any:
    """The same training on the CPU, on the device, and on it filled up; and on from checkpoints."""
    return {
        "cpu": train(sp.OneDeviceStrategy(device="cpu")),
        "one_device": train(sp.OneDeviceStrategy(device="tpu")),
        "tpu": train(sp.TPUStrategy()),
        "unfilled": train(sp.TPUStrategy(fill=False)),
        "cpu, on from tpu": train(sp.OneDeviceStrategy(device="cpu"), "after-tpu"),
        "tpu, on from cpu": train(sp.TPUStrategy(), "after-cpu"),
        "its own": str(sp.OneDeviceStrategy().engine.team.device),
    }


def randoms() -> Any:
    """Dropout: of one seed twice, and drawn as on the CPU."""
    found = [
        train(strategy, dropout=0.5, seed=3, deterministic=deterministic)["values"]
        for strategy, deterministic in (
            (sp.TPUStrategy(), False),
            (sp.TPUStrategy(), False),
            (sp.TPUStrategy(), True),
            (sp.OneDeviceStrategy(device="cpu"), True),
        )
    ]
    return {"one seed": found[:2], "deterministic": found[2:]}


def rounded() -> Any:
    """In bf16: the losses here and on the CPU."""
    return {
        device: train(sp.TPUStrategy(device=device), dtype=torch.float32, precision="bf16")
        for device in ("cpu", "tpu")
    }


def several() -> Any:
    """On the device of each of several processes, whose chief prints."""
    strategy = sp.strategy()
    with strategy:
        found = train(strategy)
        return found if strategy.is_chief else None


def epochs(fill: str, count: str = str(EXAMPLES)) -> Any:
    """Two epochs of a deeper model; what was compiled is told at the end of the process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 32)]
    for _ in range(6):
        layers += [nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()]
    net = nn.Sequential(*layers, nn.Linear(32, 3))
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=sp.TPUStrategy(fill=fill == "fill"),
    )
    x, y = data(torch.float32)
    both = x[: int(count)], y[: int(count)]
    return trainer.fit(both, epochs=2, batch_size=BATCH, verbose=0).history["loss"]


def main() -> None:
    """Run the program that the arguments name, in a folder of its own."""
    name, *arguments = sys.argv[1:]
    found = globals()[name](*arguments)
    if found is not None:
        Path(f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
