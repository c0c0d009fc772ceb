"""Devices: which one a task gets, what is refused, and that nobody else names a kind of them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

import spartito
from spartito.accelerators import SideStream, device_memory, kind_of, own_device
from spartito.errors import UserError
from tests import simulated
from tests.commands import commands_in

SOURCES = Path(spartito.__file__).parent
FINDS_TESTS = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
"""Before a script of the environment that all have, in which tasks are forks."""

SCRIPT = """
import json, os, sys
import torch
from tests import simulated

simulated.register()
from spartito.accelerators import (
    SideStream, device_memory, kind_of, own_device, random_states
)
from spartito.errors import UserError


def got(*args):
    try:
        return str(own_device(*args))
    except UserError as error:
        return "refused: " + str(error)


found = {
    "own": [got(None, n, 2) for n in (0, 1)],
    "too many": got(None, 2, 3),
    "named": got("sim:1", 0, 1),
    "absent": got("sim:2", 0, 1),
    "host": got("cpu", 0, 8),
    "none": got("cuda", 0, 1),
}
os.environ["SPARTITO_SHARE_DEVICES"] = "1"
found["shared"] = [got(None, n, 3) for n in range(3)]
x = torch.arange(4.0, device="sim")
with simulated.counting() as counts:
    with SideStream().beside(x.device):
        y = x + 1
    found["beside"] = y.tolist()
found["counts"] = [counts[kind] for kind in ("reads", "copies to host", "bytes to host")]
kind = kind_of("sim")
found["kind"] = [kind.has_memory, kind.has_doubles, kind.fuses]
torch.manual_seed(5)
found["states"] = sorted(random_states())
found["memory"] = device_memory(x.device)
print(json.dumps(found))
"""


def test_tasks_get_devices_of_their_own(tmp_path: Path) -> None:
    simulated.built()
    with commands_in(tmp_path) as commands:
        script = commands.write("script.py", FINDS_TESTS + SCRIPT)
        ended = commands.python(script, forks=True)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert found["own"] == ["sim:0", "sim:1"]
    assert found["named"] == "sim:1"
    assert found["host"] == "cpu"
    assert found["shared"] == ["sim:0", "sim:1", "sim:0"]
    assert "3 tasks compute on this machine, where torch sees 2 sim devices" in found["too many"]
    assert "--share-devices" in found["too many"]
    assert "numbered from 0 to 1" in found["absent"]
    assert "this machine has none that torch can use" in found["none"]
    assert "2 sim devices" in found["none"]
    assert found["beside"] == [1.0, 2.0, 3.0, 4.0]
    assert found["counts"] == [0, 1, 16]
    assert found["kind"] == [True, True, True]
    assert found["memory"] is None  # torch does not tell


@pytest.mark.parametrize("name", ["gpu", "cude:0", "cuda:x"])
def test_a_device_that_torch_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"device='{name}' is none of torch's"):
        own_device(name, 0, 1)


JOB = """
import os, sys
import torch
from tests import simulated

simulated.register()
import spartito as sp

device = sys.argv[1].split(",")[int(os.environ["RANK"])]
torch.manual_seed(1)
with sp.strategy(device=None if device == "own" else device) as strategy:
    net = torch.nn.Linear(3, 2)
    trainer = sp.Trainer(
        net, optimizer=torch.optim.Adam(net.parameters()), loss=torch.nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    x, y = torch.rand(12, 3), torch.arange(12) % 2
    loss = trainer.fit((x, y), batch_size=6, epochs=2, verbose=False).history["loss"][-1]
    print(next(net.parameters()).device, loss == loss)
"""


def test_a_job_shares_devices_or_mixes_them_only_when_asked(tmp_path: Path) -> None:
    """What is refused ends with 2, on all tasks; what is asked for trains."""
    simulated.built()
    with commands_in(tmp_path) as commands:
        script = commands.write("job.py", FINDS_TESTS + JOB)

        def run(devices: str, *options: str) -> tuple[int, str]:
            workers = f"--workers={devices.count(',') + 1}"
            ended = commands.spartito("run", workers, *options, script, devices)
            return ended.code, ended.text

        code, said = run("own,own,own")
        assert (code, "3 tasks compute on this machine" in said) == (2, True), said
        code, said = run("own,own,own", "--share-devices")
        assert code == 0, said
        assert (said.count("sim:0 True"), said.count("sim:1 True")) == (2, 1), said
        code, said = run("own,cpu")
        assert code == 2, said
        assert "on devices of several kinds: worker 0" in said
        assert "--mixed" in said
        code, said = run("own,cpu", "--mixed")
        assert code == 0, said
        assert "sim:0 True" in said
        assert "cpu True" in said


def test_the_cpu_needs_no_copies_and_no_streams() -> None:
    x, kind = torch.ones(3), kind_of("cpu")
    assert not kind.has_memory
    assert device_memory(x.device) is None
    with SideStream().beside(x.device):
        assert (x + 1).tolist() == [2, 2, 2]
    assert str(own_device("cpu", 3, 4)) == "cpu"
    assert str(own_device("sim", 0, 1, computes=False)) == "cpu"  # servers compute there


def test_nobody_else_asks_for_a_kind_of_device_by_its_name() -> None:
    """Text for people may name one, code may not."""
    named = []
    for path in SOURCES.rglob("*.py"):
        if path.name == "accelerators.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "xpu", "mps"):
                if ast.unparse(node) != "Tensor.cuda":  # an operation that a layout knows
                    named.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.Constant) and node.value in ("cuda", "nccl", "xpu", "mps"):
                named.append(f"{path}:{node.lineno}")
    assert named == []
