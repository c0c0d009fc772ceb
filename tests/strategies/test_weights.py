"""A model's weights alone are one file for torch, and come from the files of others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import spartito as sp
from spartito.errors import UserError
from spartito.failpoints import ENV
from spartito.storage.atomic import folder_beside
from tests.processes import context
from tests.replicas import ReplicaError, Replicas
from tests.strategies import weight_jobs
from tests.strategies.jobs import blobs
from tests.strategies.test_contracts import Case, each_of, servers

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("sharded", 2, {"zero": 3, "block_bytes": 100}),
    ("mesh", 2, {"model": 2}),
    ("pipeline", 2, {"microbatches": 2}),
    ("parameter_server", 2, {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}),
]


@each_of(CASES)
def test_one_file_has_all_of_the_model(replicas: Replicas, case: Case, tmp_path: Path) -> None:
    name, count, options = case
    found = replicas(weight_jobs.save, count, name, options, tmp_path, servers=servers(case))
    assert {path.name for path in tmp_path.iterdir()} == {"of-01.safetensors", "checkpoint"}
    net = weight_jobs.Tied().double()
    plain = load_file(tmp_path / "of-01.safetensors")
    net.load_state_dict(plain, strict=False)  # of tied names the file has one
    for file, weights in found[:1]:
        assert file == str(tmp_path / "of-01.safetensors")
        for key, value in net.state_dict().items():
            assert torch.equal(value, weights[key]), key
    x, expected = blobs(5)[0], weight_jobs.Tied().double()
    expected.load_state_dict(found[0][1])
    for path in tmp_path.iterdir():  # and a model again, without trainer or tasks
        again = sp.load_model(path, lambda: weight_jobs.Tied().double())
        assert isinstance(again, weight_jobs.Tied)
        assert not again.training
        assert again.first.weight is again.second.weight
        assert torch.equal(again(x), expected(x))


@each_of(CASES)
def test_files_of_others_are_loaded(replicas: Replicas, case: Case, tmp_path: Path) -> None:
    name, count, options = case
    state = {key: value + 1 for key, value in weight_jobs.Tied().double().state_dict().items()}
    once = {key: value for key, value in state.items() if key != "second.weight"}
    files = {kind: tmp_path / kind for kind in ("a.safetensors", "b.pt", "part.pt")}
    save_file(once, files["a.safetensors"])  # as Transformers writes what is tied
    torch.save({f"module.{key}": value for key, value in state.items()}, files["b.pt"])
    part = {"head.bias": state["head.bias"], "head.old": torch.ones(2)}
    torch.save(part, files["part.pt"])
    for found in replicas(weight_jobs.load, count, name, options, files, servers=servers(case)):
        for weights, left in found[:2]:
            assert left == [[], []]
            for key, value in state.items():
                assert torch.equal(weights[key], value), key
        weights, (missing, unexpected) = found[2]
        assert sorted(missing) == sorted(state.keys() - part.keys())
        assert unexpected == ["head.old"]
        assert torch.equal(weights["head.bias"], state["head.bias"])
        kept = 1.0 if name in ("sharded", "parameter_server") else 0.5
        assert torch.equal(weights["head.weight"], state["head.weight"] * kept)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("w.safetensorz", "names no form"),
        ("{val_los}.pt", "val_los"),
        ("{epoch:q}.pt", "save_weights"),
        ("s3://bucket/w.pt", r"trainer\.save"),
    ],
)
def test_a_name_that_cannot_be(path: str, message: str, tmp_path: Path) -> None:
    trainer = sp.Trainer(nn.Linear(2, 2), loss=nn.MSELoss())
    with pytest.raises(UserError, match=message):
        trainer.save_weights(path if "://" in path else tmp_path / path)
    assert not list(tmp_path.iterdir())


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "w.pt"
    link.symlink_to(tmp_path / "there" / "w.pt")
    trainer = sp.Trainer(nn.Linear(2, 2), loss=nn.MSELoss())
    trainer.save_weights(link)
    assert link.is_symlink()
    assert set(torch.load(tmp_path / "there" / "w.pt")) == {"weight", "bias"}


def test_weights_of_another_model(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "w.pt")
    trainer = sp.Trainer(nn.Linear(2, 2), loss=nn.MSELoss())
    with pytest.raises(UserError, match="does not fit the model"):
        trainer.load_weights(tmp_path / "w.pt")
    with pytest.raises(UserError, match="does not fit the model"):
        trainer.load_weights(tmp_path / "w.pt", strict=False)
    with pytest.raises(UserError, match=r"trainer\.load_weights"):
        trainer.load(tmp_path / "w.pt")


class Wrapped(nn.Module):
    """Its only part has the name that wrappers of torch give."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_names_of_wrappers_that_are_names_of_the_model(tmp_path: Path) -> None:
    net = Wrapped()
    file = sp.Trainer(net, strategy="one_device").save_weights(tmp_path / "a.safetensors")
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "b.pt")
    for path in (file, tmp_path / "b.pt"):
        other = Wrapped()
        assert sp.Trainer(other, strategy="one_device").load_weights(path) == ([], [])
        assert torch.equal(other.module.weight, net.module.weight)


def test_a_file_of_which_nothing_fits(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "a.pt")
    trainer = sp.Trainer(Wrapped(), strategy="one_device")
    with pytest.raises(UserError, match="no tensor of this model"):
        trainer.load_weights(tmp_path / "a.pt", strict=False)


def test_files_that_differ_in_values_alone(replicas: Replicas, tmp_path: Path) -> None:
    with pytest.raises(ReplicaError, match="read different files"):
        replicas(weight_jobs.load_own, 2, "mirrored", tmp_path)


class Narrow(nn.Module):
    """A class that wants an argument, and has more than tensors in its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2), nn.BatchNorm1d(2), nn.Dropout())
        self.note = "none"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def narrow(note: str) -> Narrow:
    torch.manual_seed(8)
    net = Narrow(3).double()
    net.note = note
    return net


def test_a_model_again(tmp_path: Path) -> None:
    net = narrow("first")
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    trainer = sp.Trainer(
        net.inner, optimizer=torch.optim.Adam(net.parameters(), 0.1), loss=nn.MSELoss()
    )
    trainer.fit((x, y), epochs=2, verbose=0)
    sp.Trainer(net).save(tmp_path / "checkpoint")
    compiled = {f"_orig_mod.{key}": value for key, value in net.inner.state_dict().items()}
    torch.save({"state_dict": compiled}, tmp_path / "other.pt")
    net.eval()
    given = Narrow(3).double()
    assert sp.load_model(tmp_path / "checkpoint", given) is given
    assert given.note == "first"
    assert torch.equal(given.inner(x), net.inner(x))
    inner = sp.load_model(tmp_path / "other.pt", lambda: Narrow(3).inner)  # of another dtype
    for mine, theirs in zip(inner.parameters(), net.inner.parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs.float())


def test_training_goes_on_from_a_model_again(tmp_path: Path) -> None:
    def trainer(net: nn.Module) -> sp.Trainer:
        return sp.Trainer(net, optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.MSELoss())

    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    first = trainer(narrow("").inner[:2])
    first.fit((x, y), verbose=0)
    file = first.save_weights(tmp_path / "w.pt")
    losses = [
        trainer(net).fit((x, y), epochs=2, verbose=0).history["loss"]
        for net in (first.model, sp.load_model(file, narrow("").inner[:2]))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ((), r"no code to build a model.*\n.*, Net\(64\)\)"),
        (("Narrow",), "no code to build a model"),
        ((Narrow,), r"missing a required argument: 'width'\n.*Narrow\(\.\.\.\)\)"),
        ((lambda: 3,), "got int"),
        ((3,), "got int"),
        ((Narrow(4),), r"inner.0.weight is \(2, 3\) there and \(2, 4\) here"),
        ((nn.Linear(2, 2),), "no tensor of this model"),
        ((nn.ModuleDict({"inner": nn.Sequential(nn.Linear(3, 2))}),), "is not in the model"),
    ],
)
def test_what_is_no_model_for_a_file(model: Any, message: str, tmp_path: Path) -> None:
    file = sp.Trainer(Narrow(3).inner, strategy="one_device").save_weights(tmp_path / "w.pt")
    torch.save({f"inner.{key}": value for key, value in torch.load(file).items()}, file)
    with pytest.raises(UserError, match=message):
        sp.load_model(file, *model)


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    file = sp.Trainer(nn.Linear(2, 2), strategy="one_device").save_weights(tmp_path / "w.pt")
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(UserError, match="on the meta device"):
        sp.load_model(file, net)


def test_a_damaged_checkpoint_is_no_model(tmp_path: Path) -> None:
    trainer = sp.Trainer(nn.Linear(2, 2), strategy="one_device")
    trainer.save(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors has changed"):
        sp.load_model(tmp_path / "saved", nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"model.safetensors has changed"):
        trainer.load_weights(tmp_path / "saved")


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"weight": Harmful(tmp_path / "ran")}, tmp_path / "w.pt")
    with pytest.raises(UserError, match="no torch file of plain tensors"):
        sp.load_model(tmp_path / "w.pt", nn.Linear(2, 2))
    assert not (tmp_path / "ran").exists()


def save_and_die(file: Path, point: str) -> None:
    os.environ[ENV] = f"{point}:kill"
    torch.set_num_threads(1)
    sp.Trainer(nn.Linear(2, 2), strategy="one_device").save_weights(file)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("point", ["storage.stream.begun", "storage.file.before_rename"])
def test_what_a_killed_one_left_goes_with_the_next(point: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    own = tmp_path / f".spartito-new-{name}"  # a name that we never give
    other = tmp_path / f".spartito-new-{'0' * 16}-other.pt"  # another file's
    for each in (own, other):
        each.write_text("mine")
    process = context.Process(target=save_and_die, args=(file, point), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) > 2
    trainer = sp.Trainer(nn.Linear(2, 2), strategy="one_device")
    with folder_beside(file) as living:
        trainer.save_weights(file)
        assert {*tmp_path.iterdir()} == {file, own, other, living}
    assert {*tmp_path.iterdir()} == {file, own, other}
    assert trainer.load_weights(file) == ([], [])
