"""Written files in a player of pods: jobs train as local processes do, and come through faults."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from spartito.cli import main
from tests.commands import SPARTITO, commands_in
from tests.launch.containers import IMAGE
from tests.launch.held import Held
from tests.launch.pods import Player

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

Play = Callable[..., Player]
LOCAL = {
    "synchronous": ["--strategy=multi_worker_mirrored", "--workers=2"],
    "servers": [
        *("--workers=2", "--ps=2", "--chief", "--evaluator"),
        '--strategy-options={"max_staleness": 0}',
    ],
}
TRAINING = ("--epochs=3", "--seed=3")
STEPS = 125
"""Of an epoch."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """The losses of a job of local processes, epoch by epoch."""
    known: dict[str, list[float]] = {}

    def losses_of(kind: str) -> list[float]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            with commands_in(folder) as commands:
                words = ["train", "mnist", *LOCAL[kind], "--out=run", *TRAINING]
                ended = commands.start(*SPARTITO, *words, env={"OMP_NUM_THREADS": "1"}).end()
                assert ended.code == 0, ended.err
            known[kind] = losses(folder / "run")
        return known[kind]

    return losses_of


@pytest.fixture
def play(image: str, tmp_path: Path) -> Iterator[Play]:
    """Writes a file by the command and gives its player; at the end no pod is left."""
    made: list[Player] = []

    def make(target: str, *words: str, arguments: tuple[str, ...] = TRAINING) -> Player:
        own = [f"--image={IMAGE}", "--cpus=1", "--memory=1Gi", "--name=digits"]
        with chdir(tmp_path), redirect_stdout(io.StringIO()) as out:
            assert main(["cluster", "kubernetes", target, *own, *words, "--", *arguments]) == 0
        made.append(Player(list(yaml.safe_load_all(out.getvalue())), tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def losses(run: Path) -> list[float]:
    rows: list[dict[str, Any]] = []
    if (run / "history.jsonl").exists():
        rows = [json.loads(row) for row in (run / "history.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


def begin(player: Player, *later: int) -> Held:
    """Start a job; its workers wait after the first epoch, and before steps that come ``later``."""
    held = Held(player.runs / "held", STEPS, *later, inside="/runs/held")
    for job in player.jobs:
        job.container["env"] += [{"name": name, "value": held.env[name]} for name in held.env]
    player.start()
    meet(player, held, STEPS, "worker-0", "worker-1")
    assert player.are_ready
    return held


def meet(player: Player, held: Held, step: int, *tasks: str) -> None:
    """Play on until ``tasks`` wait before ``step``."""
    player.follow(until=lambda: held.came(step, *tasks))
    assert held.came(step, *tasks), player.said


def starts(player: Player) -> dict[str, int]:
    return {f"{role} {index}": state.starts for (role, index), state in player.states.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault"),
    [("job", "none"), ("jobset", "deleted"), ("trainjob", "evicted"), ("job", "killed")],
)
def test_a_synchronous_job(
    play: Play, local: Callable[[str], list[float]], kind: str, fault: str
) -> None:
    player = play("mnist", f"--kind={kind}", *LOCAL["synchronous"])
    held = begin(player)
    if fault == "killed":
        player.crash("worker", 0)
    elif fault != "none":  # who is told to end lets both go on
        player.delete("worker", 1, evicted=fault == "evicted")
    held.let_go(STEPS)
    assert player.follow(), player.said
    codes = {state_of: state.codes for state_of, state in player.states.items()}
    if fault == "none":
        assert codes == {("worker", 0): [0], ("worker", 1): [0]}
    elif fault == "killed":  # the newest backup
        assert codes == {("worker", 0): [137, 0], ("worker", 1): [69, 0]}
    else:  # both save the step at which one was told to end
        assert codes == {("worker", 0): [75, 0], ("worker", 1): [75, 0]}
    assert fault == "none" or "going on after step" in "".join(player.said)
    assert sum(state.failures for state in player.states.values()) == 2 * (fault == "killed")
    assert losses(player.runs / "digits") == local("synchronous")


@pytest.mark.slow
def test_parameter_servers(play: Play, local: Callable[[str], list[float]]) -> None:
    player = play("mnist", "--kind=job", *LOCAL["servers"])
    begin(player).let_go(STEPS)
    assert player.follow(), player.said
    assert set(starts(player).values()) == {1}
    # Pushes of one round are added up as they come.
    assert losses(player.runs / "digits") == pytest.approx(local("servers"), rel=1e-4)
    assert (player.runs / "digits" / "evaluations.jsonl").is_file()


@pytest.mark.slow
def test_parameter_servers_of_which_a_worker_is_deleted_and_one_is_killed(
    play: Play, local: Callable[[str], list[float]]
) -> None:
    player = play("mnist", "--kind=job", *LOCAL["servers"])
    held = begin(player, 2 * STEPS)
    player.delete("worker", 1)  # comes back, and finds a checkpoint of the running job
    meet(player, held, 2 * STEPS, "worker-0")
    player.crash("ps", 1)
    held.let_go(2 * STEPS)
    assert player.follow(), player.said
    lost = {"worker 1", "ps 1"}
    assert {name for name, count in starts(player).items() if count == 2} == lost
    assert player.states["worker", 1].codes == [75, 0]
    found = losses(player.runs / "digits")
    # What came since a server's snapshot is computed again, so that the way there is another one.
    assert found[-1] == pytest.approx(local("servers")[-1], abs=0.08)
    for number in range(2):  # each worker's part of each step, once
        record = json.loads((player.runs / "digits" / f"tasks/ps-{number}.json").read_text())
        assert record["work_items"] == 2 * len(found) * STEPS


@pytest.mark.slow
def test_others_go_on_without_a_pod_that_is_replaced(play: Play) -> None:
    player = play("mnist", "--kind=jobset", "--recover", *LOCAL["synchronous"])
    held = begin(player)
    player.crash("worker", 1)
    held.let_go(STEPS)
    assert player.follow(), player.said
    assert starts(player) == {"worker 0": 1, "worker 1": 2, "store 0": 1}
    assert len(losses(player.runs / "digits")) == 3


SERVES_FOR_EVER = """
import json, os, time
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
    time.sleep(3600)
"""


def test_a_server_that_waits_when_the_work_is_done_is_ended(play: Play, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SERVES_FOR_EVER)
    player = play("train.py", "--kind=jobset", "--chief", "--workers=1", "--ps=1", arguments=())
    player.start()
    assert player.follow(), player.said
    assert player.states["ps", 0].done == "ended"


@pytest.mark.parametrize(("code", "count"), [(2, 1), (1, 4), (69, 4)])
def test_a_pod_that_fails_for_good_ends_the_job(
    play: Play, tmp_path: Path, code: int, count: int
) -> None:
    (tmp_path / "train.py").write_text(f"import sys; sys.exit({code})")
    player = play("train.py", "--kind=job", arguments=())
    player.start()
    assert not player.follow()
    assert starts(player) == {"worker 0": count}
