"""Devices that have no fp64, as those of a Mac: nothing asks for it there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import spartito
from tests import simulated
from tests.commands import commands_in
from tests.strategies.test_recovery import difference

SCRIPT = """
import json
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import spartito as sp
from spartito.accelerators import kind_of
from tests import simulated

simulated.register()


class NoDoubles(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.device.type == "sim":
                if one.dtype == torch.float64:
                    raise TypeError(f"{function} gives fp64, which this device has not")
        return found


NoDoubles().__enter__()
assert (kind_of("cpu").exact, kind_of("sim").exact) == (torch.float64, torch.float32)
x = torch.randn(90, 5, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def trained(device, x=x, **options):
    model = net()
    square = sp.metrics.MeanMetric("square", lambda output, target: output.square().mean(1))
    scores = [sp.metrics.Precision(), sp.metrics.F1Score(average="weighted"), sp.metrics.AUC()]
    trainer = sp.Trainer(
        model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(), clip_norm=1.0, metrics=["accuracy", square, *scores],
        strategy=sp.OneDeviceStrategy(device=device), **options,
    )
    found = trainer.fit((x, y), epochs=2, batch_size=16, validation_data=(x, y), verbose=False)
    return [found.history, [p.detach().cpu().tolist() for p in model.parameters()]]


def by_hand(device):
    strategy = sp.OneDeviceStrategy(device=device)
    model = net()
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    data, means = sp.data.as_dataset((x, y), 16), []
    for batch in strategy.distribute(data):
        losses = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
        strategy.backward(losses, batch)
        strategy.update(optimizer)
        means.append(strategy.reduce("mean", losses).item())
    return means


def of_numpy(device):
    return trained(device, x.double().numpy())


several = lambda device: trained(device, accumulate=2, deterministic=True)
for each in (trained, by_hand, several, of_numpy):
    print(json.dumps([each("cpu"), each("sim")]))
try:
    torch.ones(2, device="sim").double()
except TypeError as error:
    print(error)
try:
    model = net()
    model[2].double()
    sp.OneDeviceStrategy(device="sim").prepare(model, torch.optim.SGD(model.parameters(), 0.1))
except sp.UserError as error:
    print(error)
"""


def test_a_device_without_fp64_gives_the_numbers_of_one_that_has_it(tmp_path: Path) -> None:
    simulated.built()
    with commands_in(tmp_path) as commands:
        path = f"{Path(__file__).parents[2]}{os.pathsep}{Path(spartito.__file__).parents[1]}"
        script = commands.write("script.py", SCRIPT)
        ended = commands.start(sys.executable, script, env={"PYTHONPATH": path}).end()
    assert ended.code == 0, ended.err
    *lines, last, model, do = ended.out.splitlines()
    assert len(lines) == 4
    for line in lines:
        on_cpu, on_device = json.loads(line)
        assert difference(on_cpu, on_device) <= 1e-5
    assert last.endswith("gives fp64, which this device has not")
    assert model == "the model's '2.weight' is in fp64, which devices of type sim do not have"
    assert do == "  Call model.float() first, or take device='cpu'."
