from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.cluster import resolve
from spartito.declared import Declared, parse
from spartito.doctor.launch.containers import doctor_job
from spartito.errors import UserError
from spartito.launch.containers.compose import compose_file, machine_files
from spartito.launch.containers.file import JobFile
from spartito.launch.containers.plan import (
    Containers,
    Limits,
    Network,
    memory_bytes,
    service,
)
from spartito.launch.processes.roles import RESTARTS, Roles
from tests.launch.jobs import plan_containers

DOCUMENTED = Path(__file__).parents[2] / "docs" / "guides" / "containers.md"
CASTS = st.builds(Roles, st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans())

GO_NUMBERS = (  # as in resolve.go of yaml.v3, which leaves underscores out first
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
    r"[-+]?0[xX][0-9a-fA-F]+",
    r"[-+]?0[oO][0-7]+|0o[-+][0-7]+",
    r"[-+]?0[bB][01]+|0b[-+][01]+",
)
GO_TIMES = (
    r"\d{4}-\d\d?-\d\d?",
    r"\d{4}-\d\d?-\d\d?[Tt]\d\d?:\d\d?:\d\d?([.,]\d+)?(Z|[-+]\d\d:\d\d)",
    r"\d{4}-\d\d?-\d\d? +\d\d?:\d\d?:\d\d?([.,]\d+)?",
)
NO_STRINGS = (  # plain, docker compose 2 takes none of these for a string
    *("1e-3", "1E5", "+1", "-.5", ".5e1", "5.", "08", "010", "1_000", "1__0_", "+1_e3_"),
    *("0o17", "-0o7", "0o+7", "0_x1F", "0X1f", "0b-1", "-0B1", "2024-1-2", "2024-01-02"),
    *("2024-1-2T3:4:5Z", "2024-1-2t3:4:5.6+01:00", "2024-1-2  3:4:5", "2024-1-2 3:4:5,6"),
    *("~", "null", "Null", "true", "FALSE", ".inf", "-.Inf", ".NaN", ""),
)
STRINGS = (
    *("1e", "e3", "1.2.3", "_1", "0o8", "0x", "0b2", "-_", "-e3", "--lr", "-c", "./a"),
    *("2024-1", "2024-1-2T3", "24-1-2", "a_1", "v1", "nan", "inf", "y", "N", "None", "a b"),
)
BROKEN = st.text("a \t\n\r\x85\u2028'\"\\$:#-é💡", max_size=6)
WORDS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | BROKEN
    | st.sampled_from(NO_STRINGS + STRINGS)
    | st.sampled_from(GO_NUMBERS + GO_TIMES).flatmap(
        lambda rule: st.from_regex(re.compile(rule, re.ASCII), fullmatch=True)
    )
)


class GoLoader(yaml.SafeLoader):
    """Takes for no string what either PyYAML or yaml.v3 takes for none."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0] and value[:1] != "_":
            rules = [(value.replace("_", ""), rule) for rule in GO_NUMBERS]
            rules += [(value, rule) for rule in GO_TIMES]
            if any(re.fullmatch(rule, word, re.ASCII) for word, rule in rules):
                return "!other"
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]


GoLoader.add_constructor("!other", lambda loader, node: (node.value, "no string"))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def job(roles: Roles, **options: Any) -> Containers:
    strategy = "parameter_server" if roles.ps else "multi_worker_mirrored"
    what = ("python", "-m", "spartito.recipes.mnist", "--out=/runs")
    return Containers(
        "digits", "mnist", what, Declared(strategy), roles, "./runs/digits", **options
    )


def parsed(text: str) -> dict[str, Any]:
    """The document as the composer sees it, ``$$`` undone."""
    document: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
    return document


def read(job: Containers) -> dict[str, Any]:
    return parsed(compose_file(job))


@settings(max_examples=25)
@given(CASTS, st.builds(Network, st.booleans(), st.booleans()))
def test_each_task_reads_who_it_is_and_where_the_others_are(roles: Roles, network: Network) -> None:
    services = read(job(roles, network=network))["services"]
    specs = {name: resolve(one["environment"]) for name, one in services.items()}
    assert [spec.task for spec in specs.values()] == list(roles.tasks)
    assert [spec.is_chief for spec in specs.values()] == [True] + [False] * (len(specs) - 1)
    addresses = [a for tasks in specs[next(iter(specs))].addresses.values() for a in tasks]
    assert len(set(addresses)) == len(roles.tasks)
    for name, spec in specs.items():
        host, _, port = spec.address_of(spec.task).partition(":")
        assert host == ("127.0.0.1" if network.host else name)
        assert network.host or (port == "29500" and services[name]["hostname"] == name)


def test_the_store_of_a_job_that_recovers_outlives_its_tasks() -> None:
    made = read(plan_containers("mnist", workers=2, recover=True, wait=9.0, restarts=2))
    *tasks, store = made["services"].values()
    assert store["command"][2:] == ["spartito.cluster.store", "store:29500", "/snapshots/journal"]
    assert (store["hostname"], store["restart"], store["read_only"]) == ("store", "always", True)
    assert store["secrets"] == tasks[0]["secrets"]
    assert [volume["target"] for volume in store["volumes"]] == ["/snapshots"]
    assert made["volumes"] == {"store": {}}
    for task in tasks:
        assert task["environment"]["SPARTITO_STORE"] == "store:29500"
        assert task["environment"]["SPARTITO_RECOVERY"] == "wait=9"
        assert (task["restart"], task["labels"]) == ("no", {"spartito.restarts": "2"})
        assert task["depends_on"] == {"store": {"condition": "service_started"}}
    shared = read(plan_containers("mnist", workers=2, recover=True, host_network=True))
    assert shared["services"]["store"]["command"][3] == "127.0.0.1:29502"
    assert "store" not in read(plan_containers("mnist", workers=2))["services"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"recover": True, "share_ipc": True}, "the first container has the memory of all"),
        ({"recover": True, "ps": 1}, "the chief's journal is on no volume"),
        ({"wait": 3.0}, "--wait 3.0 without --recover"),
    ],
)
def test_what_cannot_recover_in_containers(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        plan_containers("mnist", workers=2, **options)


@settings(max_examples=25)
@given(CASTS)
def test_no_task_has_more_rights_than_it_needs(roles: Roles) -> None:
    for one in read(job(roles, data="./photos"))["services"].values():
        assert one["read_only"] is True
        assert one["tmpfs"] == ["/tmp:exec,size=1g"]
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
        assert one["user"] == "1000:1000"
        assert one["init"] is True
        assert one["stop_grace_period"] == "30s"
        assert one["pids_limit"] == 4096
        assert one["logging"]["options"] == {"max-size": "20m", "max-file": "5"}
        assert one["shm_size"] == "1g"
        assert not one.keys() & {"ports", "privileged", "network_mode", "ipc"}
        assert one["networks"] == ["job"]
        mounts = {volume["target"]: volume for volume in one["volumes"]}
        assert mounts["/data"]["read_only"] is True
        assert mounts["/runs"] == {"type": "bind", "source": "./runs/digits", "target": "/runs"}


@settings(max_examples=25)
@given(CASTS)
def test_who_is_started_again_and_after_whom(roles: Roles) -> None:
    services = read(job(roles))["services"]
    first = next(iter(services))
    for task in roles.tasks:
        one = services[service(task)]
        again = task.type == "evaluator" or (roles.ps > 0 and service(task) != first)
        assert one["restart"] == (f"on-failure:{RESTARTS}" if again else "no")
        after = one.get("depends_on", {})
        assert after == (
            {} if service(task) == first else {first: {"condition": "service_started"}}
        )


def test_health_is_whether_a_task_reaches_where_the_job_meets() -> None:
    services = read(job(Roles(2, ps=1)))["services"]
    for name, reached in {"worker-0": "worker-0", "worker-1": "worker-0", "ps-0": "ps-0"}.items():
        *words, look = services[name]["healthcheck"]["test"]
        assert words == ["CMD", "python", "-c"]
        assert f'create_connection(("{reached}", 29500)' in look
        compile(look, name, "exec")
    assert "healthcheck" not in read(job(Roles(1, evaluator=True)))["services"]["worker-0"]


def test_servers_keep_their_snapshots_on_a_volume_and_see_no_gpu() -> None:
    document = read(job(Roles(2, ps=1), limits=Limits(gpus=True), data="./photos"))
    assert list(document["volumes"]) == ["snapshots"]
    server = document["services"]["ps-0"]
    assert [v["target"] for v in server["volumes"]] == ["/runs", "/data", "/snapshots"]
    assert server["environment"]["SPARTITO_SNAPSHOT_DIR"] == "/snapshots"
    assert server["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert "deploy" not in server
    assert "volumes" not in read(job(Roles(2)))


def test_limits_and_gpus_are_each_workers_own() -> None:
    limits = Limits((0.25, 2.5), "2048m", gpus=True)
    services = read(job(Roles(2, ps=1), limits=limits, cores=8))["services"]
    assert [one.get("cpus") for one in services.values()] == [0.25, 2.5, None]
    assert [one["mem_limit"] for one in services.values()] == ["2048m"] * 3
    assert [one["environment"]["OMP_NUM_THREADS"] for one in services.values()] == ["1", "3", "1"]
    for number in (0, 1):
        reserved = services[f"worker-{number}"]["deploy"]["resources"]["reservations"]
        assert reserved["devices"] == [
            {"driver": "nvidia", "device_ids": [str(number)], "capabilities": ["gpu"]}
        ]


def test_workers_without_a_limit_share_the_cores() -> None:
    services = read(job(Roles(2), cores=5))["services"]
    assert [one["environment"]["OMP_NUM_THREADS"] for one in services.values()] == ["2", "2"]


def test_shared_memory_belongs_to_the_first_and_the_others_use_it() -> None:
    services = read(job(Roles(3), network=Network(ipc=True)))["services"]
    assert [one["ipc"] for one in services.values()] == ["shareable", *["service:worker-0"] * 2]
    assert [one.get("shm_size") for one in services.values()] == ["1g", None, None]


def test_the_machines_own_network_is_used_on_request_only() -> None:
    assert read(job(Roles(2)))["networks"] == {"job": {"driver": "bridge"}}
    document = read(job(Roles(2), network=Network(host=True)))
    assert "networks" not in document
    for one in document["services"].values():
        assert one["network_mode"] == "host"
        assert not one.keys() & {"networks", "hostname"}


@settings(max_examples=25)
@given(CASTS, st.integers(1, 4))
def test_several_machines_get_a_file_each(roles: Roles, count: int) -> None:
    machines = tuple("abcd"[: min(count, max(roles.workers, roles.ps))])
    plan = job(roles, network=Network(True, False, machines))
    files = {name: parsed(text) for name, text in machine_files(plan).items()}
    assert tuple(files) == machines
    placed = [name for document in files.values() for name in document["services"]]
    assert sorted(placed) == sorted(map(service, roles.tasks))
    told = {}
    for machine, document in files.items():
        assert document["services"], machine
        for name, one in document["services"].items():
            spec = resolve(one["environment"])
            assert spec.address_of(spec.task).partition(":")[0] == machine
            told[name] = one["environment"]["TF_CONFIG"]
            assert one.get("depends_on", {}).keys() <= document["services"].keys()
    assert len({json.dumps(json.loads(text)["cluster"]) for text in told.values()}) == 1
    assert not roles.evaluator or "evaluator" in files[machines[0]]["services"]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30))
def test_any_words_of_the_user_arrive_as_they_are(word: str) -> None:
    asked = Declared("local_sgd", {"weights": word})
    plan = replace(job(Roles(1), scripts=f"/x/{word}"), strategy=asked)
    document = yaml.safe_load(compose_file(plan))
    undone = document["services"]["worker-0"]
    assert re.sub(r"\$\$", "$", undone["volumes"][1]["source"]) == f"/x/{word}"
    assert parse(re.sub(r"\$\$", "$", undone["environment"]["SPARTITO_STRATEGY"])) == asked
    lone = re.sub(r"^#.*|\$\$", "", compose_file(plan), flags=re.MULTILINE)
    assert "$" not in lone  # the composer would read a variable


def told(text: str, loader: type[yaml.SafeLoader]) -> tuple[list[str], str, str]:
    """The command, the strategy and the run folder that a composer reads."""
    one = yaml.load(text.replace("$$", "$"), loader)["services"]["worker-0"]
    strategy = one["environment"]["SPARTITO_STRATEGY"]
    return one["command"], strategy, one["volumes"][0]["source"]


@given(st.lists(WORDS, max_size=4), WORDS, WORDS)
def test_a_string_is_a_string_to_every_composer(words: list[str], said: str, out: str) -> None:
    asked = Declared("local_sgd", {"weights": said})
    plan = replace(job(Roles(1)), command=tuple(words), strategy=asked, out=out)
    text = compose_file(plan)
    for loader in (yaml.SafeLoader, GoLoader):
        assert told(text, loader) == (words, str(asked), out)
    services = yaml.safe_load(text)["services"]
    doctor = doctor_job(JobFile(Path("compose.yaml"), plan.name, services, text), 1, False)
    for loader in (yaml.SafeLoader, GoLoader):
        assert told(doctor.text, loader)[1:] == (str(asked), out)


def test_quotes_are_where_a_composer_needs_them_and_nowhere_else() -> None:
    for words, shown in ((NO_STRINGS, map("'{}'".format, NO_STRINGS)), (STRINGS, STRINGS)):
        text = compose_file(replace(job(Roles(1)), command=words))
        assert f"  command: [{', '.join(shown)}]\n" in text


def test_a_line_break_is_written_as_an_escape() -> None:
    plan = replace(job(Roles(1)), command=("a\nb\n\nc",), out="./x\ny: z")
    text = compose_file(plan)
    assert r'  command: ["a\nb\n\nc"]' in text.splitlines()
    assert "# Paths are relative to this file. Model and report: ./x y: z" in text.splitlines()


def test_the_file_begins_with_what_it_is_and_the_commands() -> None:
    text = compose_file(job(Roles(2, ps=1, evaluator=True)))
    first, _, *commands = text.splitlines()[:5]
    assert first == "# mnist under parameter_server: 2 workers, 1 parameter server, 1 evaluator."
    assert [re.split(r"\s{2,}", line[4:])[0] for line in commands] == [
        "spartito cluster up compose.yaml",
        "spartito cluster status compose.yaml",
        "spartito cluster down compose.yaml",
    ]
    assert not re.search(r"&id\d|\*id\d", text)
    assert "\t" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_documented_file_is_the_one_that_is_written() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    what = ("python", "-m", "spartito.recipes.mnist", "--out=/runs", "--epochs=3")
    plan = Containers(
        "mnist", "mnist", what, Declared("multi_worker_mirrored"), Roles(2), "./runs/mnist", cores=2
    )
    assert shown == compose_file(plan)


def test_a_recipe_gets_its_folders() -> None:
    plan = plan_containers("mnist", ["--epochs=1"], workers=2, data="photos")
    assert plan.command[3:] == ("--out=/runs", "--data=/data", "--epochs=1")
    assert (str(plan.strategy), plan.data, plan.out, plan.name) == (
        "multi_worker_mirrored",
        "./photos",
        "./runs/mnist",
        "mnist",
    )


def test_data_that_is_a_file_is_mounted_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    plan = plan_containers("gpt", [], workers=2, data=str(tmp_path / "text.txt"))
    assert plan.command[3:] == ("--out=/runs", "--data=/data/text.txt")
    assert plan.data == "."


def test_a_script_is_mounted_from_its_folder(tmp_path: Path) -> None:
    plan = plan_containers("train.py", ["--x", "1"], ps=1)
    assert plan.command == ("python", "/scripts/train.py", "--x", "1")
    assert (plan.scripts, plan.name, str(plan.strategy)) == (".", "train", "parameter_server")
    far = plan_containers("train.py", workers=2, hosts="a,b")
    assert (far.scripts, far.out) == (str(tmp_path), str(tmp_path / "runs/train"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "mirored"}, r"'mirored' is not a strategy\n  Did you mean 'mirrored'"),
        ({"strategy": "mirrored", "workers": 2}, "each container is a machine of its own"),
        (
            {"strategy": "central_storage", "workers": 2, "host_network": True},
            "on a single machine --share-ipc",
        ),
        (
            {"strategy": "mirrored", "workers": 2, "host_network": True, "hosts": "a,b"},
            "for one machine",
        ),
        ({"strategy": "one_device", "workers": 2}, "1 process, but 2 are asked for"),
        ({"strategy": "parameter_server"}, "Add one by --ps 1"),
        ({"strategy": "mirrored", "ps": 1}, "has no parameter servers"),
        ({"chief": True}, "--chief without --ps"),
        ({"strategy_options": "[1]"}, "is not a JSON object"),
        ({"strategy_options": "{"}, "is not JSON"),
        ({"data": "nowhere"}, "--data nowhere is no folder"),
        ({"name": "Big Job"}, "cannot name containers"),
        ({"image": "No//such"}, "is no name of an image"),
        ({"cpus": "1,2,3", "workers": 2}, "3 numbers for 2 workers"),
        ({"cpus": "much"}, "no list of numbers"),
        ({"cpus": "0"}, "0.01 CPUs or more"),
        ({"cpus": "nan"}, "0.01 CPUs or more"),
        ({"memory": "lots"}, "no amount of memory"),
        ({"memory": "100m"}, "too small: Python and torch alone take 300m"),
        ({"hosts": "a,,b", "workers": 3}, "does not parse"),
        ({"hosts": "a:1,b", "workers": 2}, "is no name of a machine"),
        ({"hosts": "a,localhost", "workers": 2}, "localhost is each machine itself"),
        ({"hosts": "a,A", "workers": 2}, " twice"),
        ({"hosts": "fe80::1,fe80:0::1", "workers": 2}, " twice"),
        ({"arguments": ["--name=\udc80"]}, "is not UTF-8"),
        ({"hosts": "a,b,c", "workers": 2}, "too many for the job"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_containers("mnist", **options)


@pytest.mark.parametrize("words", [["--out=/x"], ["--data", "/x"]])
def test_a_recipes_folders_are_options_of_the_command(words: list[str]) -> None:
    with pytest.raises(UserError, match="is what 'spartito cluster compose' itself wants"):
        plan_containers("mnist", words)


def test_a_target_that_is_nothing() -> None:
    with pytest.raises(UserError, match="Did you mean 'mnist'"):
        plan_containers("mnits")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("300m", 300 << 20), ("2g", 2 << 30), ("1.5GiB", 3 << 29), ("4096", 4096), ("1kb", 1024)],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert memory_bytes(text) == expected


def test_machines_by_their_ipv6_addresses() -> None:
    job = plan_containers("mnist", workers=2, hosts="fd00::1,fd00::2")
    files = machine_files(job)
    assert list(files) == ["fd00::1", "fd00::2"]
    service = yaml.safe_load(files["fd00::2"])["services"]["worker-1"]
    told = json.loads(service["environment"]["TF_CONFIG"])
    assert told["cluster"] == {"worker": ["[fd00::1]:29500", "[fd00::2]:29500"]}
    assert plan_containers("mnist", workers=2, hosts="node[01-02]").network.machines == (
        *("node01", "node02"),
    )
