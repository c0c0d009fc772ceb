"""What loops of one's own come across: checkpoints, several models, a loop that is left early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spartito as sp
from spartito.engine.updates.optimizers import check_optimizer
from spartito.errors import UserError
from spartito.strategies import Strategy
from tests.commands import LIMIT, commands_in
from tests.replicas import Replicas
from tests.strategies import two_batches_jobs

LEFT = """
import sys, torch
import spartito as sp
from spartito.engine.devices import denormals
strategy = sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone())
net = torch.nn.Linear(3, 2)
net, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
batches = iter(strategy.distribute(sp.data.arrays(torch.zeros(8, 3)).batch(4)))
for batch in batches:
    break
torch.kept = [sys.modules["__main__"], denormals]  # as some libraries do
"""

LEFT_BY_ALL = """
import sys, torch
import spartito as sp
strategy = sp.strategy()
net = torch.nn.Linear(3, 2)
net, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
batches = iter(strategy.distribute(sp.data.arrays(torch.zeros(64, 3)).batch(4)))
for batch in batches:
    strategy.backward(net(batch.data).sum(1), batch)
    strategy.update(optimizer)
    break
torch.kept = sys.modules["__main__"]
"""


def alone() -> Strategy:
    return sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone())


def prepared(strategy: Strategy) -> Any:
    net = nn.Linear(3, 2)
    return strategy.prepare(net, torch.optim.Adam(net.parameters()))


def test_a_loop_that_is_left_early_ends_silently() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("mirrored", "--workers", "2"),
        ("parameter_server", "--workers", "1", "--ps", "1"),
    ],
    ids=lambda words: words[0],
)
def test_a_loop_that_all_tasks_leave_early_ends_silently(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("left.py", LEFT_BY_ALL)
        ended = commands.spartito("run", "--strategy", *words, script)
    assert ended.code == 0, ended.text
    assert "Exception ignored" not in ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize("call", ["state_dict", "load", "save", "keep"])
def test_errors_name_the_call_that_was_made(tmp_path: Path, call: str) -> None:
    strategy = alone()
    given = {"load": (tmp_path,), "save": (tmp_path,)}.get(call, ())
    with pytest.raises(UserError, match=rf"^{call}\(\) before prepare\(\)"):
        getattr(strategy, call)(*given)
    pairs = [prepared(strategy) for _ in range(2)]
    with pytest.raises(UserError, match=rf"^{call}\(\) with 2 prepared models") as error:
        getattr(strategy, call)(*given)
    assert "backward()" not in str(error.value)
    with strategy.using(pairs[0][1]):
        assert strategy.state_dict()["model"].keys() == {"weight", "bias"}


def test_a_backward_pass_before_prepare_is_refused() -> None:
    strategy, weight = alone(), torch.ones(3, requires_grad=True)
    batch = next(iter(strategy.distribute(sp.data.arrays(torch.ones(4, 3)).batch(2))))
    with pytest.raises(UserError, match=r"^backward\(\) before prepare\(\)"):
        strategy.backward((batch.x * weight).sum(1), batch)


def test_a_loop_loads_what_a_trainer_has_saved(tmp_path: Path) -> None:
    strategy = alone()
    net = nn.Linear(3, 2)
    trainer = sp.Trainer(net, optimizer=torch.optim.Adam, loss=nn.MSELoss(), strategy=strategy)
    trainer.fit((torch.ones(8, 3), torch.zeros(8, 2)), batch_size=4, verbose=0)
    trainer.save(tmp_path / "saved")
    other = alone()
    again, optimizer = prepared(other)
    other.load(str(tmp_path / "saved"))
    assert torch.equal(again.weight, net.weight)
    assert optimizer.state[again.weight]["step"] == 2
    with pytest.raises(UserError, match="a state with 'weight', 'bias', and no 'model'"):
        other.load_state_dict(net.state_dict())
    with pytest.raises(UserError, match=r"strategy\.load\(path\) after prepare"):
        check_optimizer(optimizer, again, 2)


def test_names_of_packages_are_shown() -> None:
    import spartito.storage
    import spartito.strategies

    for module in (sp, sp.data, sp.callbacks, spartito.strategies, spartito.storage):
        assert {*module.__all__} <= {*dir(module)}, module
        assert dir(module) == sorted(dir(module))


@pytest.mark.parametrize("sizes", [(32, 32), (32, 31), (27, 32)])
@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_a_loss_of_two_batches_is_exact_or_warned_of(
    replicas: Replicas, name: str, sizes: tuple[int, int]
) -> None:
    """By one backward pass where replicas have the same part of both, else by one for each."""
    expected = two_batches_jobs.plain(sizes)
    for way in ("together", "apart"):
        found = replicas(two_batches_jobs.trained, 2, name, {}, sizes, way)
        gaps = [
            (value - learned[key]).abs().max()
            for learned, _ in found[:1]
            for key, value in expected.items()
        ]
        is_even = len({-size % two_batches_jobs.BATCH for size in sizes}) == 1
        warned = max(count for _, count in found)
        if way == "apart" or is_even:
            assert max(gaps) <= 1e-12
            assert warned == 0
        else:
            assert max(gaps) > 1e-12
            assert warned == 1


@pytest.mark.parametrize("inside", ["mirrored", "sharded(zero=3)", "mesh(model=2)"])
def test_groups_count_what_several_backward_passes_weigh(replicas: Replicas, inside: str) -> None:
    """The last batch gives one group more rows than the other."""
    options = {"groups": 2, "every": two_batches_jobs.EVERY, "inside": inside}
    expected = two_batches_jobs.plain_groups()
    for learned in replicas(two_batches_jobs.trained_in_groups, 4, "local_sgd", options):
        for key, value in expected.items():
            assert (value - learned[key]).abs().max() <= 1e-12


@pytest.mark.parametrize("way", ["ahead", "without"])
def test_a_batch_that_is_in_no_loss_is_none_of_it(replicas: Replicas, way: str) -> None:
    found = replicas(two_batches_jobs.trained, 2, "mirrored", {}, (27, 31), way)
    assert [count for _, count in found] == [0, 0]


def test_batches_have_the_length_of_a_pass_where_it_is_known() -> None:
    x = torch.zeros(20, 3)
    with alone() as strategy:
        prepared(strategy)
        loader = DataLoader(TensorDataset(x), 8, drop_last=True)
        for data, count in ((sp.data.arrays(x).batch(8), 3), (loader, 2)):
            batches = strategy.distribute(data)
            assert len(batches) == len(list(batches)) == count
        batches = strategy.distribute(x[at : at + 4] for at in range(0, 20, 4))
        with pytest.raises(TypeError, match="no known number"):
            len(batches)
        assert len(list(batches)) == 5
