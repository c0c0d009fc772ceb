"""Groups that hold other strategies: numbers of plain torch, a part of the model on each task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replicas import Replicas
from tests.strategies import jobs as contract_jobs
from tests.strategies import local_by_torch, sharded_jobs
from tests.strategies import local_jobs as jobs
from tests.strategies.test_contracts import close, run

slow = pytest.mark.slow

FOUR: dict[str, Any] = {"groups": [[0, 3], [1, 2]], "inside": "sharded"}
"""Two groups of two, which are no neighbours."""


@pytest.mark.parametrize(
    ("options", "inner"),
    [
        ({"every": 3, "outer": "diloco"}, "adamw"),
        pytest.param(
            {"every": 2, "communication": "sockets", "inside": "sharded(block_bytes=100)"},
            "sgd",
            marks=slow,
        ),
        pytest.param(
            {
                "every": 4,
                "inside": "sharded(zero=2)",
                "fragments": 2,
                "outer": "adam",
                "weights": "equal",
            },
            "adamw",
            marks=slow,
        ),
        pytest.param(
            {"every": 4, "fragments": 2, "overlap": 1, "mixing": 0.25, "inside": "sharded(zero=1)"},
            "sgd",
            marks=slow,
        ),
        pytest.param(
            {"every": 4, "overlap": 2, "communication": "sockets", "outer": "diloco"},
            "adamw",
            marks=slow,
        ),
        ({"every": 3, "outer": "diloco", "groups": 2, "inside": "mesh(model=2)"}, "adamw"),
        ({"every": 3, "groups": 2, "inside": "pipeline(microbatches=2)"}, "adamw"),
        pytest.param(
            {"every": 4, "groups": 2, "inside": "mesh(model=2)", "fragments": 2, "outer": "adam"},
            "sgd",
            marks=slow,
        ),
        pytest.param(
            {"every": 4, "groups": 2, "inside": "mesh", "overlap": 2, "communication": "sockets"},
            "adamw",
            marks=slow,
        ),
        pytest.param(
            {
                "every": 4,
                "groups": 2,
                "inside": "pipeline",
                "fragments": 2,
                "overlap": 1,
                "outer": "diloco",
            },
            "sgd",
            marks=slow,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [8, pytest.param(4, marks=slow)])
def test_numbers_are_those_of_plain_torch(
    replicas: Replicas, options: dict[str, Any], inner: str, batch: int
) -> None:
    """Also where the last batch has two examples: then one of two replicas has none."""
    given = {**FOUR, **options}
    result = run(replicas, ("local_sgd", 4, given), jobs.trained, inner=inner, batch=batch)
    expected = local_by_torch.by_torch(
        [[0, 1], [2, 3]] if given["groups"] == 2 else given["groups"],
        given["every"],
        given.get("outer", "average"),
        inner,
        given.get("weights") == "equal",
        given.get("fragments", 1),
        given.get("overlap", 0),
        given.get("mixing", 0.5 if "overlap" in given else 0.0),
        batch=batch,
    )
    close(result["weights"], expected["weights"])
    if "here" in result:
        close(result["here"], expected["weights"])
    numel = sum(value.numel() for value in expected.pop("weights").values())
    history = result["history"]
    for name, curve in expected.items():
        if name == "drift":  # a difference of two sums of squares
            assert history[name] == pytest.approx(curve, rel=1e-6, abs=1e-7), name
        else:
            close(history[name], curve)
    if "fragments" not in options and "mesh" not in given["inside"]:  # what is whole goes twice
        assert history["bytes_between_groups"] == [n * 2 * 8 * numel for n in history["meetings"]]


MIRRORED = {"groups": FOUR["groups"]}
KINDS: list[tuple[str, str, float | None]] = [
    ("mlp", "SGD", None),
    ("frozen", "SGD", None),
    ("views", "SGD", None),
    ("gpt", "SGD", None),
]


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"inside": "sharded(block_bytes=100)"},
        {"communication": "sockets", "inside": "sharded(block_bytes=300)"},
        {"inside": "sharded(zero=2)"},
    ],
    ids=str,
)
@pytest.mark.parametrize("between", [None, sharded_jobs.write], ids=["plain", "written"])
def test_a_meeting_after_each_update_of_sgd_is_plain_torch(
    replicas: Replicas, options: dict[str, Any], between: sharded_jobs.Between | None
) -> None:
    """Tied, frozen and unused parameters, and what a script writes into them, too."""
    given = {**FOUR, "every": 1, **options}
    cases = KINDS[:1] if between is not None else KINDS
    found = replicas(sharded_jobs.by_strategy, 4, "local_sgd", given, cases, between)
    for number, case in enumerate(cases):
        of_groups = zip(found[0][number], found[1][number], strict=True)
        losses = [(one + other) / 2 for one, other in of_groups]  # they have as many examples
        plain = sharded_jobs.by_torch(*case, between)
        assert losses == pytest.approx(plain, rel=0, abs=1e-12), case


@slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"communication": "sockets", "inside": "sharded(block_bytes=100)"},
        {"inside": "sharded(zero=1)", "fragments": 2},
    ],
    ids=str,
)
def test_numbers_are_those_of_groups_of_replicas(
    replicas: Replicas, options: dict[str, Any]
) -> None:
    """Norms that clip are those of a group, statistics of BatchNorm those of all."""
    coupled = {"every": 3, "outer": "diloco", "fragments": options.get("fragments", 1)}
    here = ("local_sgd", 4, {**FOUR, **coupled, **options})
    there = ("local_sgd", 4, {**MIRRORED, **coupled})
    left = run(replicas, here, jobs.clipped)
    right = run(replicas, there, jobs.clipped)
    for found in (left, right):
        del found["history"]["drift"]  # a difference of two sums of squares
    close(left, right)
    close(
        run(replicas, here, jobs.glanced, looks=True),
        run(replicas, there, jobs.glanced, looks=True),
    )


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"compress": "4bit"},
        {"inside": "sharded(zero=2)", "fragments": 2, "compress": "topk:0.1"},
        {"overlap": 2, "communication": "sockets"},
        {"overlap": 2, "inside": "sharded(zero=1)", "compress": "bf16", "fragments": 2},
    ],
    ids=str,
)
def test_a_training_goes_on_where_it_was(
    replicas: Replicas, options: dict[str, Any], tmp_path: Path
) -> None:
    """To the last bit, between two meetings or during one; as replicas too, to rounding."""
    case = ("local_sgd", 4, {**FOUR, "every": 3, "outer": "diloco", **options})
    given, job = {"folder": str(tmp_path)}, contract_jobs.checkpoint_and_resume
    whole = run(replicas, case, job, phase="whole", **given)
    run(replicas, case, job, phase="save", **given)
    resumed = run(replicas, case, job, phase="resume", **given)
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name
    assert whole["history"]["loss"][-1] < whole["history"]["loss"][0]
    if "compress" not in options:  # codes have blocks, which begin elsewhere
        rest = {k: v for k, v in case[2].items() if k != "inside"}
        again = run(replicas, ("local_sgd", 4, rest), job, phase="resume", **given)
        close(again["weights"], whole["weights"])


@slow
def test_looking_at_it_between_meetings_changes_nothing(replicas: Replicas, tmp_path: Path) -> None:
    """And others go on from the merged model."""
    two: dict[str, Any] = {"epochs": 1, "examples": 2 * jobs.BATCH}  # what there is after two steps
    expected = local_by_torch.by_torch(FOUR["groups"], 50, **two)["weights"]
    for options in (
        {"inside": "sharded(zero=3)"},
        {"inside": "sharded(zero=2)"},
        {"communication": "sockets"},
    ):
        case = ("local_sgd", 4, {**FOUR, "every": 4, **options})
        folder = tmp_path / str(len(options)) / next(iter(map(str, options.values())))
        left = run(replicas, case, jobs.looked_at, at=())
        found = run(replicas, case, jobs.looked_at, at=(2, 4, 5), folder=str(folder))
        for name, value in left["weights"].items():
            assert torch.equal(found["weights"][name], value), name
        readers: tuple[Any, ...] = (
            ("mirrored", 2, {}),
            ("local_sgd", 3, {"groups": 3, "every": 4}),
        )
        for reader in readers if options == {"inside": "sharded(zero=3)"} else ():
            found = run(replicas, reader, jobs.loaded, path=str(folder / "2"))
            close(found["before"], expected)
            assert found["steps"] == 6


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"inside": "mirrored"},
        {},
        {"inside": "sharded(zero=2)"},
        {"communication": "sockets", "inside": "sharded(block_bytes=100)"},
    ],
    ids=str,
)
def test_what_is_written_into_a_model_that_is_only_shown_is_refused(
    replicas: Replicas, options: dict[str, Any]
) -> None:
    """By all tasks, whoever wrote; what is put back leaves nothing behind, on no page of memory."""
    given = {**FOUR, "every": 4, **options}
    for how, names in (("in place", ("0.bias", "3.bias")), ("set", ("3.bias",))):
        found = replicas(jobs.written_amid, 4, "local_sgd", given, how)
        for said in found:
            assert "changed while the model showed the merged values" in said
            assert any(name in said for name in names)
    expected = local_by_torch.by_torch(FOUR["groups"], 4, epochs=1)["weights"]
    close(run(replicas, ("local_sgd", 4, given), jobs.written_amid, how="back"), expected)


@slow
@pytest.mark.parametrize(
    "options",
    [{"inside": "mirrored"}, {}, {"inside": "sharded(zero=1)"}, {"communication": "sockets"}],
    ids=str,
)
def test_what_is_written_while_a_meeting_is_under_way_is_kept(
    replicas: Replicas, options: dict[str, Any]
) -> None:
    """After the last batch, when no update takes it in first."""
    case = ("local_sgd", 4, {**FOUR, "every": 4, "overlap": 2, **options})
    expected = local_by_torch.by_torch(
        FOUR["groups"], 4, delay=2, mixing=0.5, epochs=2, halved=True
    )
    close(run(replicas, case, jobs.halved), expected["weights"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        *[
            pytest.param(each, marks=slow)
            for each in ({"inside": "sharded(zero=1)"}, {"communication": "sockets"})
        ],
    ],
    ids=str,
)
def test_each_task_has_its_part(replicas: Replicas, options: dict[str, Any]) -> None:
    """Of the optimizer's state, of where groups began, and of the outer optimizer's state."""
    found = replicas(jobs.held, 4, "local_sgd", {**FOUR, "outer": "diloco", "every": 1, **options})
    numel = found[0]["model"]
    for name in (
        "state",
        "start",
        "outer",
        *(["own"] if "zero=1" not in options.get("inside", "") else []),
    ):
        shares = [each[name] for each in found]
        assert sum(shares) == pytest.approx(2 * numel, abs=4 * 64), name
        assert max(shares) <= numel / 2 + 64, name


@slow
@pytest.mark.parametrize("way", ["auto", "sockets", "beside"])
def test_a_lost_task_is_named_in_all_groups(replicas: Replicas, way: str) -> None:
    options: dict[str, Any] = {**FOUR, "every": 3}
    options |= {"overlap": 2} if way == "beside" else {"communication": way}
    found = replicas.outcomes(jobs.killed, 4, "local_sgd", options, 2)
    for said in (*found[:2], *found[3:]):
        assert re.match(r"worker 2 .*is gone", said), found


def test_what_cannot_be_is_refused(replicas: Replicas) -> None:
    for options, kind, text in (
        ({"inside": "shards"}, "", "'shards' is not a strategy"),
        ({"inside": "central_storage"}, "", "local_sgd cannot hold central_storage"),
        ({"inside": "sharded(zero=4)"}, "", "zero=4"),
        ({"inside": "sharded(block_bytes=0)"}, "", "block_bytes=0"),
        ({"inside": "sharded(timeout=3)"}, "", "timeout is an option of the whole job"),
        ({"inside": "mesh(model=2)"}, "", r"model=2 in a job of 1 tasks"),
        ({"inside": "sharded", "groups": [[0], [1, 2]]}, "", "groups of 1 and 2 tasks that have a"),
        ({"inside": "sharded", "sites": 3, "every": [1, 2]}, "", "sites=3 of groups whose tasks"),
        ({"inside": "sharded", "groups": 1}, "halves", "an outer Rprop with 2 groups"),
    ):
        for found in replicas(jobs.refusal, 3, "local_sgd", {"groups": 3, **options}, kind):
            assert re.match(text, found.removeprefix("worker 0: ")), (options, kind, found)


def test_one_group_is_sharded(replicas: Replicas) -> None:
    one: Any = ("local_sgd", 2, {"groups": 1, "inside": "sharded"})
    other: Any = ("sharded", 2, {})
    left, right = (run(replicas, each, contract_jobs.fit_mlp) for each in (one, other))
    close(left, right)


@slow
@pytest.mark.parametrize("options", [{}, {"compress": "4bit"}, {"communication": "sockets"}])
def test_shards_without_elements(
    replicas: Replicas, options: dict[str, Any], tmp_path: Path
) -> None:
    given = {"groups": 2, "every": 3, "outer": "diloco", **options}
    here: Any = ("local_sgd", 4, {**given, "inside": "sharded"})
    left = run(replicas, here, jobs.few, folder=str(tmp_path))
    close(left, run(replicas, ("local_sgd", 4, given), jobs.few, folder=str(tmp_path)))
