"""Models on a device where torch makes new parameters of one that is moved, as on TPUs."""

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
import json, sys
import torch
from torch import nn
import spartito as sp
from tests import simulated

simulated.register()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.between = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 10, bias=False)
        self.last.weight = self.first.weight

    def forward(self, tokens):
        return self.last(self.between(self.first(tokens)).relu()).transpose(1, 2)


def trained(device, begun):
    torch.manual_seed(0)
    net, tokens = Tied().double(), torch.randint(0, 10, (20, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if begun:  # it has a state before it is moved
        nn.functional.cross_entropy(net(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer = sp.Trainer(
        net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), metrics=["accuracy"],
        strategy=sp.OneDeviceStrategy(device=device),
    )
    found = trainer.fit(
        (tokens, tokens), epochs=2, batch_size=8, validation_data=(tokens, tokens), verbose=False
    )
    assert net.first.weight is net.last.weight
    assert {p.device.type for p in net.parameters()} == {device}
    weights = [p.detach().cpu().tolist() for p in net.parameters()]
    return [found.history, weights]


print(json.dumps([[trained(device, begun) for device in ("cpu", "sim")] for begun in (0, 1)]))
try:
    torch.ones(2, device="sim") + torch.ones(2)
except RuntimeError as error:
    print(error)
"""


def test_a_script_that_builds_its_optimizer_first_trains_as_on_a_cpu(tmp_path: Path) -> None:
    """What is shared stays shared, the optimizer has the new parameters and its state of them."""
    simulated.built()
    with commands_in(tmp_path) as commands:
        path = f"{Path(__file__).parents[2]}{os.pathsep}{Path(spartito.__file__).parents[1]}"
        script = commands.write("script.py", SCRIPT)
        ended = commands.start(sys.executable, script, env={"PYTHONPATH": path}).end()
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    for on_cpu, on_device in json.loads(lines[-2]):
        assert difference(on_cpu, on_device) <= 1e-12
    assert "at least two devices, sim:0 and cpu" in lines[-1]
