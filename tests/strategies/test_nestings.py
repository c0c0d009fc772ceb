"""Strategies that nest: each equals a plain torch loop, and goes on under another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import spartito as sp
from spartito.declared import Declared, parse
from tests.commands import cluster_of, tf_config
from tests.replicas import Replicas
from tests.strategies import nesting_jobs as jobs
from tests.strategies.test_contracts import close

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "strategies" / "nesting.md"
slow = pytest.mark.slow

DIVIDED = [
    "mesh(model=2, zero=1)",
    "mesh(model=2, zero=2)",
    "mesh(model=2, zero=3)",
    'mesh(model=2, zero=3, communication="sockets")',
    "pipeline(stages=2, microbatches=2, zero=1)",
    "pipeline(stages=2, microbatches=2, zero=2)",
    "pipeline(stages=2, microbatches=2, zero=3)",
    'pipeline(stages=2, microbatches=2, zero=3, communication="sockets")',
    "pipeline(mesh={'pipeline': 2, 'data': 1, 'model': 2}, microbatches=2)",
    "sharded(zero=2, copies=2)",
]
"""On four tasks: who has the same part of a model keeps shards of it, or all of it."""

EIGHT = ["pipeline(mesh={'pipeline': 2, 'data': 2, 'model': 2}, microbatches=2, zero=1)"]

HELD = [
    "mirrored",
    "multi_worker_mirrored",
    "sharded(zero=1)",
    "sharded(zero=2)",
    "sharded(zero=3)",
    "mesh(model=2)",
    "pipeline(stages=2, microbatches=2)",
]
"""By two groups of two tasks."""

HELD_BY_FOUR = [
    'mesh(mesh={"data": 2, "model": 2})',
    "mesh(model=2, zero=1)",
    "mesh(model=2, zero=2)",
    "pipeline(stages=2, microbatches=2, zero=1)",
    "sharded(zero=2, copies=2)",
]
"""By two groups of four."""

EVERY = 3


SERVED = HELD[:-1]
"""By two groups of two tasks over servers, beside a chief that computes nothing."""


def of_groups(inside: str) -> str:
    return f"local_sgd(groups=2, every={EVERY}, inside={inside})"


def over_servers(inside: str, more: str = "") -> str:
    servers = f'servers={{"min_shard_bytes": 16{more}}}'
    return f"parameter_server(groups=2, every={EVERY}, quorum=2, {servers}, inside={inside})"


APART = over_servers("sharded(zero=3)", ', "shared_memory": False')
SERVED_BY_FOUR = [over_servers(each) for each in HELD_BY_FOUR if not each.startswith("pipeline")]


QUICKLY = ["sharded(zero=3)", "mesh(model=2, zero=1)", of_groups("sharded(zero=1)")]


def over_gloo(text: str) -> str:
    """The same, whose tasks exchange everything by process groups of torch."""
    return f'{text[:-1]}, communication="process_group")'


def over_gloo_too(texts: list[str]) -> list[Any]:
    """By any process group of torch, few of them quickly."""
    return [
        pytest.param(over_gloo(each), marks=() if each in QUICKLY else slow)
        for each in texts
        if "sockets" not in each
    ]


def tasks(text: str) -> int:
    held = [of_groups(each) for each in HELD_BY_FOUR]
    return 8 if text in (*EIGHT, *held, *map(over_gloo, held), *SERVED_BY_FOUR) else 4


def texts(quick: list[str], slower: list[str]) -> list[Any]:
    return [*quick, *(pytest.param(each, marks=slow) for each in slower)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "text",
    [*texts(DIVIDED, EIGHT), *over_gloo_too(["sharded(zero=1)", "sharded(zero=3)", *DIVIDED])],
)
def test_numbers_are_those_of_plain_torch(replicas: Replicas, text: str, optimizer: str) -> None:
    """Clipped by the global norm, accumulated, with a smaller last batch."""
    (losses,), weights = jobs.by_torch(optimizer, 3)
    for found in replicas(jobs.trained, tasks(text), text, optimizer, range(3)):
        close(found["losses"], losses)
        close(found["weights"], weights)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "text",
    [
        *texts([*map(of_groups, HELD)], [*map(of_groups, HELD_BY_FOUR)]),
        *over_gloo_too([*map(of_groups, (*HELD, *HELD_BY_FOUR[1:]))]),
    ],
)
def test_groups_are_those_of_plain_torch(replicas: Replicas, text: str, optimizer: str) -> None:
    losses, weights = jobs.by_torch(optimizer, 3, groups=2, every=EVERY)
    count = tasks(text)
    for rank, found in enumerate(replicas(jobs.trained, count, text, optimizer, range(3))):
        close(found["losses"], losses[rank * 2 // count])
        close(found["weights"], weights)


def test_stages_in_shards_evaluate_and_go_back(replicas: Replicas) -> None:
    """Also with a batch of which only one pipeline has a row."""
    (expected,) = replicas(jobs.fit_by_trainer, 1, "one_device")
    text = 'pipeline(stages=2, microbatches=2, zero=3, communication="sockets")'
    for found in replicas(jobs.fit_by_trainer, 4, text):
        close(found, expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("text", texts([*map(over_servers, SERVED)], [APART, *SERVED_BY_FOUR]))
def test_groups_over_servers_are_those_of_plain_torch(
    replicas: Replicas, text: str, optimizer: str
) -> None:
    losses, weights = jobs.by_torch(optimizer, 3, groups=2, every=EVERY)
    chief, *workers = served(replicas, text, optimizer, range(3))
    for rank, found in enumerate(workers):
        close(found["losses"], losses[rank * 2 // len(workers)])
        close(found["weights"], weights)
    close(chief["weights"], weights)


def served(replicas: Replicas, text: str, *args: Any, **options: Any) -> list[Any]:
    """What the chief and the workers return."""
    count = tasks(text) + 1
    return replicas(jobs.trained, count, text, *args, servers=2, chief=1, **options)


@slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_checkpoint_goes_on_under_the_next_nesting(
    replicas: Replicas, optimizer: str, tmp_path: Path
) -> None:
    """Through all of them, and back to one device."""
    chain = [*DIVIDED, *EIGHT, "mirrored", "one_device"]
    (losses,), _ = jobs.by_torch(optimizer, len(chain))
    each = len(losses) // len(chain)
    _, weights = jobs.by_torch(optimizer, len(chain))
    before = ""
    for number, text in enumerate(chain):
        count = 1 if text == "one_device" else tasks(text)
        here = str(tmp_path / str(number))
        found = replicas(jobs.trained, count, text, optimizer, range(1), load=before, save=here)
        close(found[0]["losses"], losses[number * each : (number + 1) * each])
        before = here
    close(found[0]["weights"], weights)


@slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_groups_go_on_with_another_strategy_inside(
    replicas: Replicas, optimizer: str, tmp_path: Path
) -> None:
    """Each with its own optimizer's state."""
    chain = [of_groups(each) for each in (*HELD, *HELD_BY_FOUR)]
    losses, weights = jobs.by_torch(optimizer, len(chain), groups=2, every=EVERY)
    each = len(losses[0]) // len(chain)
    before = ""
    for number, text in enumerate(chain):
        here, count = str(tmp_path / str(number)), tasks(text)
        found = replicas(jobs.trained, count, text, optimizer, range(1), load=before, save=here)
        for rank, one in enumerate(found):
            own = losses[rank * 2 // count]
            close(one["losses"], own[number * each : (number + 1) * each])
        before = here
    close(found[0]["weights"], weights)


@slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_groups_over_servers_go_on_with_another_strategy_inside(
    replicas: Replicas, optimizer: str, tmp_path: Path
) -> None:
    """Each with its own optimizer's state, which the chief has; then without groups."""
    chain = [*map(over_servers, SERVED), *SERVED_BY_FOUR, APART]
    losses, weights = jobs.by_torch(optimizer, len(chain), groups=2, every=EVERY)
    each = len(losses[0]) // len(chain)
    before = ""
    for number, text in enumerate(chain):
        here = str(tmp_path / str(number))
        _, *workers = served(replicas, text, optimizer, range(1), load=before, save=here)
        for rank, found in enumerate(workers):
            own = losses[rank * 2 // len(workers)]
            close(found["losses"], own[number * each : (number + 1) * each])
        before = here
    for text in ("mesh(model=2, zero=1)", of_groups("sharded(zero=3)"), "one_device"):
        count = 1 if text == "one_device" else tasks(text)
        for found in replicas(jobs.trained, count, text, optimizer, range(0), load=before):
            close(found["weights"], weights)


def test_what_cannot_lie_inside_is_refused() -> None:
    alone = sp.ClusterSpec.alone()
    for inside, text in (
        (sp.LocalSGDStrategy(cluster=alone), "local_sgd with local_sgd inside"),
        (sp.CentralStorageStrategy(cluster=alone), "local_sgd with central_storage inside"),
        (sp.MeshStrategy(timeout=3, cluster=alone), "timeout=3 of mesh inside local_sgd"),
    ):
        with pytest.raises(sp.UserError, match=text):
            _ = sp.LocalSGDStrategy(groups=1, inside=inside, cluster=alone).engine


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": 2, "inside": "pipeline(stages=2)"}, "cannot hold pipeline"),
        ({"groups": 2, "inside": "central_storage"}, "cannot hold central_storage"),
        ({"groups": 2, "inside": "mesh(model=2)"}, "mesh inside, and no chief of its own"),
        ({"groups": 2, "inside": "sharded(zero=1)"}, "sharded inside, and no chief of its own"),
        ({"groups": 1, "inside": "mesh(model=3)", "chief": True}, "model=3 in a job of 4 tasks"),
        ({"groups": 4, "inside": "mesh(model=2)", "chief": True}, "model=2 in a job of 1 tasks"),
        ({"inside": "sharded"}, "inside=sharded without groups under parameter_server"),
        ({"groups": 2, "inside": "mirrored(timeout=3)"}, "timeout=3 of mirrored inside"),
    ],
    ids=str,
)
def test_what_groups_over_servers_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], text: str
) -> None:
    """Before any task connects to another."""
    given = {**options}
    counts = {"worker": 4, "ps": 1, **({"chief": 1} if given.pop("chief", False) else {})}
    for name, value in tf_config(cluster_of(**counts), "worker", 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sp.UserError, match=re.escape(text)):
        _ = sp.ParameterServerStrategy(**given).engine


def test_what_the_table_shows_is_tested() -> None:
    """Each nesting that a cell of the page names, by who is nested in whom."""
    served = ("parameter_server(groups=2)", *map(over_servers, SERVED), *SERVED_BY_FOUR)
    texts = (*DIVIDED, *EIGHT, *map(of_groups, (*HELD, *HELD_BY_FOUR)), *served)
    tested = {shape(parse(each)) for each in texts}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:-2]
    named = {text for row in rows for text in re.findall(r"`([a-z_]+\(.*?\))`", row)}
    assert len(named) > 6
    assert {shape(parse(text)) for text in named} <= tested


def shape(declared: Declared) -> tuple[Any, ...]:
    """Who is nested in whom, and what is in shards."""
    options = declared.options
    axes = tuple(sorted(a for a, n in (options.get("mesh") or {}).items() if n > 1))
    held = declared.inside
    return declared.name, options.get("zero", 0), axes, shape(held) if held is not None else None
