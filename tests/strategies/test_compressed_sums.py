"""Sums of gradients that leave a machine go in fewer bits, whatever strategy asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spartito as sp
from tests.replicas import Replicas
from tests.skips import shares_memory
from tests.strategies import compressed_jobs as jobs
from tests.strategies.compressed_jobs import WAYS
from tests.strategies.nesting_jobs import OPTIMIZERS, network
from tests.strategies.test_contracts import close

slow = pytest.mark.slow
ALONE = [[[0], [1], [2], [3]]]
"""Each of four tasks sends its own gradients."""
PAIRS = [[[0, 1], [2, 3]]]
"""Two on each machine."""
COLUMNS = [[[0], [2]]]
"""Two have a model between them, and send to those that have the same part."""

STAGES = 'pipeline(stages=2, microbatches=2, split=["3"]'

SUMS: dict[str, tuple[str, int, Any]] = {
    "sockets": ('multi_worker_mirrored({}, communication="sockets")', 1, ALONE),
    "layers": ("multi_worker_mirrored({}, bucket_bytes=200)", 2, PAIRS),
    "process group": ('multi_worker_mirrored({}, communication="process_group")', 1, ALONE),
    "zero=1": ('sharded(zero=1, {}, communication="sockets")', 1, ALONE),
    "zero=2": ("sharded(zero=2, {})", 2, PAIRS),
    "zero=3": ('sharded(zero=3, {}, communication="sockets")', 1, ALONE),
    "zero=3, layers": ("sharded(zero=3, {})", 2, PAIRS),
    "zero=3, gloo": ('sharded(zero=3, {}, communication="process_group")', 1, ALONE),
    "copies": ("sharded(zero=2, copies=2, {})", 2, PAIRS),
    "mesh": ("mesh(model=2, {})", 2, COLUMNS),
    "mesh, gloo": ('mesh(model=2, {}, communication="process_group")', 2, COLUMNS),
    "mesh, zero=1": ("mesh(model=2, zero=1, {})", 2, COLUMNS),
    "mesh, zero=3": ("mesh(model=2, zero=3, {})", 2, COLUMNS),
    "pipeline": (f"{STAGES}, {{}})", 2, COLUMNS),
    "pipeline, zero=3": (
        f'{STAGES}, zero=3, {{}}, communication="sockets")',
        1,
        COLUMNS,
    ),
    "pipeline, zero=2": (f"{STAGES}, zero=2, {{}})", 2, COLUMNS),
}
QUICK = [("mesh", '"bf16"'), ("zero=2", '"8bit"'), ("zero=3", '"topk:0.03"'), ("copies", '"4bit"')]
QUICK += [("pipeline", '"powersgd"'), ("process group", '"4bit"'), ("mesh, zero=3", '"powersgd"')]


def text_of(way: str, compress: str) -> str:
    said = '"powersgd:1"' if compress == '"powersgd"' else compress
    return SUMS[way][0].format(f"compress={said}")


@pytest.mark.parametrize(
    "optimizer", ["sgd", pytest.param("adamw", marks=(slow, pytest.mark.night))]
)
@pytest.mark.parametrize(
    ("way", "compress"),
    [
        pytest.param(
            way,
            compress,
            marks=[
                *([] if (way, compress) in QUICK else [slow]),
                *([shares_memory] if SUMS[way][2] is PAIRS else []),
            ],
        )
        for way in SUMS
        for compress in WAYS
    ],
)
def test_numbers_are_those_of_the_algorithm(
    replicas: Replicas, way: str, compress: str, optimizer: str
) -> None:
    """Clipped by the global norm, accumulated, with a smaller last batch."""
    _, per_machine, senders = SUMS[way]
    found = replicas(jobs.fit, 4, text_of(way, compress), optimizer, 3, per_machine)
    expected = jobs.by_torch(found, compress, optimizer, 3, senders)
    for each in found:
        close(each.weights, expected)
    if compress != '"powersgd"':  # whose first update, of which the error is taken, is exact
        assert any(each.error > 0 for each in found)


EVERY = 2
INSIDE: dict[str, tuple[str, int, Any]] = {
    "replicas": ("multi_worker_mirrored({})", 4, [[[0], [1]], [[2], [3]]]),
    "shards": ("sharded(zero=2, {})", 4, [[[0], [1]], [[2], [3]]]),
    "mesh": ("mesh(model=2, {})", 8, [[[0], [2]], [[4], [6]]]),
}


def in_groups(inside: str, compress: str) -> str:
    held = INSIDE[inside][0].format(f"compress={compress}")
    return f'local_sgd(groups=2, every={EVERY}, communication="sockets", inside={held})'


@pytest.mark.parametrize(
    ("inside", "compress"),
    [
        ("replicas", '"4bit"'),
        pytest.param("replicas", '"bf16"', marks=slow),
        pytest.param("shards", '"8bit"', marks=slow),
        pytest.param("mesh", '"topk:0.03"', marks=slow),
    ],
)
def test_groups_that_train_apart_send_their_own(
    replicas: Replicas, inside: str, compress: str
) -> None:
    _, count, senders = INSIDE[inside]
    found = replicas(jobs.fit, count, in_groups(inside, compress), "adamw", 3)
    expected = jobs.by_torch(found, compress, "adamw", 3, senders, EVERY)
    for each in found:
        close(each.weights, expected)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param(text_of(way, compress), 4, marks=() if way == "pipeline" else slow)
        for way, compress in [
            ("layers", '"4bit"'),
            ("process group", '"topk:0.03"'),
            ("zero=3, layers", '"8bit"'),
            ("mesh", '"4bit"'),
            ("mesh, zero=1", '"4bit"'),
            ("pipeline", '"4bit"'),
            ("pipeline, zero=2", '"8bit"'),
        ]
    ]
    + [(in_groups("replicas", '"4bit"'), 4)],
)
def test_what_is_left_out_goes_into_checkpoints(
    replicas: Replicas, text: str, count: int, tmp_path: Path
) -> None:
    """A training that was interrupted has the same bits."""
    folder = str(tmp_path / "saved")
    whole = replicas(jobs.fit, count, text, "adamw", 4, 2)
    replicas(jobs.fit, count, text, "adamw", 2, 2, save=folder)
    again = replicas(jobs.fit, count, text, "adamw", 2, 2, load=folder)
    for one, other in zip(whole, again, strict=True):
        for name, value in one.weights.items():
            assert torch.equal(other.weights[name], value), name
    replicas(jobs.fit, 1, "one_device", "adamw", 1, load=folder)  # which leaves nothing out


@shares_memory
@pytest.mark.parametrize("text", ["sharded(zero=2, {})", "mesh(model=2, {})"])
def test_tasks_that_share_memory_leave_nothing_out(replicas: Replicas, text: str) -> None:
    exact = replicas(jobs.fit, 4, text.replace(", {}", ""), "sgd", 1, 4)
    for one, other in zip(
        exact, replicas(jobs.alone, 4, text.format('compress="4bit"')), strict=True
    ):
        assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


@pytest.mark.parametrize("compress", ['"4bit"', '"topk:0.03"', '"powersgd:1"'])
@pytest.mark.parametrize("way", ["sockets", "process group", "zero=2", "mesh", "ddp"])
def test_what_is_sent_for_no_update_is_sent_again(
    replicas: Replicas, way: str, compress: str
) -> None:
    """An update that is dropped leaves no trace in what was left out."""
    ddp = 'multi_worker_mirrored({}, communication="ddp")'
    text = (ddp if way == "ddp" else SUMS[way][0]).format(f"compress={compress}")
    text = f'{text[:-1]}, communication="sockets")' if way in ("zero=2", "mesh") else text
    exact, found = (replicas(jobs.hurt, 4, text, bad)[0] for bad in (False, True))
    assert all(value.isfinite().all() for value in exact.values())
    close(found, exact)


@pytest.mark.parametrize("text", ["sharded({})", "mesh(model=1, {})", "pipeline(stages=1, {})"])
def test_what_cannot_be_is_refused_before_a_batch(text: str) -> None:
    net, optimizer = network(), OPTIMIZERS["sgd"]
    for compress, given, said in [
        ('"4bit"', {"deterministic": True}, "with deterministic=True"),
        ('"topk"', {"precision": "fp16"}, "whose loss scale changes"),
        ('"5bit"', {}, "compress='5bit'"),
        ('"topk:0"', {}, "compress='topk:0'"),
    ]:
        with (
            pytest.raises(sp.UserError, match=said),
            sp.strategy(text.format(f"compress={compress}")) as strategy,
        ):
            strategy.prepare(net, optimizer, **given)  # type: ignore[arg-type]
