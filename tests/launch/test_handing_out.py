"""How launchers hand out a job's secret: no command line, file or log of the job has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.file import read_job
from spartito.launch.hosts import client
from spartito.launch.hosts.names import Host
from spartito.launch.hosts.plan import Plan
from spartito.launch.hosts.ssh import Ssh
from spartito.launch.processes.roles import Roles
from spartito.launch.slurm.file import batch_file
from spartito.wire.ports import free_port
from tests.commands import LEAN
from tests.launch.jobs import LISTS, plan_batch, plan_containers

LIMIT = 120.0
SECRET = "known to nobody but the tasks"
ENV = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
TRAINS = """
import json, os
import torch
from torch import nn
import spartito as sp
from spartito.wire.secret import read_secret

class Looks(sp.Callback):
    def on_epoch_end(self, epoch, logs):
        if self.trainer.is_chief:
            found = listed(read_secret())
            found.pop(os.getppid(), None)  # the launcher, which was given it so
            Path("found").write_text(json.dumps([found, listed("SPARTITO_JOB="), listed("store")]))

torch.manual_seed(0)  # all tasks make the same data
with sp.MirroredStrategy() as strategy:
    trainer = sp.Trainer(
        nn.Linear(2, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=nn.MSELoss(),
        strategy=strategy,
    )
    trainer.fit(
        (torch.randn(16, 2), torch.randn(16, 1)), epochs=2, batch_size=4, verbose=False,
        callbacks=[Looks(), sp.callbacks.BackupAndRestore("backup", every=2)],
    )
    trainer.save("saved")
"""


def test_no_file_log_command_line_or_environment_of_a_job_has_its_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LISTS + TRAINS)
    words = ["--workers=2", "--recover", "--slow=worker:1=0.9", "--log-dir=logs", "train.py"]
    env = {"SPARTITO_SECRET": SECRET, "SPARTITO_TLS": "on", "SPARTITO_RUN_DIR": "run"}
    env["PYTHONPATH"] = os.pathsep.join([str(LEAN), *filter(None, [ENV.get("PYTHONPATH")])])
    got = subprocess.run(
        [sys.executable, "-m", "spartito", "run", *words],
        capture_output=True, cwd=tmp_path, env=ENV | env, timeout=LIMIT,
    )  # fmt: skip
    assert got.returncode == 0, got.stderr.decode()
    having, tasks, keepers = json.loads((tmp_path / "found").read_text())
    assert having == {}
    assert len(tasks) >= 2
    assert "spartito.cluster.store" in "".join(keepers.values())
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*")}
    assert {"run/config.json", "run/report.html", "logs/worker-1.log", "backup", "saved"} <= {
        *files
    }
    texts = [path.read_bytes() for path in files.values() if path.is_file()]
    assert not any(SECRET.encode() in text for text in [*texts, got.stdout, got.stderr])


def test_what_is_written_for_a_scheduler_or_an_engine_has_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not that of who writes it either, whose environment has one."""
    monkeypatch.setenv("SPARTITO_SECRET", SECRET)
    compose = compose_file(plan_containers("mnist", workers=2))
    assert "SPARTITO_SECRET_FILE: /run/secrets/" in compose
    assert "SPARTITO_SECRET:" not in compose
    batch = batch_file(plan_batch("mnist", workers=2))
    assert "unset SPARTITO_SECRET\n" in batch
    assert "SPARTITO_SECRET=" not in batch  # it is made at run time, in a file
    assert SECRET not in compose + batch


def test_an_insecure_job_in_containers_or_under_slurm_says_so_first(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(
        secure := compose_file(plan_containers("mnist", workers=2))
    )
    assert read_job(path).insecurity == ""
    assert "SPARTITO_TLS" not in secure
    path.write_text(compose_file(plan_containers("mnist", workers=2, insecure=True)))
    assert read_job(path).insecurity.startswith("insecure: what tasks send is not encrypted")
    path.write_text(secure.replace("SPARTITO_SECRET_FILE", "ANOTHER").replace("\nsecrets:", "\nx:"))
    assert read_job(path).insecurity.startswith("insecure: this job has no secret")
    batch = batch_file(plan_batch("mnist", workers=2))
    assert "SPARTITO_TLS" not in batch
    open_batch = batch_file(plan_batch("mnist", workers=2, insecure=True))
    new = [line for line in open_batch.splitlines() if line not in batch.splitlines()]
    told = "echo 'spartito: insecure: what tasks send is not encrypted (--insecure)' >&2"
    assert new == ["export SPARTITO_TLS=off", told]
    assert open_batch.index(told) < open_batch.index("\nsrun ")


def test_what_crosses_ssh_is_on_standard_input_alone() -> None:
    hosts = (Host("a", "10.0.0.1"), Host("b", "10.0.0.2"))
    ssh = Ssh(("ssh",), "/job", "python")
    plan = Plan(hosts, (2, 2), Roles(2), ("train.py",), ssh, 2950)
    for task in plan.roles.tasks:
        process = plan.process(task, {"SPARTITO_SECRET": SECRET})
        assert not any(SECRET in word for word in process.argv)
        assert "SPARTITO_SECRET" not in json.loads(process.env[client.FIRST_LINE])


TOLD = "spartito: insecure: "
TWO = json.dumps(
    {
        "cluster": {"worker": ["10.0.0.1:2950", "10.0.0.2:2950"]},
        "task": {"type": "worker", "index": 0},
    }
)


@pytest.mark.parametrize(
    ("options", "env", "first"),
    [
        (["--insecure"], {}, "what tasks send is not encrypted (--insecure)"),
        ([], {}, ""),
        (
            ["--nnodes=1", "--master-addr=HERE"],
            {"SPARTITO_SECRET": SECRET, "SPARTITO_TLS": "off"},
            "what tasks send by",
        ),
        (["--workers=1"], {"TF_CONFIG": TWO}, "this job has no secret, so whoever reaches 10.0."),
        (["--workers=1", "--insecure"], {"TF_CONFIG": TWO}, "this job has no secret, so whoever"),
    ],
)
def test_the_first_line_says_what_is_insecure(
    tmp_path: Path, options: list[str], env: dict[str, str], first: str
) -> None:
    (tmp_path / "show.py").write_text("import os; print(os.environ.get('SPARTITO_TLS'))")
    here = f"{os.uname().nodename}:{free_port()}"
    got = subprocess.run(
        [sys.executable, "-m", "spartito", "run", "--workers=2",
         *(word.replace("HERE", here) for word in options), "show.py"],
        capture_output=True, text=True, cwd=tmp_path, env=ENV | env, timeout=LIMIT,
    )  # fmt: skip
    assert got.returncode == 0, got.stderr
    told = got.stderr.splitlines()
    assert told[0].startswith(TOLD + first) if first else TOLD not in got.stderr
    off = "--insecure" in options or env.get("SPARTITO_TLS") == "off"
    assert set(got.stdout.split()) & {"off", "None"} == {"off" if off else "None"}
