"""Models that are built without values get those of one device, a task's shard at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from tests.replicas import Replicas
from tests.strategies import meta_jobs
from tests.strategies.test_contracts import Case, close, named, run

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("central_storage", 2, {}),
    ("sharded", 2, {"block_bytes": 500}),
    ("sharded", 2, {"communication": "sockets", "block_bytes": 500}),
    ("sharded", 2, {"communication": "fsdp", "block_bytes": 500}),
    ("sharded", 2, {"zero": 1}),
    ("sharded", 4, {"copies": 2}),
    ("mesh", 2, {"model": 2}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    ("pipeline", 2, {"microbatches": 2}),
    ("pipeline", 4, {"stages": 2, "microbatches": 2}),
    ("pipeline", 4, {"mesh": {"pipeline": 2, "model": 2}, "microbatches": 2}),
    ("parameter_server", 2, {"max_staleness": 0}),
]


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    repeats = (case[0] in ("mesh", "pipeline") and case[1] == 4) or "zero" in case[2]
    return (pytest.mark.slow,) if repeats else ()


every_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks(case), id=named(case)) for case in CASES]
)


@pytest.fixture(scope="module")
def with_values(replicas: Replicas) -> Any:
    """A training of the same model, built with its values, on one device."""
    return run(replicas, CASES[0], meta_jobs.trained, inside="plain")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    meta_jobs.write(folder)
    return folder


@every_case
def test_values_are_those_of_a_model_that_was_built_with_them(
    replicas: Replicas, case: Case
) -> None:
    plain = meta_jobs.built("plain")
    after = torch.rand(3, dtype=torch.float64)
    _, model, drawn = run(replicas, case, meta_jobs.trained, rate=0.0)
    if model:
        assert model.keys() == plain.state_dict().keys()
        assert all(torch.equal(model[k], v) for k, v in plain.state_dict().items())
        assert torch.equal(drawn, after)


@every_case
def test_it_trains_as_a_model_that_was_built_with_them(
    replicas: Replicas, case: Case, with_values: Any
) -> None:
    losses, model, _ = run(replicas, case, meta_jobs.trained)
    expected, plain, _ = with_values
    close(losses, expected)
    if model:
        close(model, plain)


DIVIDED = [case for case in CASES if case[0] in ("sharded", "mesh", "pipeline") and case[1] == 2]

STAGES_IN_SHARDS = ("pipeline", 4, {"stages": 2, "microbatches": 2, "zero": 3})

every_divided = pytest.mark.parametrize(
    "case", [*DIVIDED, pytest.param(STAGES_IN_SHARDS, marks=pytest.mark.slow)], ids=named
)


@every_divided
@pytest.mark.parametrize("when", ["begun", "waiting", "epoch"])
def test_it_goes_on_from_a_checkpoint(
    replicas: Replicas, case: Case, when: str, written: Path
) -> None:
    found = run(replicas, case, meta_jobs.resumed, folder=written / when)
    close(found, run(replicas, CASES[0], meta_jobs.resumed, folder=written / when, inside="plain"))


@every_divided
def test_it_can_be_saved_before_the_first_batch(
    replicas: Replicas, case: Case, tmp_path: Path
) -> None:
    run(replicas, case, meta_jobs.saved_before_the_first_batch, folder=tmp_path / "saved")
    net, plain = meta_jobs.built("plain"), meta_jobs.built("plain").state_dict()
    with torch.no_grad():
        net.gain.zero_()
    sp.Trainer(net, strategy=sp.OneDeviceStrategy()).load(tmp_path / "saved")
    assert all(torch.equal(value, plain[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    "case",
    [
        ("sharded", 2, {"communication": "sockets"}),
        ("mesh", 2, {"model": 2}),
        ("pipeline", 2, {"microbatches": 1}),
    ],
    ids=named,
)
def test_a_task_never_holds_more_than_its_shard_and_a_tensor(
    replicas: Replicas, case: Case
) -> None:
    name, tasks, options = case
    whole, tensor = 4 * meta_jobs.LAYERS, 4
    few = whole / 2 + 6 * tensor  # messages that bring tensors, what torch takes, and gaps
    assert max(replicas(meta_jobs.peak, tasks, name, options)) < few
    assert max(replicas(meta_jobs.peak, tasks, name, options, inside="plain")) > whole


def test_what_nobody_knows_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        known = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        lists = nn.Sequential(nn.ReLU(), nn.ParameterList([torch.zeros(4)]))
        rotary = nn.Sequential(nn.Linear(2, 2))
        rotary.register_buffer("turns", torch.ones(2), persistent=False)
    sp.Trainer(known, loss=nn.MSELoss(), strategy=sp.OneDeviceStrategy())
    assert "build it under sp.meta()" in caplog.text
    for net, text in [
        (rotary, r"turns of the model, a Sequential, has no values(.|\n)*sp\.meta\(\)"),
        (lists, r"0 of 1, a ParameterList, has no values"),
    ]:
        with pytest.raises(sp.UserError, match=text):
            sp.Trainer(net, loss=nn.MSELoss(), strategy=sp.OneDeviceStrategy())


@pytest.mark.filterwarnings("ignore:.*which is a no-op")
def test_what_is_written_outside_of_the_block_is_refused() -> None:
    state = nn.Linear(2, 2).state_dict()
    written: list[Callable[[nn.Module], object]] = [
        lambda net: nn.init.ones_(net[0].weight),  # type: ignore[index]
        lambda net: net[0].load_state_dict(state),  # type: ignore[index]
        lambda net: net[1].running_mean.fill_(3),  # type: ignore[index]
    ]
    for write in written:
        with sp.meta():
            net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
        with sp.meta(), sp.meta():
            write(net)
            net.append(nn.Linear(2, 2))
        sp.Trainer(net, loss=nn.MSELoss(), strategy=sp.OneDeviceStrategy())
        with sp.meta():
            net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
        write(net)
        with pytest.raises(sp.UserError, match="was written into outside of"):
            sp.Trainer(net, loss=nn.MSELoss(), strategy=sp.OneDeviceStrategy())


def test_parameters_that_share_memory_are_refused() -> None:
    with sp.meta():
        both = torch.zeros(2, 3)
        net = nn.ParameterList([both[0], both[1]])
    with pytest.raises(sp.UserError, match="1 shares memory with 0"):
        sp.Trainer(net, loss=nn.MSELoss(), strategy=sp.OneDeviceStrategy())
    with sp.meta():
        linear = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(linear.parameters())
    with pytest.raises(sp.UserError, match="state of parameters that have no values yet"):
        sp.Trainer(linear, optimizer=optimizer, strategy=sp.PipelineStrategy())
