"""From facts to verdicts, case by case; nothing is started."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from spartito.doctor.findings import (
    Facts,
    Findings,
    Memory,
    Name,
    Outcome,
    Port,
    Probe,
    Route,
    Space,
    Speed,
    Stuck,
    slow_pairs,
)
from spartito.doctor.report import closing, grids
from spartito.doctor.rules.judge import judge
from spartito.doctor.rules.lines import VERY_THIN, compress
from spartito.doctor.rules.verdict import Verdict, exit_code
from spartito.names import duration

GIB = 1 << 30
W0, W1, W2 = "worker 0", "worker 1", "worker 2"
ADDRESSES = {W0: "a:21000", W1: "b:21000", W2: "c:21000"}
HEALTHY = Facts(
    task=W0,
    host="a",
    machine="boot-a",
    network="net-a",
    cpus="cores-a",
    ipc="shm-a",
    source="TF_CONFIG",
    plan="by TF_CONFIG",
    remarks=[],
    cluster={"worker": list(ADDRESSES.values())},
    python="3.11.7",
    versions={"spartito": "0.1.0", "torch": "2.13.0"},
    cores=4,
    quota=None,
    omp_num_threads="4",
    memory=Memory(8 * GIB, 4 * GIB),
    shm=Space("/dev/shm", GIB, GIB),
    disks=[Space("/work", 90 * GIB, 50 * GIB)],
    gpus=[],
    port=Port(21000, True),
    names=[Name("a", ["10.0.0.1"])],
    routes=[Route("a", "eth0", "10.0.0.1")],
)


def facts(task: str, **changes: object) -> Facts:
    """Of a healthy task on a machine of its own."""
    host = ADDRESSES[task][0]
    own = {
        "task": task,
        "host": host,
        "machine": f"boot-{host}",
        "network": f"net-{host}",
        "cpus": f"cores-{host}",
        "ipc": f"shm-{host}",
    }
    return msgspec.structs.replace(HEALTHY, **(own | changes))


def probe(source: str, target: str, outcome: str = "ok", detail: str = "") -> Probe:
    return Probe(source, target, ADDRESSES[target], Outcome(outcome), detail)


def report(*there: Facts, **changes: object) -> Findings:
    """Of three healthy tasks on three machines, all of which reach each other; or of ``there``."""
    came = {each.task: each for each in there or map(facts, ADDRESSES)}
    pairs = list(permutations(came, 2))
    healthy = Findings(
        expected=list(ADDRESSES),
        addresses=ADDRESSES,
        coordinator=W0,
        facts=came,
        probes=[probe(*pair) for pair in pairs],
        speeds=[Speed(*pair, 2e-4, 1e9, 0.0) for pair in pairs],
        waited=10.0,
    )
    return msgspec.structs.replace(healthy, **changes)


def with_probes(*failed: Probe) -> Findings:
    lost = {(k.source, k.target) for k in failed}
    healthy = report()
    return msgspec.structs.replace(
        healthy,
        probes=[k for k in healthy.probes if (k.source, k.target) not in lost] + list(failed),
        speeds=[s for s in healthy.speeds if (s.source, s.target) not in lost],
    )


def without_speed(pair: tuple[str, str], **changes: object) -> Findings:
    return report(speeds=[one for one in report().speeds if one.pair != pair], **changes)


def the_verdict(given: Findings, kind: str) -> Verdict:
    (found,) = [verdict for verdict in judge(given) if verdict.kind == kind]
    return found


def test_a_healthy_cluster_has_no_verdict() -> None:
    assert judge(report()) == []
    assert exit_code([]) == 0
    assert closing(report(), []).startswith("3 of 3 tasks are here; all is well")


def alone(**changes: object) -> Findings:
    """Worker 2 did not come."""
    return report(facts(W0), facts(W1), **changes)


def one_other(task: str, **changes: object) -> Findings:
    """Three healthy tasks, but for the ``changes`` of one."""
    return report(*(facts(each, **(changes if each == task else {})) for each in ADDRESSES))


@pytest.mark.parametrize(
    ("given", "kind", "severity", "says", "code"),
    [
        (
            alone(probes=[probe(W0, W2, "refused"), probe(W1, W2, "refused")]),
            "missing",
            "missing",
            "worker 2 (c:21000) did not come within 10 s; worker 0 and worker 1 find at c:21000: "
            "refused",
            69,
        ),
        (
            alone(probes=[probe(W0, W2), probe(W1, W2)]),
            "missing",
            "missing",
            "it runs but does not reach worker 0|Open the port from worker 2 to worker 0 at a:2100",
            69,
        ),
        (
            alone(probes=[probe(W0, W2, "other secret")]),
            "secret",
            "error",
            "a task of Spartito at c:21000 has another secret than worker 0: it is worker 2, or",
            1,
        ),
        (
            report(unresponsive=[W1], probes=[probe(W0, W1, "silent")]),
            "unresponsive",
            "missing",
            "worker 1 came, then stopped responding",
            69,
        ),
        (
            one_other(W0, names=[Name("a", ["127.0.1.1"])]),
            "loopback",
            "warning",
            "worker 0 finds 127.0.1.1, a loopback address, for its own name a",
            0,
        ),
        (
            one_other(W0, names=[Name("b", error="Name or service not known")]),
            "name",
            "error",
            "the name b does not resolve on worker 0: Name",
            1,
        ),
        (
            one_other(W0, port=Port(21000, False, "nginx (process 7)")),
            "port",
            "error",
            "port 21000 of worker 0 on a is taken by nginx (process 7)",
            1,
        ),
        (
            one_other(W1, port=Port(21000, True, foreign=True)),
            "foreign address",
            "note",
            "no interface of worker 1 has the address b",
            0,
        ),
        (
            with_probes(probe(W1, W2, "dropped"), probe(W2, W1, "unroutable")),
            "unreachable",
            "error",
            "worker 1 finds at c:21000: no reply|worker 2 finds at b:21000: no route",
            1,
        ),
        (
            with_probes(probe(W1, W2, "dropped")),
            "one way",
            "error",
            "worker 2 reaches worker 1, but worker 1 does not reach worker 2|"
            "Open the port from the host of worker 1 to c:21000",
            1,
        ),
        (
            with_probes(probe(W0, W1, "other task", W2)),
            "one way",
            "error",
            "worker 2 is there",
            1,
        ),
        (
            with_probes(probe(W2, W1, "dropped")),
            "unused connection",
            "note",
            "worker 2 finds at b:21000",
            0,
        ),
        (
            without_speed((W1, W2), stuck=[Stuck(W1, W2, 2048)]),
            "large messages",
            "error",
            "from worker 1 to worker 2 small messages pass, those of 2 KiB do not: MTU?|"
            "the interface that worker 1 sends by",
            1,
        ),
        (
            without_speed((W2, W1), stuck=[Stuck(W2, W1, 65536)]),
            "large messages",
            "error",
            "from worker 2 to worker 1 small messages pass, those of 64 KiB do not",
            1,
        ),
        (
            without_speed((W2, W1)),
            "not measured",
            "warning",
            "1 connection that training uses was not measured",
            0,
        ),
        *(
            (
                one_other(W1, versions=HEALTHY.versions | {package: version}),
                "version",
                severity,
                f"of {package}: {HEALTHY.versions[package]} on worker 0 and worker 2|"
                f"{version} on worker 1",
                code,
            )
            for package, version, severity, code in (
                ("spartito", "0.0.1", "error", 1),
                ("torch", "0.0.1", "error", 1),
                ("torch", HEALTHY.versions["torch"] + "+cpu", "warning", 0),
            )
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(
    given: Findings, kind: str, severity: str, says: str, code: int
) -> None:
    verdict = the_verdict(given, kind)
    assert verdict.severity == severity
    for part in says.split("|"):
        assert part in f"{verdict.message}\n{verdict.advice}"
    assert exit_code(judge(given)) == code


def test_a_caller_with_another_secret_stands_for_the_missing_task_of_its_host() -> None:
    names = [Name("c", ["10.0.0.3"])]
    given = report(facts(W0, names=names), facts(W1), other_secrets=["10.0.0.3"], probes=[])
    assert "a task of Spartito at 10.0.0.3" in the_verdict(given, "secret").message
    assert exit_code(judge(given)) == 1
    assert exit_code(judge(msgspec.structs.replace(given, other_secrets=["10.0.0.9"]))) == 69


@pytest.mark.parametrize("networks", [("net-a", "net-b"), ("net-a", "net-a")])
def test_loopback_addresses_are_wrong_among_several_hosts_only(networks: tuple[str, str]) -> None:
    addresses = {W0: "localhost:21000", W1: "127.0.0.1:21001"}
    there = [
        facts(task, network=network) for task, network in zip(addresses, networks, strict=True)
    ]
    given = report(*there, expected=[W0, W1], addresses=addresses)
    several = networks[0] != networks[1]
    kinds = [verdict.kind for verdict in judge(given)]
    assert ("loopback" in kinds) == several
    assert exit_code(judge(given)) == int(several)


def test_loopback_addresses_are_told_when_a_task_does_not_come() -> None:
    addresses = {W0: "localhost:21000", W1: "localhost:21001"}
    given = report(facts(W0), expected=[W0, W1], addresses=addresses, probes=[])
    assert "only tasks on the same machine" in the_verdict(given, "loopback").message


def test_a_name_that_does_not_resolve_is_told_once_for_all_tasks() -> None:
    broken = [Name("b", error="Name or service not known")]
    given = report(facts(W0, names=broken), facts(W1), facts(W2, names=broken))
    verdict = the_verdict(given, "name")
    assert "the name b does not resolve on worker 0 and worker 2" in verdict.message
    assert verdict.severity == "error"


@pytest.mark.parametrize(
    ("port", "said"),
    [
        (Port(21000, True), "21000: free"),
        (Port(21000, False), "21000: taken"),
        (Port(21000, False, drawn=4321), "4321: 21000 is taken"),
        (Port(21000, False, agent=True), "21000: torchrun's"),
        (None, "-"),
    ],
)
def test_the_table_shows_who_came_and_its_port(port: Port | None, said: str) -> None:
    given = report(facts(W0, port=port), facts(W1), expected=[W0, W1, W2], probes=[])
    rows = grids(given)[0].rows
    assert [row[0] for row in rows] == [W0, W1, W2]
    assert [row[2] for row in rows] == ["is here", "is here", "did not come"]
    assert rows[0][4] == said
    assert rows[2][3:] == ["-"] * 4


def test_the_port_of_torchruns_agent_is_as_it_should_be() -> None:
    agent = facts(W0, port=Port(21000, False, "python (process 7)", agent=True))
    assert judge(report(agent, facts(W1), facts(W2))) == []


@pytest.mark.parametrize(("python", "told"), [("3.11.9", False), ("3.12.1", True)])
def test_pythons_that_differ_by_more_than_a_patch(python: str, told: bool) -> None:
    given = report(facts(W0), facts(W1, python=python), facts(W2))
    assert [verdict.kind for verdict in judge(given)] == ["version"] * told
    assert exit_code(judge(given)) == 0


@pytest.mark.parametrize(("ahead", "words"), [(3.0, "3 s ahead of"), (-200.0, "3.33 min behind")])
def test_a_clock_that_is_off(ahead: float, words: str) -> None:
    speeds = [Speed(W0, W1, 2e-4, 1e9, 0.9), Speed(W2, W0, 2e-4, 1e9, -ahead)]
    verdict = the_verdict(report(speeds=speeds), "clock")
    assert verdict.tasks == [W2]
    assert words in verdict.message


@pytest.mark.parametrize("slow", [Speed(W1, W2, 0.05, 1e9, 0.0), Speed(W1, W2, 2e-4, 1e6, 0.0)])
def test_the_slow_pair_is_marked(slow: Speed) -> None:
    healthy = report()
    speeds = [s for s in healthy.speeds if (s.source, s.target) != (W1, W2)]
    given = report(speeds=[*speeds, slow])
    verdict = the_verdict(given, "slow")
    assert (verdict.severity, verdict.tasks) == ("warning", [W1, W2])
    matrix = grids(given)[2]
    ((row, column),) = matrix.marked
    assert (matrix.rows[row][0], matrix.heads[column]) == ("from worker 1", "to worker 2")
    assert matrix.rows[row][column].endswith("slow")


@pytest.mark.parametrize(("bandwidth", "told"), [(1.4e5, True), (1.2e7, False)])
def test_a_direction_is_compared_with_its_reverse(bandwidth: float, told: bool) -> None:
    two = facts(W0), facts(W1)
    there, back = Speed(W0, W1, 2e-4, 1e8, 0.0), Speed(W1, W0, 2e-4, bandwidth, 0.0)
    given = report(*two, expected=[W0, W1], speeds=[there, back])
    if not told:
        assert "slow" not in {verdict.kind for verdict in judge(given)}
        return
    verdict = the_verdict(given, "slow")
    assert (verdict.severity, verdict.tasks) == ("warning", [W1, W0])
    assert "far slower than its reverse: 140 kB/s against 100 MB/s" in verdict.message


def test_what_was_not_measured_is_not_said_to_be_well() -> None:
    given = without_speed((W0, W1))
    assert "nothing that was measured is wrong" in closing(given, judge(given))


def test_many_connections_that_training_does_not_make_need_no_figures() -> None:
    servers = {"ps 0": "c:21000", W0: "a:21000", W1: "b:21000", W2: "b:21001"}
    given = without_speed((W1, W2), expected=list(servers), addresses=servers)
    verdict = the_verdict(given, "not measured")
    assert (verdict.severity, verdict.advice) == ("note", "--timeout SECONDS gives more time.")


@pytest.mark.parametrize(
    ("bandwidth", "way"), [(1.2e7, "powersgd"), (1.2e8, "bf16"), (1.2e9, ""), (VERY_THIN, "bf16")]
)
def test_a_thin_line_is_compressed(bandwidth: float, way: str) -> None:
    healthy = report()
    given = report(speeds=[Speed(*s.pair, 2e-4, bandwidth, 0.0) for s in healthy.speeds])
    assert compress(bandwidth) == way
    if not way:
        assert judge(given) == []
        return
    verdict = the_verdict(given, "thin line")
    assert verdict.severity == "note"
    assert f"compress='{way}'" in verdict.advice
    # Each of 3 machines sends two thirds of 10 MB, and as much of the sums.
    seconds = 2 * 10e6 * 2 / 3 / bandwidth
    times = f"{duration(seconds / 10)}, {duration(seconds)} and "
    assert f"gradients of 1, 10 and 100 MB takes {times}" in verdict.message
    servers = msgspec.structs.replace(given, expected=[*given.expected, "ps 0"])
    groups = report(*(facts(task, process_group=True) for task in ADDRESSES), speeds=given.speeds)
    together = report(*(facts(task, machine="boot") for task in ADDRESSES), speeds=given.speeds)
    for other in (servers, groups, together):
        assert "thin line" not in {verdict.kind for verdict in judge(other)}


def test_ways_between_machines_are_not_slow_because_the_loopback_is_fast() -> None:
    machines = {f"worker {i}": "ab"[i // 4] for i in range(8)}
    speeds = [
        Speed(a, b, 5e-5, 3e9, 0.0) if machines[a] == machines[b] else Speed(a, b, 2e-3, 1e8, 0.0)
        for a, b in permutations(machines, 2)
    ]
    assert slow_pairs(speeds, machines) == set()


def test_a_small_shared_memory_matters_where_tasks_share_it() -> None:
    small = Space("/dev/shm", 64 << 20, 64 << 20)
    alone = report(*(facts(task, shm=small, machine="boot") for task in ADDRESSES))
    assert judge(alone) == []
    together = report(*(facts(task, shm=small, ipc="shm") for task in ADDRESSES))
    found = [verdict for verdict in judge(together) if verdict.kind == "shared memory"]
    assert [verdict.tasks for verdict in found] == [[W0], [W1], [W2]]
    assert "64 MiB free of 64 MiB" in found[0].message
    assert "--shm-size" in found[0].advice


@pytest.mark.parametrize(
    ("omp", "told"), [("1", False), ("2", True), (None, True), ("2,1", True), ("1,4", False)]
)
def test_threads_of_tasks_that_share_cores(omp: str | None, told: bool) -> None:
    given = report(*(facts(task, omp_num_threads=omp, cpus="cores") for task in ADDRESSES))
    assert [verdict.kind for verdict in judge(given)] == ["threads"] * told
    if told:
        assert "OMP_NUM_THREADS=1" in the_verdict(given, "threads").advice


def test_memory_disks_and_gpus() -> None:
    full = facts(
        W1,
        memory=Memory(8 * GIB, 100 << 20, GIB),
        disks=[Space("/tmp", GIB, 1 << 20)],
        gpus=["NVIDIA H200"],
        backend="NCCL",
    )
    given = report(facts(W0), full, facts(W2))
    assert (
        "100 MiB of memory left of the 1 GiB of its container"
        in the_verdict(given, "memory").message
    )
    assert "/tmp on worker 1 has 1 MiB free" in the_verdict(given, "disk").message
    assert "1 GPUs on worker 1" in the_verdict(given, "GPUs").message
    assert the_verdict(given, "NCCL").severity == "note"
    mac = report(facts(W0, gpus=["Apple M2"]))
    assert "through the host's memory" in the_verdict(mac, "devices").message


def test_the_worst_comes_first() -> None:
    given = report(facts(W0, omp_num_threads="9"), facts(W1, port=Port(21000, False)), probes=[])
    assert [verdict.severity for verdict in judge(given)][:3] == ["missing", "error", "warning"]
