"""What `sharded` promises beyond the contracts of all strategies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spartito as sp
from spartito.cluster.spec import ClusterSpec
from spartito.engine.sharding.blocks import GRAIN, Layout, RowLayout, divide, units
from spartito.storage.atomic import verify
from tests.replicas import Replicas
from tests.skips import shares_memory
from tests.strategies import sharded_jobs as jobs
from tests.strategies import sharded_models
from tests.strategies.jobs import blobs

SOCKETS: dict[str, Any] = {"communication": "sockets"}
FSDP: dict[str, Any] = {"communication": "fsdp"}
STAGES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"zero": 2, "block_bytes": 100}),
    (2, {"zero": 1}),
    (3, {"communication": "sockets", "block_bytes": 300}),
    (2, {"communication": "fsdp", "block_bytes": 1000}),
    (4, {"copies": 2, "block_bytes": 300}),
    (4, {"copies": 2, "communication": "sockets"}),
    (4, {"copies": 2, "communication": "fsdp", "block_bytes": 1000}),
]
CASES: list[tuple[str, str, float | None]] = [
    ("mlp", "SGD", 0.1),
    ("mlp", "Adam", None),
    ("frozen", "Adam", 0.1),
    ("astray", "SGD", None),
    ("views", "SGD", 0.1),
    ("gpt", "SGD", None),
    ("gpt", "Adam", 0.05),
    ("cnn", "Adam", None),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: "-".join(map(str, [s[0], *s[1].values()])))
def test_losses_are_those_of_plain_torch(
    replicas: Replicas, stage: tuple[int, dict[str, Any]]
) -> None:
    count, options = stage
    for found in replicas(jobs.by_strategy, count, "sharded", options, CASES):
        for case, losses in zip(CASES, found, strict=True):
            plain = jobs.by_torch(*case)
            assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) <= 1e-12, case


@pytest.mark.parametrize("stage", STAGES[:5], ids=str)
def test_optimizers_and_what_scripts_do_between_steps(
    replicas: Replicas, stage: tuple[int, dict[str, Any]]
) -> None:
    names = ["NAdam", "RMSprop", "Adagrad", "ASGD", "Signs", "amsgrad", "maximize", "groups"]
    cases: list[tuple[str, str, float | None]] = [("mlp", name, None) for name in names]
    count, options = stage
    for found in replicas(jobs.by_strategy, count, "sharded", options, cases, jobs.change):
        for case, losses in zip(cases, found, strict=True):
            plain = jobs.by_torch(*case, jobs.change)
            assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) <= 1e-12, case


def test_fsdp2_has_what_it_can_have(replicas: Replicas) -> None:
    for found in replicas(jobs.engines, 2, "sharded", FSDP, ["mlp", "astray", "frozen", "views"]):
        assert found == [True, True, True, False]  # the last has a parameter without elements
    for found in replicas(jobs.engines, 2, "sharded", {"communication": "process_group"}, ["mlp"]):
        assert found == [False]


def test_fsdp2_follows_what_modules_do(replicas: Replicas) -> None:
    cases: list[tuple[str, str, float | None]] = [
        (kind, "AdamW", None) for kind in ("in place", "in turns", "recurrent", "follows")
    ]
    options = {"block_bytes": 100, **FSDP}
    for found in replicas(jobs.by_strategy, 2, "sharded", options, cases):
        for case, losses in zip(cases, found, strict=True):
            plain = jobs.by_torch(*case)
            assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) <= 1e-12, case


@pytest.mark.parametrize("begins", [0, 1, 3])
def test_fsdp2_follows_outputs_that_it_cannot_look_into(replicas: Replicas, begins: int) -> None:
    plain = jobs.boxed("one_device", {}, begins)
    for losses in replicas(jobs.boxed, 2, "sharded", {"block_bytes": 400, **FSDP}, begins):
        assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) <= 1e-12


def test_a_task_that_is_lost_in_calls_of_fsdp2_is_named(replicas: Replicas) -> None:
    options = {"block_bytes": 100, "timeout": 10, **FSDP}
    first, _, last = replicas.outcomes(jobs.lost, 3, "sharded", options)
    for found in (first, last):
        assert found.kind == "TaskLostError"
        assert found.text.startswith("worker 1 is gone")


def test_other_strategies_refuse_fsdp() -> None:
    with pytest.raises(sp.UserError, match="communication='fsdp' under mirrored"):
        _ = sp.MirroredStrategy(cluster=ClusterSpec.alone(), device="cpu", **FSDP).engine


def test_fsdp2_adds_up_halves_in_fp32(replicas: Replicas) -> None:
    for found in replicas(jobs.halves, 4, "sharded", FSDP):
        assert found == [-1 - 1 / 128]  # in bf16 one and 1/256 are one


def test_a_system_that_does_not_tell_what_was_written(replicas: Replicas) -> None:
    plain = jobs.by_torch("mlp", "Adam", None, jobs.write_the_same)
    for (losses,) in replicas(jobs.untold, 2, "sharded", {}):
        assert losses == pytest.approx(plain, rel=0, abs=1e-12)


@pytest.mark.parametrize("options", [{"block_bytes": 100}, SOCKETS, FSDP], ids=str)
def test_half_a_backward_pass_does_not_count(replicas: Replicas, options: dict[str, Any]) -> None:
    net, (x, y), losses = sharded_models.build("mlp"), blobs(12), []
    made = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(6):
        loss = nn.CrossEntropyLoss()(net(x), y)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    for found in replicas(jobs.broken, 2, "sharded", options):
        assert found == pytest.approx(losses[2:], rel=0, abs=1e-12)


@pytest.mark.parametrize("options", [SOCKETS, FSDP], ids=str)
def test_a_backward_pass_in_another_thread(replicas: Replicas, options: dict[str, Any]) -> None:
    (right,) = replicas(jobs.elsewhere, 1, "one_device", {})
    for found in replicas(jobs.elsewhere, 2, "sharded", {"block_bytes": 100, **options}):
        assert found == pytest.approx(right, rel=0, abs=1e-12)


def test_a_view_that_is_kept_over_updates_is_refused_between_machines(replicas: Replicas) -> None:
    for text in replicas(jobs.written, 2, "sharded", {"communication": "sockets"}, jobs.keep):
        assert text.startswith("a view of parameters of a ")


def test_the_optimizers_state_is_held_once(replicas: Replicas) -> None:
    for options in ({}, {"zero": 1}, {"communication": "sockets"}):
        found = replicas(jobs.memory, 3, "sharded", options)
        total = found[0][1]
        assert sum(state for state, _ in found) == total
        assert max(state for state, _ in found) <= math.ceil(total / 3) + GRAIN


def test_what_cannot_be_sharded_is_refused_before_the_first_step(replicas: Replicas) -> None:
    for texts in replicas(jobs.refusals, 2, "sharded", {}):
        assert [text.split(" under ")[0].split(" of shards")[0].rstrip(",") for text in texts] == [
            "Adafactor",
            "Adafactor",
            "an SGD with hooks on its steps",
            "precision='fp16'",
        ]
        assert all("mirrored" in text for text in texts)


@pytest.mark.parametrize("options", [{}, SOCKETS, FSDP], ids=str)
def test_no_block_keeps_values_of_before(replicas: Replicas, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    net, (x, y) = jobs.Idle().double(), blobs(12)
    made = torch.optim.SGD(net.parameters(), 0.1)
    nn.CrossEntropyLoss()(net(x), y).backward()
    made.step()
    right = [value.flatten() for value in net.state_dict().values()]
    for found in replicas(jobs.reloaded, 2, "sharded", {"block_bytes": 200, **options}):
        values, after, of_loaded = found
        for value, expected in zip(values, right, strict=True):
            assert torch.allclose(torch.tensor(value, dtype=torch.float64), expected, 0, 1e-12)
        assert after == of_loaded


@pytest.mark.parametrize("options", [{}, SOCKETS, FSDP, {"zero": 2}], ids=str)
def test_what_is_written_into_parameters_is_right(
    replicas: Replicas, options: dict[str, Any]
) -> None:
    cases = [("mlp", "Adam", None), ("frozen", "SGD", 0.1)]
    for found in replicas(
        jobs.by_strategy, 3, "sharded", {"block_bytes": 300, **options}, cases, jobs.write
    ):
        for case, losses in zip(cases, found, strict=True):
            plain = jobs.by_torch(*case, jobs.write)
            assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) <= 1e-12, case


@shares_memory
@pytest.mark.parametrize("how", [jobs.write_alone, jobs.write_unlike])
def test_what_not_all_write_alike_is_refused(replicas: Replicas, how: jobs.Between) -> None:
    for text in replicas(jobs.written, 3, "sharded", {}, how):
        assert text.startswith("the replicas have drifted apart: worker ")
        assert " has other parameters than " in text


def test_a_model_in_shards_is_not_copied(replicas: Replicas) -> None:
    for options in ({}, SOCKETS, FSDP):
        for text in replicas(jobs.written, 2, "sharded", options, jobs.copied):
            assert text.startswith("a copy of a model")


@pytest.mark.parametrize("options", [{}, SOCKETS, FSDP], ids=str)
def test_what_is_loaded_counts_after_a_change_in_place(
    replicas: Replicas, tmp_path: Path, options: dict[str, Any]
) -> None:
    net, (x, y), losses = sharded_models.build("mlp"), blobs(12), []
    right = [value.flatten().tolist() for value in net.state_dict().values()]
    made = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        loss = nn.CrossEntropyLoss()(net(x), y)
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    for *values, found in replicas(jobs.restored, 2, "sharded", options, str(tmp_path)):
        assert values == right
        assert found == pytest.approx(losses, rel=0, abs=1e-12)
    assert verify(tmp_path / "before").files == verify(tmp_path / "after").files


@pytest.mark.parametrize("communication", ["sockets", "process_group", "fsdp"])
def test_what_needs_the_others_is_refused_after_close(
    replicas: Replicas, communication: str
) -> None:
    for said in replicas(jobs.closed, 2, "sharded", {"communication": communication}):
        assert len(said) == 3
        assert all(text.startswith("this task has left the others") for text in said)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero": 4}, "zero=4"),
        ({"zero": "3"}, "zero='3'"),
        ({"copies": 2}, "copies=2 of the model on 1 replicas"),
        ({"copies": 0}, "copies=0"),
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"offload": True}, "offload=True on CPUs"),
        ({"communication": "ddp"}, "communication='ddp'"),
        ({"communication": "fsdp", "zero": 2}, "communication='fsdp' with zero=2"),
        ({"communication": "fsdp", "compress": "bf16"}, "communication='fsdp' with compress="),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(sp.UserError, match=text.replace("(", r"\(")):
        _ = sp.ShardedStrategy(cluster=ClusterSpec.alone(), device="cpu", **options).engine


@given(st.lists(st.integers(0, 90), min_size=1, max_size=6), st.integers(1, 5))
def test_shards_have_each_element_once(sizes: list[int], shards: int) -> None:
    layout = Layout(tuple(sizes), shards)
    found: dict[int, list[int]] = {number: [] for number in range(len(sizes))}
    for rank in range(shards):
        for section in layout.shard(rank):
            found[section.parameter] += range(section.start, section.stop)
            assert 0 <= section.offset <= layout.length - (section.stop - section.start)
    assert found == {number: list(range(size)) for number, size in enumerate(sizes)}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1), st.integers(1, 5))
def test_rows_are_in_one_shard_each(shapes: list[tuple[int, int]], shards: int) -> None:
    layout = RowLayout(tuple(shapes), shards)
    found: dict[int, list[int]] = {number: [] for number in range(len(shapes))}
    for rank in range(shards):
        for section in layout.shard(rank):
            found[section.parameter] += range(section.start, section.stop)
            assert section.start % shapes[section.parameter][1] == 0
            assert 0 <= section.offset <= layout.length - (section.stop - section.start)
    assert found == {number: list(range(size)) for number, size in enumerate(layout.sizes)}


def test_tied_weights_are_in_the_block_around_both() -> None:
    first, second, third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    net = nn.Sequential(nn.Sequential(first, second), third)
    assert [each.module for each in units(net, 1)] == [third, second, first, net]
    third.weight = first.weight
    found = {each.module: each.parameters for each in units(net, 1)}
    assert [*found] == [second, net]
    assert set(found[net]) == {first.weight, first.bias, third.bias}


def test_blocks_are_cut_by_size_and_leave_torchs_own_modules_whole() -> None:
    attention = nn.MultiheadAttention(8, 2)
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    listed = nn.ModuleList([block, nn.Linear(2, 2)])
    net = nn.ModuleDict({"a": attention, "b": listed})
    sizes = {id(each.module): len(each.parameters) for each in divide(net, 200)}
    assert sizes[id(attention)] == 4  # with its out_proj, which it uses by itself
    assert sizes[id(block[0])] == 2
    assert sizes[id(block)] == 2  # what is small stays with the parent
    assert sizes[id(net)] == 2  # a ModuleList is never called
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    found = [(each.module, p) for each in divide(tied, 1) for p in each.parameters]
    assert [module for module, p in found if p is tied[0].weight] == [tied]
    assert len(found) == len(set(tied.parameters()))
    assert sum(p.numel() for _, p in found) == sum(p.numel() for p in tied.parameters())
