"""What any strategy has saved any other one loads, and goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spartito.checkpoint.manager import read_checkpoint
from spartito.checkpoint.stored_parts import Reader
from spartito.storage.atomic import FORMAT
from tests.replicas import Replicas
from tests.strategies import jobs
from tests.strategies.test_contracts import (
    CASES,
    Case,
    close,
    common,
    is_coupled,
    marks,
    named,
    run,
)

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def whole(replicas: Replicas) -> Outcome:
    """A training that was never interrupted; that it equals plain torch is tested elsewhere."""
    found: Outcome = run(replicas, CASES[0], jobs.checkpoint_and_resume, folder="", phase="whole")
    return found


SAVING: list[Case] = [
    *CASES,
    ("sharded", 2, {"copies": 2}),
    ("tests.strategies.paired:CutStrategy", 4, {}),  # its tasks have parts of the parameters
]
"""All that the contracts are tested under, and more ways in which a state lies on tasks."""


class Written:
    """Folders with a checkpoint in the middle of an epoch, each written when it is asked for."""

    def __init__(self, replicas: Replicas, folder: Path) -> None:
        self._replicas, self._folder = replicas, folder

    def by(self, case: Case) -> str:
        """The one of this strategy."""
        folder = str(self._folder / named(case).replace("/", "-"))
        if not Path(folder).exists():
            run(self._replicas, case, jobs.checkpoint_and_resume, folder=folder, phase="save")
        return folder


@pytest.fixture(scope="module")
def written(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(replicas, tmp_path_factory.mktemp("written"))


FIRST = {case[0]: case for case in reversed(SAVING)}
"""A form of each strategy for the quick tests; the others are among the slow ones."""
ORDER = sorted(FIRST)


def neighbours(reader: Case, writer: Case) -> bool:
    """Whether training goes on from this writer in the quick tests.

    From its own, that of one device, and the next one in a circle of all strategies; the slow
    tests have all others.
    """
    apart = (ORDER.index(writer[0]) - ORDER.index(reader[0])) % len(ORDER)
    return writer is FIRST[writer[0]] and (apart <= 1 or writer is CASES[0])


def reading() -> list[Any]:
    """Who reads whose checkpoints, and from which of them it goes on."""
    given = []
    for case in SAVING:
        others = [one for one in SAVING if one is FIRST[one[0]]]
        near = [one for one in others if neighbours(case, one)]
        copied = [one for one in SAVING if one not in near]
        if case is not FIRST[case[0]]:
            night = (pytest.mark.slow, pytest.mark.night)
            given.append(pytest.param(case, others, copied, marks=night, id=named(case)))
            continue
        quick = [one for one in copied if one in others or (case is CASES[0] and not marks(one))]
        far = [one for one in others if one not in near]
        rest = [one for one in SAVING if one not in (*near, *quick, *far)]
        given += [
            pytest.param(case, near, quick, id=named(case)),
            pytest.param(case, far, rest, marks=pytest.mark.slow, id=f"{named(case)}-rest"),
        ]
    return given


@pytest.mark.parametrize(("case", "resumed", "copied"), reading())
def test_a_checkpoint_of_any_strategy_loads(
    replicas: Replicas,
    case: Case,
    resumed: list[Case],
    copied: list[Case],
    written: Written,
    whole: Outcome,
    tmp_path: Path,
) -> None:
    """Bit by bit, of each writer; and from one of each strategy's training goes on as if never
    interrupted.
    """
    apart = case[0] == "parameter_server" or case[2].get("communication") == "ddp"
    writers = [*resumed, *(() if case[0] == "parameter_server" else copied)]
    given = [
        (
            written.by(writer),
            "resume" if writer in resumed else "copy",
            str(tmp_path / str(number)),
        )
        for number, writer in enumerate(writers)
    ]
    # Servers, and what DDP builds on, last as long as a job, so each is one of its own.
    parts = [[one] for one in given] if apart else [given]
    loaded = [each for part in parts for each in run(replicas, case, jobs.load_each, given=part)]
    for outcome, writer, (folder, phase, again) in zip(loaded, writers, given, strict=True):
        same(read_checkpoint(again), read_checkpoint(folder))
        if phase == "copy" or is_coupled(case) or is_coupled(writer):
            continue
        assert outcome["epochs"] == [2, 3], folder
        close(outcome["weights"], whole["weights"])
        expected = {name: values[2:] for name, values in whole["history"].items()}
        close(common(outcome["history"], expected), expected)


def same(one: Outcome, other: Outcome) -> None:
    """The same bits in model and optimizer; how an update is computed may be another way."""
    groups = [state["optimizer"].pop("groups") for state in (one, other)]
    for mine, theirs in zip(*groups, strict=True):
        for key in mine.keys() - {"fused", "foreach"}:
            assert mine[key] == theirs[key], key
    for section in ("model", "optimizer"):
        found, expected = (dict(leaves(state[section])) for state in (one, other))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a nested dict, by their paths."""
    for key, value in tree.items():
        if torch.is_tensor(value):
            yield path + key, value
        elif isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")


def test_each_task_writes_its_own_part(written: Written) -> None:
    folder = written.by(SAVING[-1])
    files = sorted(file.name for file in Path(folder).iterdir())
    assert files == [
        "manifest.json",
        *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)),
        *(f"optimizer-0000{number}-of-00002.safetensors" for number in (1, 2)),
        "state.json",
        "trainer.safetensors",
    ]
    read = Reader(folder, "model")
    slots = (stored.slot for name in read.names for stored in read._of(name)[1:])
    shapes = {slot.name: slot.box.sizes for slot in slots}
    assert shapes == {"0.weight": (4, 6), "3.weight": (2, 8)}
    for case in SAVING:
        if case[0] == "central_storage":  # each keeps the optimizer's state of some elements
            assert len(Reader(written.by(case), "optimizer").files) == case[1]


GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("format-*/*"))


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=named)
def test_a_checkpoint_of_an_earlier_version_loads(
    replicas: Replicas, case: Case, folder: Path, whole: Outcome
) -> None:
    """They were written by ``tests/golden/make.py``, on another machine and by another torch."""
    job = jobs.checkpoint_and_resume
    if folder.name == "accumulated":
        job = partial(job, accumulate=2)
        whole = run(replicas, CASES[0], job, folder="", phase="whole")
    resumed = run(replicas, case, job, folder=str(folder), phase="resume")
    assert resumed["epochs"] == [2, 3]
    for name, value in whole["weights"].items():
        assert torch.allclose(resumed["weights"][name], value, rtol=0, atol=1e-8), name


def test_each_format_has_its_checkpoints() -> None:
    formats = {path.parent.name for path in GOLDEN}
    assert formats == {f"format-{number}" for number in range(1, FORMAT + 1)}
    assert len(GOLDEN) == 5 * FORMAT
