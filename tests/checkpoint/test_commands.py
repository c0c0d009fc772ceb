"""``spartito checkpoint``: what is in one, whether it is whole, other forms, averages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import spartito as sp
from spartito.checkpoint.cuts import Box
from spartito.checkpoint.manager import read_checkpoint, write_checkpoint, write_trees
from spartito.cli import main
from spartito.storage.atomic import write_directory
from tests.checkpoint.parts import Part, write_parts

State = dict[str, Tensor]


def model(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, generator=generator)
    return {
        "weight": weight,
        "tied": weight,
        "half": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
    }


def sharded(path: Path, state: State) -> Path:
    """A checkpoint in two files, which has a part of the weight in each."""
    with write_directory(path, {"strategy": "cut"}) as new:
        for number in range(2):
            box = Box((2 * number, 0), (2, 3))
            parts = [
                Part.of("weight", state["weight"][box.within(Box.all_of((4, 3)))], (4, 3), box)
            ]
            if number:
                whole = {"half": state["half"], "count": state["count"]}
                parts += [
                    Part.of(name, value, value.shape, Box.all_of(value.shape))
                    for name, value in whole.items()
                ]
            write_parts(new, "model", (number, 2), parts, {} if number else {"tied": "weight"})
        leaves = {name: {"$tensor": name} for name in state}
        write_trees(new, {"model": leaves, "trainer": {"step": 7, "epoch": 2}})
    return path


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, " ".join(said.err.split())


def equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name].dtype == value.dtype
        assert torch.equal(one[name], value), name


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sharded(tmp_path / "a", model(1))
    code, out, _ = run(capsys, "show", tmp_path)  # the newest of a folder
    assert code == 0
    for text in ("step: 7", "epoch: 2", "strategy: cut", "4x3", "bfloat16", "2 files", "is weight"):
        assert text in out
    assert "model: 4 tensors, 66 B in model-00001-of-00002.safetensors" in out
    found = json.loads(run(capsys, "show", tmp_path / "a", "--json")[1])
    assert found["sections"]["model"]["weight"]["shape"] == [4, 3]


def test_verify_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sharded(tmp_path / "a", model(1))
    sharded(tmp_path / "b", model(2))
    assert run(capsys, "verify", tmp_path)[0] == 0
    file = tmp_path / "b" / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, out, err = run(capsys, "verify", tmp_path)
    assert code == 2
    assert str(file) in err
    assert "has changed" in err
    assert f"{tmp_path / 'a'}: whole" in out
    for words in (["convert"], ["average", tmp_path / "a"]):  # nothing is made of wrong numbers
        code, _, err = run(capsys, *words, tmp_path / "b", tmp_path / "c.safetensors")
        assert code == 2
        assert "has changed" in err
        assert not (tmp_path / "c.safetensors").exists()
    file.unlink()
    assert f"{file} is missing" in run(capsys, "show", tmp_path / "b")[2]


def test_models_with_other_tied_tensors_are_not_averaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sharded(tmp_path / "a", model(1))
    other = {**model(2), "tied": torch.zeros(4, 3)}
    write_checkpoint(tmp_path / "b", {"model": other})
    code, _, err = run(capsys, "average", tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert code == 2
    assert "do not have the same tied tensors" in err


def test_tensors_that_are_one_here_and_were_not_there_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    trainer = sp.Trainer(net, loss=nn.MSELoss(), strategy=sp.strategy("one_device"))
    same = torch.ones(2, 2)
    trainer.strategy.load({"model": {"0.weight": same, "1.weight": same.clone()}})
    assert torch.equal(net.state_dict()["0.weight"], same)
    with pytest.raises(sp.UserError, match=r"0\.weight and 1\.weight are one tensor here"):
        trainer.strategy.load({"model": {"0.weight": same, "1.weight": 2 * same}})
    assert torch.equal(net.state_dict()["0.weight"], same)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ""])
def test_convert_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    source, out, back = sharded(tmp_path / "a", model(3)), tmp_path / f"b{suffix}", tmp_path / "c"
    code, said, _ = run(capsys, "convert", source, out)
    assert code == 0
    assert str(out) in said
    if suffix == ".safetensors":
        equal(load_file(out), {n: v for n, v in model(3).items() if n != "tied"})
    if suffix == ".pt":
        equal(torch.load(out, weights_only=True), model(3))
        assert out.stat().st_size < 3000  # no more than its tensors
    assert run(capsys, "convert", out, back)[0] == 0
    assert run(capsys, "verify", back)[0] == 0
    equal(read_checkpoint(back)["model"], model(3))


def test_what_another_program_saved_goes_into_a_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    plain, net = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"epoch": 3, "state_dict": plain.state_dict()}, tmp_path / "lightning.ckpt")
    assert run(capsys, "convert", tmp_path / "lightning.ckpt", tmp_path / "c")[0] == 0
    trainer = sp.Trainer(net, strategy=sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone()))
    trainer.load(tmp_path / "c")
    equal(dict(net.state_dict()), dict(plain.state_dict()))
    trainer.strategy.close()


def test_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp64, integers from the last; of any forms."""
    states = [model(seed) for seed in (1, 2, 5)]
    sharded(tmp_path / "a", states[0])
    write_checkpoint(tmp_path / "b", {"model": states[1]})
    torch.save(states[2], tmp_path / "c.pt")
    out = tmp_path / "mean.safetensors"
    assert run(capsys, "average", *(tmp_path / n for n in ("a", "b", "c.pt")), out)[0] == 0
    found = load_file(out)
    for name in ("weight", "half"):
        wide = torch.stack([state[name].double() for state in states]).mean(0)
        assert torch.allclose(
            found[name].double(), wide, rtol=0, atol=2**-8 if name == "half" else 1e-7
        )
        assert found[name].dtype == states[0][name].dtype
    assert found["count"] == 5
    save_file({**found, "weight": torch.zeros(4, 2)}, tmp_path / "other.safetensors")
    code, _, err = run(
        capsys, "average", tmp_path / "a", tmp_path / "other.safetensors", tmp_path / "d"
    )
    assert code == 2
    assert "weight is (4, 3) float32" in err
    assert "(4, 2)" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "none"], "none does not exist"),
        (["show", "empty"], "holds no checkpoint"),
        (["show", "text.txt"], "ends with .txt"),
        (["show", "text.safetensors"], "text.safetensors is not a safetensors file"),
        (["show", "code.pt"], "code.pt is no torch file of plain tensors"),
        (["show", "list.pt"], "holds a list"),
        (["verify", "list.pt"], "holds no checkpoint"),
        (["convert", "good.safetensors", "good.safetensors"], "exists"),
        (["convert", "good.safetensors", "new.onnx"], "ends with .onnx"),
        (["convert", "good.safetensors", "text.txt/x.pt"], "cannot be written"),
        (["average", "good.safetensors", "new.pt"], "the average of 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.txt").write_text("text")
    Path("text.safetensors").write_text("text")
    torch.save([torch.ones(1)], "list.pt")
    torch.save(nn.Linear(1, 1), "code.pt")
    save_file({"w": torch.ones(1)}, "good.safetensors")
    before = sorted(Path().rglob("*"))
    code, _, err = run(capsys, *words)
    assert code == 2
    assert said in err
    assert sorted(Path().rglob("*")) == before
