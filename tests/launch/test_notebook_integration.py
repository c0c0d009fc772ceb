"""``sp.launch`` in the cells of a real Jupyter kernel."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.skips import skip

LIMIT = 90.0


@dataclass
class Cell:
    """What a cell showed."""

    stdout: str = ""
    stderr: str = ""
    result: str = ""
    error: str = ""
    traceback: str = ""


@dataclass
class Notebook:
    """A kernel, and the client of it."""

    manager: Any
    client: Any
    cells: list[Cell] = field(default_factory=list)

    def run(self, code: str, interrupt_at: str = "") -> Cell:
        """Execute a cell; with ``interrupt_at`` the kernel is interrupted once that was printed."""
        number = self.client.execute(code)
        cell, end, told = Cell(), time.monotonic() + LIMIT, False
        while True:
            message = self.client.get_iopub_msg(timeout=end - time.monotonic())
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                both = getattr(cell, content["name"]) + content["text"]
                setattr(cell, content["name"], both)
            elif kind == "execute_result":
                cell.result = content["data"]["text/plain"]
            elif kind == "error":
                cell.error = f"{content['ename']}: {content['evalue']}"
                cell.traceback = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return cell
            if interrupt_at and interrupt_at in cell.stdout and not told:
                told = True
                self.manager.interrupt_kernel()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    try:
        import ipykernel
        from jupyter_client.manager import KernelManager
    except ImportError as error:
        skip("dev", error)
    del ipykernel
    manager = KernelManager()
    kernel = manager.kernel_spec
    assert kernel is not None
    kernel.argv = [
        sys.executable,
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    manager.start_kernel(cwd=str(tmp_path_factory.mktemp("notebook")), env=env)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=LIMIT)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


MODEL = """
import torch
from torch import nn
import spartito as sp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
    def forward(self, x):
        return self.layer(x)

RATE = 0.1

def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()

def train(epochs):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    loss = nn.CrossEntropyLoss()
    trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=sp.strategy())
    trainer.fit(sp.data.arrays(*data()), epochs=epochs, batch_size=8)
    torch.save(net, "net.pt")
    return net

def plain(epochs):
    torch.manual_seed(0)
    net, (x, y) = Net(), data()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(epochs):
        for rows in torch.arange(24).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net

def apart(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters()))
"""

FAILS = """
import os, time

def fails():
    if os.environ["RANK"] == "1":
        raise ValueError("not this one")
    time.sleep(60)
"""
WAITS = """
import os, time

def waits():
    print("pid", os.getpid(), flush=True)
    time.sleep(60)

def gives():
    return os.environ["WORLD_SIZE"]
"""


@pytest.mark.slow
def test_a_model_of_a_cell_trains_in_two_processes_as_in_plain_torch(notebook: Notebook) -> None:
    notebook.run(MODEL)
    trained = notebook.run('net = sp.launch(train, strategy="mirrored", workers=2, args=(2,))')
    assert trained.error == ""
    assert "[worker 0] epoch 2/2  loss" in trained.stdout
    assert "mirrored, 2 replicas" in trained.stderr
    same = notebook.run(
        "type(net) is Net, apart(net, plain(2)) < 1e-12, apart(net, plain(1)) > 1e-6"
    )
    assert same.result == "(True, True, True)"
    served = notebook.run("other = sp.launch(train, workers=1, ps=1, args=(2,))")
    assert served.error == ""
    assert notebook.run("apart(other, plain(2)) < 1e-12").result == "True"


@pytest.mark.slow
def test_an_error_of_a_task_shows_the_cell_that_raised_it(notebook: Notebook) -> None:
    notebook.run(FAILS)
    cell = notebook.run("import spartito as sp\nsp.launch(fails, workers=2)")
    assert cell.error == "ValueError: not this one"
    assert 'raise ValueError("not this one")' in cell.traceback  # the line of the other cell
    assert "in worker 1, which failed with exit code 1" in cell.traceback
    mistake = notebook.run("sp.launch(fails, worker=2)")
    assert mistake.error.startswith("UserError: sp.launch has no option 'worker'")
    assert mistake.traceback.startswith("spartito: error: sp.launch has no option 'worker'")


@pytest.mark.slow
def test_an_interrupt_ends_all_tasks_and_the_kernel_goes_on(notebook: Notebook) -> None:
    notebook.run(WAITS)
    cell = notebook.run("import spartito as sp\nsp.launch(waits, workers=2)", "worker 1] pid")
    assert cell.error.startswith("KeyboardInterrupt")
    assert "stopped by SIGINT" in cell.stderr
    for pid in re.findall(r"pid (\d+)", cell.stdout):
        assert not Path(f"/proc/{pid}").exists()
    assert notebook.run("sp.launch(gives, workers=2)").result == "'2'"
