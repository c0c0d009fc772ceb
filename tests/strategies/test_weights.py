"""A model's weights alone are one file for torch, and come from the files of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import spartito as sp
from spartito.errors import UserError
from tests.replicas import ReplicaError, Replicas
from tests.strategies import weight_jobs
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
    assert [path.name for path in tmp_path.iterdir()] == ["of-01.safetensors"]
    net = weight_jobs.Tied().double()
    plain = load_file(tmp_path / "of-01.safetensors")
    net.load_state_dict(plain, strict=False)  # of tied names the file has one
    for file, weights in found[:1]:
        assert file == str(tmp_path / "of-01.safetensors")
        for key, value in net.state_dict().items():
            assert torch.equal(value, weights[key]), key


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
