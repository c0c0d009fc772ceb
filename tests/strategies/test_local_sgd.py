"""local_sgd: its numbers are those of plain torch, and what it cannot do it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from spartito.checkpoint.manager import read_trees
from tests.replicas import Replicas
from tests.strategies import jobs as contract_jobs
from tests.strategies import local_by_torch, task_jobs
from tests.strategies import local_jobs as jobs
from tests.strategies.jobs import blobs, mlp
from tests.strategies.test_contracts import CASES, close, run


def slow(*given: Any) -> list[Any]:
    """What the quick tests have in other forms."""
    return [pytest.param(one, marks=pytest.mark.slow) for one in given]


UNEVEN = [[0, 2], [1]]
"""The first group has two of three replicas, so two thirds of the examples."""


@pytest.mark.parametrize(
    ("options", "inner"),
    [
        ({"groups": 2, "every": 3}, "adamw"),
        ({"groups": [[0], [1]], "every": 4, "outer": "diloco"}, "sgd"),
        ({"groups": UNEVEN, "every": 2, "outer": "diloco"}, "adamw"),
        ({"groups": UNEVEN, "every": 50, "outer": "adam", "weights": "equal"}, "sgd"),
        ({"groups": UNEVEN, "every": 2, "communication": "sockets"}, "sgd"),
        ({"groups": UNEVEN, "every": 4, "fragments": 2, "outer": "diloco"}, "adamw"),
        ({"groups": 2, "every": 4, "fragments": 2, "overlap": 1, "outer": "diloco"}, "adamw"),
        ({"groups": UNEVEN, "every": 4, "fragments": 2, "overlap": 3, "mixing": 0.25}, "sgd"),
        ({"groups": UNEVEN, "every": 2, "overlap": 2, "mixing": 0, "weights": "equal"}, "adamw"),
        ({"groups": 2, "every": 3, "overlap": 0, "mixing": 0.5, "outer": "diloco"}, "sgd"),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [8, 3])
def test_numbers_are_those_of_plain_torch(
    replicas: Replicas, options: dict[str, Any], inner: str, batch: int
) -> None:
    """Also with three examples in a batch: then some groups have none."""
    groups = [[0], [1]] if options["groups"] == 2 else options["groups"]
    count = sum(map(len, groups))
    result = run(replicas, ("local_sgd", count, options), jobs.trained, inner=inner, batch=batch)
    expected = local_by_torch.by_torch(
        groups,
        options["every"],
        options.get("outer", "average"),
        inner,
        options.get("weights") == "equal",
        options.get("fragments", 1),
        options.get("overlap", 0),
        options.get("mixing", 0.5 if "overlap" in options else 0.0),
        batch=batch,
    )
    close(result["weights"], expected["weights"])
    close(result["here"], expected["weights"])
    numel = sum(value.numel() for value in expected.pop("weights").values())
    history = result["history"]
    for name, curve in expected.items():
        if name == "drift":  # a difference of two sums of squares
            assert history[name] == pytest.approx(curve, rel=1e-6, abs=1e-7), name
        else:
            close(history[name], curve)
    if "fragments" in options:
        return
    assert history["bytes_between_groups"] == [n * 2 * 8 * numel for n in history["meetings"]]


@pytest.mark.parametrize("batch", [4, 8])
def test_numbers_do_not_depend_on_the_replicas_of_a_group(replicas: Replicas, batch: int) -> None:
    """The last batch, of one row or six, is cut among the groups first."""
    size: dict[str, int] = {"batch": batch, "examples": 22 if batch > 4 else 21, "epochs": 2}
    expected = local_by_torch.by_torch([[0], [1]], 3, **size)  # type: ignore[arg-type]
    for count in 2, 4:
        options = {"groups": 2, "every": 3}
        case = ("local_sgd", count, options)
        found = run(replicas, case, jobs.trained, deterministic=True, **size)
        close(found["weights"], expected["weights"])
        close(found["history"]["loss"], expected["loss"])


SITES: dict[str, Any] = {"groups": [[0, 3], [1], [2]], "sites": [[0, 2], [1]], "every": [2, 4]}
"""Two groups are in the first site, of which one has two replicas."""


@pytest.mark.parametrize(
    ("options", "inner"),
    [
        ({}, "adamw"),
        ({"outer": "diloco", "communication": "sockets"}, "sgd"),
        ({"outer": "diloco", "weights": "equal", "every": [1, 50]}, "adamw"),
    ],
    ids=str,
)
def test_sites_are_those_of_plain_torch(
    replicas: Replicas, options: dict[str, Any], inner: str
) -> None:
    """The last batch of an epoch has two examples: then one site has none."""
    given, trained = {**SITES, **options}, {"inner": inner, "batch": 4}
    result = run(replicas, ("local_sgd", 4, given), jobs.trained, **trained)
    expected = local_by_torch.sites_by_torch(
        given["groups"],
        given["sites"],
        given["every"],
        options.get("outer", "average"),
        inner,
        options.get("weights") == "equal",
        batch=4,
    )
    close(result["weights"], expected["weights"])
    close(result["here"], expected["weights"])
    numel = sum(value.numel() for value in expected.pop("weights").values())
    history = result["history"]
    for name, curve in expected.items():
        close(history[name], curve)
    near, far = history["meetings"], history["meetings_of_sites"]
    assert history["bytes_between_sites"] == [n * 2 * 8 * numel for n in far]
    sums = [2 * n + m for n, m in zip(near, far, strict=True)]  # and what all agreed on
    assert history["bytes_between_groups"] == [n * 8 * numel for n in sums]


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 7, "examples": 22, "dropout": 0.5},  # the last batch has one example
        {"accumulate": 3, "schedule": True, "loss": "weighted"},
    ],
    ids=["uneven", "weighted"],
)
def test_a_meeting_after_each_update_of_sgd_is_one_device(
    replicas: Replicas, options: dict[str, Any]
) -> None:
    case = ("local_sgd", 3, {"groups": UNEVEN, "every": 1})
    result = run(replicas, case, contract_jobs.fit_mlp, optimizer="SGD", **options)
    expected = run(replicas, CASES[0], contract_jobs.fit_mlp, optimizer="SGD", **options)
    for curves in ("history", "again"):  # the rest are the groups' own
        result[curves] = {name: result[curves][name] for name in expected[curves]}
    close(result, expected)


def test_one_group_is_mirrored_and_two_runs_are_equal(replicas: Replicas) -> None:
    apart = ("local_sgd", 3, {"groups": UNEVEN, "every": 4, "outer": "diloco"})
    beside = (*apart[:2], {**apart[2], "overlap": True, "compress": "4bit"})
    for one, other in (
        (("local_sgd", 2, {"groups": 1}), ("mirrored", 2, {})),
        (apart, apart),
        (beside, beside),
    ):
        same(
            run(replicas, one, jobs.trained, deterministic=True),
            run(replicas, other, jobs.trained, deterministic=True),
        )


def same(left: Any, right: Any) -> None:
    """Equal to the last bit."""
    for name, value in left["weights"].items():
        assert torch.equal(value, right["weights"][name]), name
    assert left["history"] == right["history"]


@pytest.mark.parametrize(
    "options", [{"every": 4}, {"every": 4, "overlap": 2}, {**SITES, "every": [1, 4]}], ids=str
)
def test_looking_at_it_between_meetings_changes_nothing(
    replicas: Replicas, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also after the second update, when a meeting may be under way."""
    case = ("local_sgd", 3, {"groups": UNEVEN, **options})
    two: dict[str, Any] = {"epochs": 1, "examples": 2 * jobs.BATCH}  # what there is after two steps
    expected = local_by_torch.by_torch(UNEVEN, 50, **two)
    if "sites" in options:
        case = ("local_sgd", 4, options)
        expected = local_by_torch.sites_by_torch(SITES["groups"], SITES["sites"], [1, 50], **two)
    left = run(replicas, case, jobs.looked_at, at=())
    found = run(replicas, case, jobs.looked_at, at=(2, 4, 5), folder=str(tmp_path))
    same(found, left)
    merged = mlp()
    merged.load_state_dict(expected["weights"])
    x, y = blobs(jobs.EXAMPLES)
    close(found["seen"][0], nn.functional.cross_entropy(merged(x), y).item())
    for name, value in load_file(tmp_path / "2" / "model.safetensors").items():
        close(value, expected["weights"][name])
    other = ("local_sgd", 2, {"groups": 2, "every": 4})
    for reader in (other, ("mirrored", 2, {})):  # other groups begin from the merged model
        found = run(replicas, reader, jobs.loaded, path=str(tmp_path / "2"))
        close(found["before"], expected["weights"])
        assert found["steps"] == 6


@pytest.mark.parametrize(
    "options",
    [
        {"compress": "topk:0.1", "fragments": 2},
        {"overlap": 2, "compress": "4bit"},
        {"overlap": 2, "fragments": 2, "mixing": 0},
        {**SITES, "every": [3, 6], "compress": "4bit", "fragments": 2, "weights": "equal"},
        *slow(
            {"compress": "bf16"},
            {"compress": "4bit", "fragments": 2},
            {"fragments": 2},
            {"overlap": 2, "fragments": 2, "compress": "topk:0.1"},
            {**SITES, "every": [1, 3]},  # a site has just met
        ),
    ],
    ids=str,
)
def test_a_training_goes_on_where_it_was(
    replicas: Replicas, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also with what was left out so far, between two meetings or during one, and in fragments."""
    count = 4 if "sites" in options else 3
    case = ("local_sgd", count, {"groups": UNEVEN, "every": 3, "outer": "diloco", **options})
    given = {"folder": str(tmp_path)}
    whole = run(replicas, case, contract_jobs.checkpoint_and_resume, phase="whole", **given)
    run(replicas, case, contract_jobs.checkpoint_and_resume, phase="save", **given)
    resumed = run(replicas, case, contract_jobs.checkpoint_and_resume, phase="resume", **given)
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name
    saved = read_trees(tmp_path)["groups"]["common"]["fragments"]
    assert all(("due" in each) == ("overlap" in options) for each in saved)
    assert whole["history"]["loss"][-1] < whole["history"]["loss"][0]


def test_what_it_cannot_do_is_refused(replicas: Replicas) -> None:
    for options, kind, text in (
        ({"groups": 3}, "", "groups=3 of 2 replicas"),
        ({"every": 0}, "", "every=0"),
        ({"fragments": 0}, "", "fragments=0"),
        ({"fragments": 3, "every": 2}, "", "fragments=3 with every=2"),
        ({"fragments": 3}, "", "fragments=3 of a model of 2 layers"),
        ({"compress": "4bits"}, "", "compress='4bits'"),
        ({"overlap": 21}, "", "overlap=21 with every=20"),
        ({"overlap": "yes"}, "", "overlap='yes' with every=20"),
        ({"mixing": 1.5}, "", "mixing=1.5"),
        ({"sites": 2, "every": [2, 4], "overlap": 1}, "", "overlap=1, mixing=None with sites"),
        ({"sites": 2}, "", "every=20 with sites=2"),
        ({"sites": 3, "every": [2, 4]}, "", "sites=3 of 2 groups"),
        ({}, "outer", "LBFGS as outer optimizer"),
        ({}, "model", "worker 1 .*has another model than worker 0"),
    ):
        for found in replicas(jobs.refusal, 2, "local_sgd", options, kind):
            assert re.match(text, found.removeprefix("worker 0: ")), (options, kind, found)


@pytest.mark.parametrize("options", [{"every": 4}, {**SITES, "every": [2, 4]}], ids=str)
def test_what_is_written_into_a_model_that_is_only_shown_is_refused(
    replicas: Replicas, options: dict[str, Any]
) -> None:
    """Also where one task alone did; what is put back is no matter."""
    given = {"groups": UNEVEN, **options}
    count = 4 if "sites" in options else 3
    for how in ("in place", "chief"):
        for said in replicas(jobs.written_amid, count, "local_sgd", given, how):
            assert "0.bias and 3.bias changed while the model showed the merged values" in said
    found = run(replicas, ("local_sgd", count, given), jobs.written_amid, how="back")
    expected = local_by_torch.by_torch(UNEVEN, 4, epochs=1)
    if "sites" in options:
        expected = local_by_torch.sites_by_torch(SITES["groups"], SITES["sites"], [2, 4], epochs=1)
    close(found, expected["weights"])


@pytest.mark.parametrize("way", ["auto", "sockets", "process_group", "beside", "sites"])
def test_a_lost_task_is_named_in_all_groups(replicas: Replicas, way: str) -> None:
    options: dict[str, Any] = {"groups": [[0], [1, 2]], "every": 3}
    options |= {"overlap": 2} if way == "beside" else {"communication": way}
    if way == "sites":  # who is lost is in a group without a leader of all
        options = {"groups": [[0], [1, 2], [3]], "sites": [[0, 1], [2]], "every": [1, 4]}
    count = 4 if way == "sites" else 3
    found = replicas.outcomes(jobs.killed, count, "local_sgd", options, 2)
    for said in (*found[:2], *found[3:]):
        assert re.match(r"worker 2 .*is gone", said), said


def test_what_the_chief_does_alone_is_named_in_all_sites(
    replicas: Replicas, tmp_path: Path
) -> None:
    options = {"groups": [[0], [1], [2]], "sites": [[0, 2], [1]], "every": [1, 3]}
    found = replicas(task_jobs.chief_alone, 3, "local_sgd", options, "evaluate", str(tmp_path))
    for said in found:
        assert said.startswith("MismatchedCallsError: the replicas make different calls")
