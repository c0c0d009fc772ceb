"""Under a real Slurm: jobs that come again, arrays, servers on nodes of their own, secrets."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SPARTITO, eventually
from tests.launch.jobs import LISTS
from tests.launch.slurm_cluster import Slurm, missing, slurm_in, write_and_submit
from tests.skips import skip_if

REASON = missing()

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),  # the first test starts Slurm too
    skip_if(REASON is not None, "slurm", REASON),
]

TRAIN = """
import os
import signal
import subprocess
import sys
import time
import torch
import spartito as sp

class Ends(sp.Callback):
    def on_train_batch_end(self, batch, logs):
        again = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        mine = self.trainer.is_chief and again < int(sys.argv[1])
        if mine and self.trainer.step == 4 + 5 * again:
            # As Slurm does before the time is over: all processes of the step get it, so this too.
            # Slurm sends it when it likes: without waiting, the training may end before.
            heard, before = [], signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *told: (before(*told), heard.append(told)))
            # scancel is of the step as well, and may get it before it ends.
            unhurt = ("env", "--ignore-signal=USR1")
            told = ("scancel", "--signal=USR1", os.environ["SLURM_JOB_ID"])
            subprocess.run([*unhurt, *told], check=True)
            while not heard:
                time.sleep(0.01)
            signal.signal(signal.SIGUSR1, before)
        print("step", self.trainer.step, flush=True)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 16), torch.nn.Dropout(0.1),
                          torch.nn.Tanh(), torch.nn.Linear(16, 10))
run = os.environ["SPARTITO_RUN_DIR"]
trainer = sp.Trainer(net, optimizer=torch.optim.Adam(net.parameters(), 0.01),
                     loss=torch.nn.functional.cross_entropy, run_dir=run)
data = sp.data.digits("training").shuffle(seed=1).batch(400).map(lambda x, y: (x.double(), y))
trainer.fit(data, epochs=1,
            callbacks=[sp.callbacks.BackupAndRestore(run + "/backup", every=7, share=None), Ends()])
if trainer.is_chief:
    torch.save({name: value.clone() for name, value in net.state_dict().items()}, run + "/end.pt")
"""

WHO = """
import os
import socket
from spartito.cluster import resolve

spec = resolve()
print(f"{os.environ.get('SLURM_ARRAY_TASK_ID')}: {spec.task} of {spec.world_size}",
      f"on {socket.gethostname()} meets at {spec.rendezvous}", flush=True)
"""

LOOKS = (
    LISTS
    + """
import json
import os
import subprocess
import sys

file = Path(os.environ["SPARTITO_SECRET_FILE"])
secret = file.read_text()
number = os.environ["SLURM_JOB_ID"]
shown = [subprocess.run(words, capture_output=True, text=True, check=True).stdout for words in (
    ["scontrol", "show", "job", "-dd", number],
    ["scontrol", "write", "batch_script", number, "-"],
    ["scontrol", "show", "step", number],
)]
if os.environ["SLURM_PROCID"] == "0":
    found = {"long": len(secret), "mode": file.stat().st_mode & 0o777,
             "processes": listed(secret), "scontrol": [secret in text for text in shown],
             "lengths": [len(text) for text in shown], "file": str(file)}
    Path("looked.json").write_text(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_in(tmp_path_factory.mktemp("slurm")) as found:
        (found.work / "train.py").write_text(TRAIN)
        (found.work / "who.py").write_text(WHO)
        (found.work / "looks.py").write_text(LOOKS)
        yield found


def weights(run: Path) -> dict[str, list[str]]:
    import torch

    found = torch.load(run / "end.pt")
    return {
        name: [value.hex() for value in tensor.flatten().tolist()] for name, tensor in found.items()
    }


def test_a_job_that_is_told_to_end_twice_has_the_weights_of_one_that_ran_through(
    slurm: Slurm,
) -> None:
    ended = {}
    for times in (0, 2):
        words = ("--nodes=2", "--workers=2", "--", str(times))
        name = f"told-{times}"
        ended[times] = slurm.wait(write_and_submit(slurm, name, "train.py", *words))
        assert (ended[times].code, ended[times].restarts) == (0, times), ended[times].text
    text = ended[2].text
    assert "spartito: 75: restart 1, of 100 at most" in text
    assert "spartito: 75: restart 2, of 100 at most" in text
    steps = [int(step) for step in re.findall(r"^0: step (\d+)$", text, re.MULTILINE)]
    assert steps == list(range(1, 21)), text  # no step twice, none left out
    assert weights(slurm.work / "runs/told-2") == weights(slurm.work / "runs/told-0")


def test_no_job_comes_again_that_may_not(slurm: Slurm) -> None:
    (slurm.work / "codes.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    for code, words, restarts in ((2, [], 0), (75, ["--restarts=1"], 1), (75, ["--restarts=0"], 0)):
        name = f"codes-{code}-{restarts}"
        number = write_and_submit(slurm, name, "codes.py", *words, "--", str(code))
        job = slurm.wait(number)
        assert (job.code, job.restarts) == (code, restarts), job.text


def test_a_mistake_of_one_task_ends_the_job_as_one(slurm: Slurm) -> None:
    (slurm.work / "mistake.py").write_text(
        "import torch\nimport spartito as sp\nstrategy = sp.strategy()\n"
        "strategy.reduce('sum', torch.tensor(1.0))\n"
        "if strategy.cluster.rank == 1:\n    raise sp.UserError('no such file here')\n"
        "strategy.reduce('sum', torch.tensor(1.0))\n"
    )
    job = slurm.wait(write_and_submit(slurm, "mistake", "mistake.py", "--nodes=2", "--workers=2"))
    assert (job.code, job.restarts) == (2, 0), job.text
    assert "1: spartito: error: no such file here" in job.text
    assert re.search(r"^0: spartito: error: .*worker 1", job.text, re.MULTILINE), job.text
    assert not list((slurm.work / "runs/mistake").glob(".*"))


def test_runs_of_an_array_have_folders_and_ports_of_their_own(slurm: Slurm) -> None:
    number = write_and_submit(slurm, "who", "who.py", "--workers=2", "--array=1-3")
    jobs = [slurm.wait(f"{number}_{index}") for index in (1, 2, 3)]
    assert [job.code for job in jobs] == [0, 0, 0], jobs
    text = "".join(job.text for job in jobs)
    found = re.findall(r"(\d): (worker \d) of 2 on \w+ meets at (\S+)", text)
    assert sorted(who[:2] for who in found) == [
        (str(index), f"worker {worker}") for index in (1, 2, 3) for worker in (0, 1)
    ]
    assert len({where for _, _, where in found}) == 3
    assert {path.name for path in (slurm.work / "runs/who").iterdir()} == {"1", "2", "3"}


def test_a_run_of_an_array_comes_again_alone(slurm: Slurm) -> None:
    (slurm.work / "once.py").write_text(
        "import os, sys\n"
        "told = os.environ['SLURM_ARRAY_TASK_ID'] == '1' and not int(os.environ.get("
        "'SLURM_RESTART_COUNT', '0'))\n"
        "sys.exit(75 if told else 0)\n"
    )
    number = write_and_submit(slurm, "once", "once.py", "--array=0-2")
    jobs = [slurm.wait(f"{number}_{index}") for index in (0, 1, 2)]
    assert [(job.code, job.restarts) for job in jobs] == [(0, 0), (0, 1), (0, 0)], jobs


def test_servers_on_nodes_of_their_own_train(slurm: Slurm) -> None:
    options = ("--workers=2", "--ps=1", "--ps-nodes=1", "--ps-partition=batch", "--ps-memory=600m")
    number = write_and_submit(slurm, "het-who", "who.py", *options)
    job = slurm.wait(number)
    assert job.code == 0, job.text
    found = dict(re.findall(r"(\w+ \d) of 2 on (\w+)", job.text))
    assert found.keys() == {"worker 0", "worker 1", "ps 0"}
    assert found["worker 0"] == found["worker 1"] != found["ps 0"]
    recipe = ("--", "--epochs=1", "--batch-size=500")
    job = slurm.wait(write_and_submit(slurm, "het", "mnist", *options, *recipe))
    assert job.code == 0, job.text
    run = slurm.work / "runs/het"
    assert list((run / "checkpoints").glob("*/model.safetensors"))
    assert json.loads((run / "history.jsonl").read_text().splitlines()[-1])["loss"] < 2.0


def test_workers_after_the_servers_in_the_list_of_nodes_are_still_workers(slurm: Slurm) -> None:
    write_and_submit(slurm, "sorted", "who.py", "--workers=1", "--ps=2", "--ps-nodes=1")
    text = (slurm.work / "sorted.sbatch").read_text()
    text = text.replace("#SBATCH hetjob", "#SBATCH --nodelist=node2\n#SBATCH hetjob")
    (slurm.work / "sorted.sbatch").write_text(text)
    job = slurm.wait(slurm.submit("sorted.sbatch"))
    assert job.code == 0, job.text
    found = dict(re.findall(r"(\w+ \d) of 1 on (\w+)", job.text))
    assert found == {"worker 0": "node2", "ps 0": "node1", "ps 1": "node1"}


def test_nobody_reads_the_secret_from_the_job(slurm: Slurm) -> None:
    job = slurm.wait(write_and_submit(slurm, "looks", "looks.py", "--workers=2"))
    assert job.code == 0, job.text
    found = json.loads((slurm.work / "looked.json").read_text())
    assert (found["long"], found["mode"], found["processes"]) == (64, 0o600, {})
    assert found["scontrol"] == [False, False, False]
    assert min(found["lengths"]) > 50  # it was shown something
    assert not Path(found["file"]).exists()


def test_status_says_how_jobs_go(slurm: Slurm) -> None:
    (slurm.work / "waits.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "end = time.monotonic() + 200\n"
        "while not Path('go').exists() and time.monotonic() < end:\n    time.sleep(0.1)\n"
        "raise SystemExit(2)\n"
    )
    number = write_and_submit(slurm, "waits", "waits.py")
    held = slurm.submit("--hold", "--job-name=held", "--wrap=true")

    def says(job: int) -> tuple[int, str]:
        words = " ".join([*SPARTITO, "cluster", "status", str(job)])
        *lines, code = slurm.run("sh", "-c", f"{words} 2>&1; echo $?").splitlines()
        return int(code), "\n".join(lines)

    assert eventually(lambda: "RUNNING" in says(number)[1], 60)
    code, text = says(number)
    assert code == 0
    assert re.match(rf"job {number} \(waits\): RUNNING on node\d, \S+ of 01:00:00\n", text), text
    assert f"run folder: {slurm.work}/runs/waits" in text
    said = f"job {held} (held): PENDING\n  JobHeldUser: it is held: scontrol release {held}"
    assert says(held) == (0, said)
    (slurm.work / "go").touch()
    assert slurm.wait(number).code == 2
    code, text = says(number)
    assert (code, "exit code 2: a mistake that can be corrected" in text) == (2, True), text
    slurm.run("scancel", str(held))
    assert says(999)[0] == 2


def test_a_job_that_somebody_ends_does_not_come_again(slurm: Slurm) -> None:
    (slurm.work / "told.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(200)\n"
    )
    number = write_and_submit(slurm, "ended", "told.py")
    output = slurm.work / f"ended-{number}.out"
    assert eventually(lambda: output.exists() and "ready" in output.read_text(), 60)
    slurm.run("scancel", str(number))
    job = slurm.wait(number)
    assert (job.state, job.restarts) == ("CANCELLED", 0), job.text


def test_a_job_whose_node_is_lost_comes_again(slurm: Slurm) -> None:
    (slurm.work / "lost.py").write_text(
        "import os, sys, time\n"
        "if os.environ.get('SLURM_RESTART_COUNT'):\n    sys.exit(0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(200)\n"
    )
    number = write_and_submit(slurm, "lost", "lost.py", "--sbatch=--nodelist=node2")
    output = slurm.work / f"lost-{number}.out"
    assert eventually(lambda: output.exists() and "ready" in output.read_text(), 60)
    slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    try:
        assert eventually(
            lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", str(number)), 60
        )
        # Slurm drains a node that gets a job again while it still ends it there.
        ending = ["pgrep", "--full", rf"^slurmstepd: \[{number}\."]
        assert eventually(lambda: subprocess.run(ending, capture_output=True).returncode == 1, 60)
    finally:
        slurm.run("scontrol", "update", "nodename=node2", "state=resume")
    job = slurm.wait(number)
    assert (job.code, job.restarts) == (0, 1), job.text
