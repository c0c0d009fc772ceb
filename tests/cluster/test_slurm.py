from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.slurm import from_slurm, remark
from spartito.errors import UserError
from spartito.wire.addresses import split_address
from tests.cluster.environments import (
    ALLOCATION,
    MPI_ON_SECOND_NODE,
    SALLOC,
    SALLOC_ON_NODE,
    SBATCH_SHELL,
    SRUN_SHELL,
    cyclic,
    het,
    one_node,
    open_mpi,
    srun,
    srun_alone,
    srun_in_salloc,
    uneven,
)


def read(env: Mapping[str, str]) -> ClusterSpec:
    spec = from_slurm(env)
    assert spec is not None
    return spec


def test_two_nodes_of_two_tasks() -> None:
    port = 12_000 + 4711 % 312 * 64
    assert read(srun(3)) == ClusterSpec(
        addresses={
            "worker": (
                f"node1:{port}",
                f"node1:{port + 1}",
                f"node2:{port}",
                f"node2:{port + 1}",
            )
        },
        task=Task("worker", 3),
        rank=3,
        world_size=4,
        local_rank=1,
        local_size=2,
        rendezvous=f"node1:{port}",
        source="Slurm",
    )


def test_one_node_meets_at_its_loopback() -> None:
    spec = read(one_node(1))
    assert (spec.rank, spec.world_size, spec.local_rank, spec.local_size) == (1, 2, 1, 2)
    assert spec.rendezvous is not None
    assert split_address(spec.rendezvous)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "env",
    [SBATCH_SHELL, SALLOC, SALLOC_ON_NODE, SRUN_SHELL],
    ids=["sbatch", "salloc", "salloc on the node", "srun --pty bash"],
)
def test_a_shell_in_an_allocation_is_alone_and_is_told_so(env: dict[str, str]) -> None:
    assert from_slurm(env) is None
    said = remark(env)
    assert said is not None
    assert "4 tasks" in said
    assert "srun" in said


@pytest.mark.parametrize("started", [srun_alone, srun_in_salloc])
def test_srun_by_hand_is_a_job_wherever_it_is_typed(
    started: Callable[[int], dict[str, str]],
) -> None:
    assert [read(started(rank)) for rank in range(4)] == [read(srun(rank)) for rank in range(4)]
    assert remark(started(0)) is None


def test_srun_inside_of_a_shell_of_srun_is_a_job() -> None:
    assert read({**SRUN_SHELL, **srun(1, SLURM_STEP_ID="1", SLURM_JOB_NAME="bash")}).rank == 1


def test_srun_pty_of_the_script_itself_is_a_job() -> None:
    assert read({**SRUN_SHELL, "SLURM_JOB_NAME": "python"}).world_size == 4


def test_who_has_no_others_is_alone_and_needs_no_remark() -> None:
    for env in ({}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, srun(0, SLURM_STEP_NUM_TASKS="1")):
        assert from_slurm(env) is None
    assert remark({}) is None
    assert remark({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}) is None
    assert remark(srun(0)) is None


def test_mpirun_in_a_job_speaks_for_itself() -> None:
    # On a further node mpirun's daemon, and so its children, stand in a step of their own.
    assert from_slurm(srun(0) | open_mpi(2)) is None
    assert from_slurm(MPI_ON_SECOND_NODE) is None
    assert remark(SBATCH_SHELL | open_mpi(2)) is None
    assert remark(MPI_ON_SECOND_NODE) is None


def hosts(spec: ClusterSpec) -> list[str]:
    return [split_address(address)[0] for address in spec.addresses["worker"]]


def test_uneven_nodes_are_filled_in_turn() -> None:
    for rank, local in enumerate(((0, 2), (1, 2), (0, 1))):
        spec = read(uneven(rank))
        assert hosts(spec) == ["node1", "node1", "node2"]
        assert (spec.rank, spec.local_rank, spec.local_size) == (rank, *local)


def test_many_nodes_have_one_port_for_each_of_their_tasks() -> None:
    many = {
        "SLURM_STEP_NODELIST": "a[1-2],b",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_TASKS_PER_NODE": "1,3,2",
        "MASTER_PORT": "20000",
    }
    spec = read(srun(3) | many | {"SLURM_NODEID": "1", "SLURM_LOCALID": "2"})
    assert spec.addresses["worker"] == (
        "a1:20000",
        "a2:20000",
        "a2:20001",
        "a2:20002",
        "b:20000",
        "b:20001",
    )
    assert (spec.rank, spec.local_rank, spec.local_size) == (3, 2, 3)


def test_cyclic_tasks_alternate() -> None:
    spec = read(cyclic(2))
    assert hosts(spec) == ["node1", "node2", "node1", "node2"]
    assert (spec.local_rank, spec.local_size) == (1, 2)


def test_components_of_a_heterogeneous_job_come_in_their_order() -> None:
    told = {"SPARTITO_PS": "3", "MASTER_PORT": "20000"}
    specs = [read(het(rank) | told) for rank in range(4)]
    assert len({str(spec.addresses) for spec in specs}) == 1
    assert specs[0].addresses == {
        "worker": ("node2:20000",),
        "ps": ("node1:20000", "node1:20001", "node1:20002"),
    }
    assert [str(spec.task) for spec in specs] == ["worker 0", "ps 0", "ps 1", "ps 2"]
    assert {spec.rendezvous for spec in specs} == {"node2:20000"}


def test_a_step_of_one_component_is_as_any_other() -> None:
    step = {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": "3"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}
    specs = [read(het(rank + 1) | step | {"SLURM_PROCID": str(rank)}) for rank in range(3)]
    assert [spec.rank for spec in specs] == [0, 1, 2]
    assert {split_address(spec.rendezvous or "")[0] for spec in specs} == {"127.0.0.1"}


def test_components_that_are_not_in_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="--distribution=block"):
        read(het(1) | {"SLURM_LOCALID": "2"})


def test_runs_of_an_array_have_ports_of_their_own_in_a_range() -> None:
    ports = {
        split_address(address)[1]
        for run in (3, 4, 5)
        for address in read(
            one_node(0)
            | {
                "SPARTITO_PORTS": "29500-29507",
                "SLURM_ARRAY_TASK_ID": str(run),
                "SLURM_ARRAY_TASK_MIN": "3",
            }
        ).addresses["worker"]
    }
    assert ports == set(range(29_500, 29_506))


def test_without_the_steps_own_variables_the_jobs_are_read() -> None:
    env = {name: value for name, value in srun(3).items() if "STEP_N" not in name}
    env.pop("SLURM_STEP_TASKS_PER_NODE")
    assert read(env) == read(srun(3))
    env.pop("SLURM_TASKS_PER_NODE")
    assert read(env) == read(srun(3))


def test_the_last_tasks_are_the_servers() -> None:
    specs = [read(srun(rank, SPARTITO_PS="1", MASTER_PORT="20000")) for rank in range(4)]
    assert [str(spec.task) for spec in specs] == ["worker 0", "worker 1", "worker 2", "ps 0"]
    assert [spec.rank for spec in specs] == [0, 1, 2, -1]
    assert {spec.world_size for spec in specs} == {3}
    assert specs[3].addresses["ps"] == ("node2:20001",)
    assert {spec.rendezvous for spec in specs} == {"node1:20000"}


def test_an_evaluator_comes_after_the_servers() -> None:
    told = {"SPARTITO_PS": "1", "SPARTITO_EVALUATOR": "1", "MASTER_PORT": "20000"}
    specs = [read(srun(rank) | told) for rank in range(4)]
    assert [str(spec.task) for spec in specs] == ["worker 0", "worker 1", "ps 0", "evaluator 0"]
    assert [spec.rank for spec in specs] == [0, 1, -1, -1]
    assert all(spec.has_evaluator for spec in specs)
    assert specs[0].addresses["evaluator"] == ("node2:20001",)


def test_an_address_to_meet_can_be_given() -> None:
    spec = read(srun(1, MASTER_ADDR="10.0.0.1", MASTER_PORT="20000"))
    assert spec.rendezvous == "10.0.0.1:20000"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_NODELIST": "node[01-"}, ["SLURM_STEP_NODELIST", "'node[01-'"]),
        ({"SLURM_STEP_NODELIST": "node1"}, ["1 nodes (node1)", "2,2 tasks"]),
        ({"SLURM_STEP_NUM_TASKS": "5"}, ["of 5"]),
        ({"SLURM_STEP_NUM_TASKS": "many"}, ["'many'"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, ["'2(y2)'"]),
        ({"SLURM_PROCID": "4"}, ["task 4 of 4"]),
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_LOCALID": "1"}, ["cyclic"]),
        ({"SLURM_DISTRIBUTION": "plane=2"}, ["plane=2", "block"]),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ["arbitrary", "block"]),
        ({"SPARTITO_PS": "4"}, ["SPARTITO_PS=4", "no worker"]),
        ({"SPARTITO_PS": "one"}, ["'one'"]),
        ({"SPARTITO_PS": "3", "SPARTITO_EVALUATOR": "1"}, ["SPARTITO_PS=3", "no worker"]),
        ({"SPARTITO_EVALUATOR": "2"}, ["SPARTITO_EVALUATOR=2", "at most one"]),
        ({"MASTER_PORT": "65535"}, ["65536"]),
        ({"MASTER_ADDR": "localhost"}, ["localhost", "2 nodes"]),
        ({"SLURM_STEP_NODELIST": "node1,node1"}, ["one address"]),
    ],
)
def test_what_does_not_fit_together_is_named(changes: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        from_slurm(srun(2) | changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_step_that_does_not_say_where_is_an_error() -> None:
    env = {name: value for name, value in srun(0).items() if not name.endswith("NODELIST")}
    with pytest.raises(UserError, match="no SLURM_STEP_NODELIST"):
        from_slurm(env)


@given(st.integers(1, 2**31), st.integers(0, 1000))
def test_ports_are_stable_and_out_of_the_way(job: int, step: int) -> None:
    numbers = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
    specs = [read(srun(rank) | numbers) for rank in range(4)]
    assert len({spec.addresses["worker"] for spec in specs}) == 1
    ports = [split_address(address)[1] for address in specs[0].addresses["worker"]]
    assert all(1024 < port < 32_768 for port in ports)
    for beside in ({"SLURM_JOB_ID": str(job + 1)}, {"SLURM_STEP_ID": str(step + 1)}):
        other = read(srun(0) | numbers | beside).addresses["worker"]
        assert not set(ports) & {split_address(address)[1] for address in other}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans(), st.data())
def test_all_tasks_read_one_cluster(counts: list[int], cyclic: bool, data: st.DataObject) -> None:
    tasks = sum(counts)
    servers = data.draw(st.integers(0, tasks - 1))
    slots = [(node, local) for node, n in enumerate(counts) for local in range(n)]
    if cyclic:
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    specs = [
        from_slurm(
            ALLOCATION
            | {
                "SLURM_DISTRIBUTION": "cyclic" if cyclic else "block",
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
                "SLURM_PROCID": str(rank),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
                "SLURM_STEP_NUM_TASKS": str(tasks),
                "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
                "SPARTITO_PS": str(servers),
            }
        )
        for rank, (node, local) in enumerate(slots)
    ]
    if tasks == 1:
        assert specs == [None]
        return
    found = [spec for spec in specs if spec is not None]
    assert len(found) == tasks
    assert len({str(spec.addresses) for spec in found}) == 1
    assert len({spec.rendezvous for spec in found}) == 1
    workers = tasks - servers
    assert [spec.rank for spec in found] == [*range(workers), *[-1] * servers]
    everyone = [a for addresses in found[0].addresses.values() for a in addresses]
    assert len(set(everyone)) == tasks
