from __future__ import annotations

from pathlib import Path

import pytest

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.resolver import check_alone, joined, remarks, resolve
from spartito.cluster.tpu import applies, from_tpu, slice_of
from spartito.errors import UserError
from spartito.system.tpus import Attached, attached
from spartito.wire.ports import free_port
from tests.cluster.orchestrated import TORCHRUN, indexed_job
from tests.cluster.tpu_hosts import ATTRIBUTES, TPU_ENV, bus, gke, metadata, multislice


def test_the_hosts_of_a_slice_are_a_task_each() -> None:
    assert resolve(gke(2)) == ClusterSpec(
        addresses={"worker": ("train-0.tpu:29500", "", "", "")},
        task=Task("worker", 2),
        rank=2,
        world_size=4,
        local_rank=0,
        local_size=1,
        rendezvous="train-0.tpu:29500",
        source="Cloud TPU",
    )
    found = joined(gke(2))
    assert found is not None
    assert (found.divisible, found.shares_machine) == (True, False)


def test_the_hosts_of_several_slices_are_numbered_slice_by_slice() -> None:
    specs = [resolve(multislice(number, host)) for number in range(2) for host in range(4)]
    assert [spec.rank for spec in specs] == list(range(8))
    assert {spec.world_size for spec in specs} == {8}
    assert {spec.rendezvous for spec in specs} == {"train-slice-0-0.train:29500"}


@pytest.mark.parametrize(
    ("coordinator", "meeting"),
    [
        ("10.0.0.7:8080", "10.0.0.7:29500"),
        ("fd00::7", "[fd00::7]:29500"),
        ("[fd00::7]:8080", "[fd00::7]:29500"),
        ("train.ml.svc:8080", "train.ml.svc:29500"),
    ],
)
def test_the_coordinator_may_have_a_port_of_its_own(coordinator: str, meeting: str) -> None:
    env = multislice(1, 0) | {"MEGASCALE_COORDINATOR_ADDRESS": coordinator}
    assert resolve(env).rendezvous == meeting


def test_allowed_ports_begin_with_the_meeting() -> None:
    assert resolve(gke(0) | {"SPARTITO_PORTS": "7000-7003"}).rendezvous == "train-0.tpu:7000"


def test_containers_of_one_pod_are_on_one_host() -> None:
    env = gke(3) | {"TPU_WORKER_HOSTNAMES": "a.tpu,a.tpu,b.tpu,b.tpu"}
    spec = resolve(env)
    assert (spec.rank, spec.world_size, spec.local_rank, spec.local_size) == (3, 4, 1, 2)


@pytest.mark.parametrize(
    "env",
    [
        {},
        gke(0, hosts=1),
        gke(0, hosts=1) | {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_ID": "0"},
        gke(0, hosts=1) | {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
    ],
)
def test_one_host_is_alone(env: dict[str, str]) -> None:
    assert not applies(env)
    assert from_tpu(env) is None
    assert resolve(env) == ClusterSpec.alone()
    assert joined(env) is None


def test_what_a_launcher_has_divided_speaks_for_itself() -> None:
    env = gke(2) | TORCHRUN
    assert from_tpu(env) is None
    spec = resolve(env)
    assert spec.source == "torchrun's variables"
    assert remarks(spec, env) == ()


def test_whoever_says_something_of_a_job_comes_first() -> None:
    env = gke(0) | indexed_job(1)
    assert resolve(env).source == "Kubernetes' indexed Job"
    assert "passed over: Cloud TPU" in remarks(resolve(env), env)[0]


def test_every_shell_of_a_host_may_start_a_job_elsewhere() -> None:
    check_alone(gke(0), "--hosts")
    with pytest.raises(UserError, match="--hosts"):
        check_alone(indexed_job(0), "--hosts")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (gke(4), ["TPU_WORKER_ID=4", "names 4 hosts", "train-0.tpu"]),
        (gke(1, hosts=1) | {"MEGASCALE_NUM_SLICES": "2"}, ["TPU_WORKER_ID=1", "names 1 hosts"]),
        (gke(0) | {"TPU_WORKER_ID": ""}, ["TPU_WORKER_ID is not set"]),
        (gke(0) | {"TPU_WORKER_ID": "x"}, ["TPU_WORKER_ID='x'"]),
        ({"TPU_WORKER_ID": "3"}, ["TPU_WORKER_ID=3", "TPU_WORKER_HOSTNAMES is not set"]),
        (gke(1) | {"TPU_WORKER_HOSTNAMES": "localhost,b"}, ["localhost among 2 hosts"]),
        (multislice(2, 0), ["MEGASCALE_SLICE_ID=2", "MEGASCALE_NUM_SLICES=2"]),
        (
            multislice(1, 0) | {"MEGASCALE_COORDINATOR_ADDRESS": ""},
            ["MEGASCALE_NUM_SLICES=2", "MEGASCALE_COORDINATOR_ADDRESS is not set"],
        ),
        (multislice(0, 0) | {"MEGASCALE_SLICE_ID": ""}, ["MEGASCALE_SLICE_ID is not set"]),
    ],
)
def test_what_does_not_fit_together_is_named(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        resolve(env)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_machine_without_a_tpu_asks_nobody(tmp_path: Path) -> None:
    pci, vfio = bus(tmp_path, chips=0)
    nobody = {"GCE_METADATA_HOST": f"127.0.0.1:{free_port()}"}
    assert from_tpu(nobody, pci, vfio) is None
    assert from_tpu(nobody, tmp_path / "none", vfio) is None
    assert slice_of(nobody, pci, vfio) is None


def test_variables_that_say_all_leave_the_server_alone(tmp_path: Path) -> None:
    pci, vfio = bus(tmp_path)
    nobody = {"GCE_METADATA_HOST": f"127.0.0.1:{free_port()}"}
    spec = from_tpu(gke(1) | nobody, pci, vfio)
    assert spec is not None
    assert spec.rank == 1
    assert from_tpu({"TPU_SKIP_MDS_QUERY": "1"} | nobody, pci, vfio) is None
    assert from_tpu({"TPU_WORKER_HOSTNAMES": "localhost"} | nobody, pci, vfio) is None


def test_on_a_tpu_vm_the_metadata_server_says_who_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci, vfio = bus(tmp_path)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with metadata() as env:
        spec = from_tpu(env, pci, vfio)
        assert spec is not None
        assert (spec.rank, spec.world_size, spec.rendezvous) == (2, 4, "10.164.0.5:29500")
        here = slice_of(env, pci, vfio)
        assert here is not None
        assert here.topology == "4x4"
        assert here.hosts == ("10.164.0.5", "10.164.0.3", "10.164.0.9", "10.164.0.4")
        with pytest.raises(UserError, match=r"TPU_WORKER_ID=1, but the metadata server says 2"):
            from_tpu(env | {"TPU_WORKER_ID": "1"}, pci, vfio)


def test_slices_of_a_queued_resource_are_in_what_the_server_knows(tmp_path: Path) -> None:
    pci, vfio = bus(tmp_path)
    more = "MEGASCALE_COORDINATOR_ADDRESS: '10.164.0.33:8080'\nMEGASCALE_NUM_SLICES: '2'\n"
    told = ATTRIBUTES | {"tpu-env": TPU_ENV + more + "MEGASCALE_SLICE_ID: '1'\n"}
    with metadata(told) as env:
        spec = from_tpu(env, pci, vfio)
    assert spec is not None
    assert (spec.rank, spec.world_size, spec.rendezvous) == (6, 8, "10.164.0.33:29500")


def test_a_machine_that_the_server_knows_no_slice_of_is_alone(tmp_path: Path) -> None:
    pci, vfio = bus(tmp_path)
    for known in ("agent-worker-number", "worker-network-endpoints"):
        with metadata({known: ATTRIBUTES[known]}) as env:
            assert from_tpu(env, pci, vfio) is None
    with metadata({}) as env:
        assert from_tpu(env, pci, vfio) is None
    one = ATTRIBUTES | {
        "agent-worker-number": "0",
        "worker-network-endpoints": "unknown:unknown:10.164.0.5",
    }
    with metadata(one) as env:
        assert from_tpu(env, pci, vfio) is None


def test_a_server_that_says_nothing_is_told(tmp_path: Path) -> None:
    pci, vfio = bus(tmp_path)
    nobody = {"GCE_METADATA_HOST": f"127.0.0.1:{free_port()}"}
    with pytest.raises(
        UserError, match=r"(?s)127\.0\.0\.1:\d+ does not reply.*TPU_SKIP_MDS_QUERY=1"
    ):
        from_tpu(nobody, pci, vfio)
    with metadata({}, status=503) as env, pytest.raises(UserError, match="says 503"):
        from_tpu(env, pci, vfio)
    with (
        metadata(ATTRIBUTES | {"worker-network-endpoints": "unknown:unknown:"}) as env,
        pytest.raises(UserError, match="which has no address"),
    ):
        from_tpu(env, pci, vfio)


@pytest.mark.parametrize(
    ("chips", "device", "opened", "found"),
    [
        (4, "0x0063", None, Attached("v5e", 4)),
        (4, "0x0062", 2, Attached("v5p", 2)),
        (8, "0x0076", None, Attached("tpu7x", 8)),
        (4, "0x006f", 0, None),
        (1, "0x1234", None, None),
        (0, "0x0063", None, None),
    ],
)
def test_chips_are_those_on_the_bus_that_may_be_opened(
    tmp_path: Path, chips: int, device: str, opened: int | None, found: Attached | None
) -> None:
    pci, vfio = bus(tmp_path, chips, device, opened)
    assert attached(pci, vfio) == found


def test_without_a_bus_there_is_no_tpu(tmp_path: Path) -> None:
    assert attached(tmp_path / "none", tmp_path) is None
