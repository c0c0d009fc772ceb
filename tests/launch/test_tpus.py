"""What the processes of a job hear of the TPU of their machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spartito.cluster.tpu import Slice, slice_of
from spartito.errors import UserError
from spartito.launch.processes import local
from spartito.launch.processes.local import Local
from spartito.launch.processes.tpus import of_tpu, slice_layout, tpu_variables
from spartito.system.tpus import Attached, attached
from tests.cluster.tpu_hosts import bus, gke, metadata, multislice
from tests.launch.jobs import start

HEARD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "TORCH_TPU_DEVICES_PER_HOST",
    "TORCH_TPU_SLICEBUILDER_ADDRESSES",
    "TORCH_TPU_TOPOLOGY",
    "TORCH_TPU_XPROF_SESSION_ID",
)
SCRIPT = f"""
import json, os, pathlib, sys
told = {{name: os.environ.get(name) for name in {HEARD}}}
pathlib.Path(sys.argv[1], told["RANK"]).write_text(json.dumps(told))
"""


def sliced(env: dict[str, str]) -> Slice:
    here = slice_of(env)
    assert here is not None
    return here


def ran(folder: Path, **options: Any) -> list[dict[str, str]]:
    """What each process of a job that starts here heard, by rank."""
    script, out = folder / "show.py", folder / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    assert start(Local, [str(script), str(out)], **options) == 0
    told = [json.loads(one.read_text()) for one in out.iterdir()]
    return sorted(told, key=lambda one: int(one["RANK"]))


def on_a_tpu(folder: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    """A machine with four chips and these variables."""
    pci, vfio = bus(folder)
    monkeypatch.setattr(local, "attached", lambda: attached(pci, vfio))
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def test_every_process_of_a_slice_hears_the_same() -> None:
    told = tpu_variables(["a:8070", "a:8071", "b:8070", "b:8071"], "2,2,1", 2)
    assert told == {
        "TORCH_TPU_DEVICES_PER_HOST": "2",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": "a:8070,a:8071,b:8070,b:8071",
        "TORCH_TPU_TOPOLOGY": "2,2,1",
        "TORCH_TPU_XPROF_SESSION_ID": told["TORCH_TPU_XPROF_SESSION_ID"],
    }
    assert int(told["TORCH_TPU_XPROF_SESSION_ID"]) > 0


@pytest.mark.parametrize(
    ("topology", "generation", "ranks", "layout"),
    [
        ("4x4", "v5e", 16, "4,4,1"),
        ("2x4", "v6e", 8, "2,4,1"),
        ("2x2x4", "v5p", 16, "2,2,4"),
        ("2X2X2", "v4", 8, "2,2,2"),
        ("2x2x2", "tpu7x", 16, "2,2,2,2"),
        ("2x2x2", "tpu7x", 8, None),
        ("4x4", "v5e", 4, None),
    ],
)
def test_the_box_of_a_slice_is_its_topology(
    topology: str, generation: str, ranks: int, layout: str | None
) -> None:
    assert slice_layout(topology, generation, ranks) == layout


def test_a_topology_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match="TPU_TOPOLOGY='4,4' is no topology"):
        slice_layout("4,4", "v5e", 16)


def test_hosts_of_a_slice_agree_without_a_word() -> None:
    here = [of_tpu(gke(host), Attached("v5e", 4), sliced(gke(host)), 4, 4) for host in range(4)]
    assert all(one == here[0] for one in here)
    told, odd = here[0]
    assert odd == ""
    listed = told["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert listed[:5] == [
        *(f"train-0.tpu:{port}" for port in range(8070, 8074)),
        "train-1.tpu:8070",
    ]
    assert len(listed) == 16
    assert told["TORCH_TPU_TOPOLOGY"] == "4,4,1"


def test_each_slice_has_addresses_of_its_own() -> None:
    env = multislice(1, 2) | {"TORCH_TPU_BASE_PORT": "9000"}
    told, _ = of_tpu(env, Attached("v5e", 4), sliced(env), 8, 4)
    listed = told["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert len(listed) == 16
    assert listed[0] == "train-slice-1-0.train:9000"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_host_that_is_not_joined_with_its_slice_is_one_of_its_own(nodes: int) -> None:
    for here in (None, sliced(gke(0)), sliced(gke(0, hosts=1))):
        told, odd = of_tpu({}, Attached("v5e", 4), here, nodes, 4)
        assert odd == ""
        assert told["TORCH_TPU_TOPOLOGY"] == "2,2,1"
        hosts = {one.split(":")[0] for one in told["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")}
        assert hosts == {"localhost"}


def test_processes_that_do_not_fill_a_tpu_are_told_nothing() -> None:
    for here, nodes, workers in ((None, 1, 3), (sliced(gke(0)), 4, 2)):
        told, odd = of_tpu({}, Attached("v5e", 4), here, nodes, workers)
        assert told == {}
        assert odd.startswith(f"{workers} workers on a machine with 4 devices of a v5e TPU")
    env = gke(0) | {"TPU_TOPOLOGY": ""}
    told, odd = of_tpu(env, Attached("v5e", 4), sliced(env), 4, 4)
    assert (told, "TPU_TOPOLOGY=4x4 would" in odd) == ({}, True)


def test_what_the_user_set_stays() -> None:
    env = {"TORCH_TPU_TOPOLOGY": "2,2,1"}
    assert of_tpu(env, Attached("v5e", 4), None, 1, 4) == ({}, "")


def test_a_job_has_a_process_for_each_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_tpu(tmp_path, monkeypatch, {"TPU_WORKER_HOSTNAMES": "localhost"})
    told = ran(tmp_path)
    assert [one["LOCAL_RANK"] for one in told] == ["0", "1", "2", "3"]
    for one in told:
        assert one["TORCH_TPU_TOPOLOGY"] == "2,2,1"
        assert one["TORCH_TPU_DEVICES_PER_HOST"] == "4"
        own = told[0]["TORCH_TPU_SLICEBUILDER_ADDRESSES"]
        assert one["TORCH_TPU_SLICEBUILDER_ADDRESSES"] == own
        assert len(set(own.split(","))) == 4


def test_a_host_of_a_slice_starts_its_part_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_tpu(tmp_path, monkeypatch, gke(2))
    told = ran(tmp_path, workers=4)
    assert [one["RANK"] for one in told] == ["8", "9", "10", "11"]
    for index, one in enumerate(told):
        assert (one["LOCAL_RANK"], one["WORLD_SIZE"]) == (str(index), "16")
        assert one["MASTER_ADDR"] == "train-0.tpu"
        assert one["TORCH_TPU_TOPOLOGY"] == "4,4,1"


def test_a_tpu_vm_asks_its_metadata_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pci, vfio = bus(tmp_path)
    with metadata() as env:
        here = slice_of(env, pci, vfio)
        told, odd = of_tpu(env, Attached("v5e", 4), here, 4, 4)
    assert odd == ""
    assert told["TORCH_TPU_SLICEBUILDER_ADDRESSES"].startswith("10.164.0.5:8070,10.164.0.5:8071")
    assert told["TORCH_TPU_TOPOLOGY"] == "4,4,1"


def test_fewer_workers_than_chips_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    on_a_tpu(tmp_path, monkeypatch, {"TPU_WORKER_HOSTNAMES": "localhost"})
    told = ran(tmp_path, workers=3)
    assert {one["TORCH_TPU_TOPOLOGY"] for one in told} == {None}
    assert "note: 3 workers on a machine with 4 devices of a v5e TPU" in capfd.readouterr().err
