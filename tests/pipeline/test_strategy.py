"""Pipelines in real processes, against plain torch on one device in double precision."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from spartito.errors import UserError
from spartito.pipeline.cut import Cut
from spartito.pipeline.model import MOST_CUTS, PipedModel
from spartito.pipeline.program import record
from spartito.pipeline.split import balanced, parts_of, slowdowns
from spartito.pipeline.stage import run
from spartito.strategies import PipelineStrategy
from tests.pipeline import jobs
from tests.replicas import ReplicaError, Replicas

EXACT = 1e-12

SLOW = pytest.mark.slow
NIGHT = (pytest.mark.slow, pytest.mark.night)
SQUARE, CUBE = {"pipeline": 2, "model": 2}, {"pipeline": 2, "data": 2, "model": 2}
CASES: list[Any] = [
    ("mlp", "Adam", 2, {}),
    ("mlp", "SGD", 4, {"schedule": "gpipe"}),
    ("mlp", "Adam", 2, {"schedule": "interleaved"}),
    ("mlp", "Adam", 4, {"stages": 2, "schedule": "zero_bubble"}),
    ("cats", "SGD", 2, {"microbatches": 2}),
    pytest.param("cats", "Adam", 4, {"microbatches": 3, "schedule": "zero_bubble"}, marks=NIGHT),
    pytest.param("cats", "Adam", 4, {"microbatches": 2, "stages": 2}, marks=SLOW),
    ("gpt", "Adam", 2, {"schedule": "zero_bubble"}),  # tied weights, in both stages
    pytest.param(
        *("gpt", "SGD", 4, {"split": ["blocks.0.mlp_norm", "blocks.1", "blocks.3"]}),
        marks=SLOW,
    ),
    pytest.param("gpt", "Adam", 4, {"stages": 2}, marks=SLOW),
    ("encoder", "Adam", 2, {}),
    ("frozen", "Adam", 2, {"split": ["layers.4"]}),
    ("keeps", "SGD", 2, {"schedule": "interleaved", "microbatches": 3}),
    ("crosses", "SGD", 3, {"split": ["relu", "more"]}),
    ("idles", "SGD", 3, {"split": ["1", "3"], "schedule": "zero_bubble", "microbatches": 2}),
    ("functions", "SGD", 2, {"split": ["b"]}),
    ("looks", "Adam", 2, {}),
    ("written", "SGD", 3, {"split": ["b", "c"]}),
    ("gpt again", "Adam", 2, {"schedule": "zero_bubble"}),
    pytest.param(
        *("gpt again", "SGD", 4, {"split": ["blocks.0.mlp_norm", "blocks.1", "blocks.3"]}),
        marks=SLOW,
    ),
    *(("regions", "Adam", 2, {"split": [start]}) for start in ("b", "e", "d")),
    ("reentrant", "SGD", 2, {"split": ["d"]}),
    ("regions", "SGD", 2, {"schedule": "interleaved", "split": ["b", "e", "d"]}),
    ("regions", "SGD", 2, {"schedule": "zero_bubble", "split": ["b"]}),
    ("regions", "SGD", 4, {"mesh": SQUARE, "split": ["e"]}),
    pytest.param(
        *("regions", "Adam", 4, {"mesh": SQUARE, "split": ["b"], "schedule": "zero_bubble"}),
        marks=SLOW,
    ),
    ("looks", "SGD", 3, {"split": ["mix", "out"], "schedule": "zero_bubble"}),
    ("mlp", "Adam", 4, {"mesh": SQUARE, "schedule": "zero_bubble"}),
    pytest.param("gpt", "Adam", 4, {"mesh": SQUARE, "schedule": "zero_bubble"}, marks=SLOW),
    pytest.param("cats", "SGD", 4, {"mesh": SQUARE, "microbatches": 2}, marks=NIGHT),
    pytest.param("gpt", "SGD", 8, {"mesh": CUBE}, marks=SLOW),
    pytest.param("cats", "SGD", 8, {"mesh": CUBE, "microbatches": 2}, marks=NIGHT),
]


@pytest.mark.parametrize(
    ("model", "optimizer", "tasks", "options"),
    CASES,
    ids=lambda value: re.sub(r"\W+", "-", str(value)),
)
def test_steps_are_those_of_plain_torch(
    replicas: Replicas, model: str, optimizer: str, tasks: int, options: dict[str, Any]
) -> None:
    found = replicas(jobs.train, tasks, "pipeline", model, options, optimizer)
    are_those_of_plain_torch(found, model, optimizer, tasks, options)


@pytest.mark.parametrize(
    ("model", "optimizer", "tasks", "options"),
    [
        ("mlp", "Adam", 2, {"schedule": "interleaved"}),
        ("mlp", "SGD", 3, {"schedule": "gpipe"}),
        pytest.param("cats", "SGD", 2, {"microbatches": 2}, marks=NIGHT),  # channels are last
        # Tied weights, in both stages.
        pytest.param("gpt", "Adam", 2, {"schedule": "zero_bubble"}, marks=SLOW),
        pytest.param(
            *("gpt", "SGD", 4, {"split": ["blocks.0.mlp_norm", "blocks.1", "blocks.3"]}),
            marks=NIGHT,
        ),
        ("mlp", "Adam", 4, {"mesh": SQUARE, "schedule": "zero_bubble"}),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value)),
)
def test_messages_between_devices_are_told_apart(
    accelerator_groups: Replicas, model: str, optimizer: str, tasks: int, options: dict[str, Any]
) -> None:
    """By a process group that moves tensors there, in the order in which they leave."""
    found = accelerator_groups(jobs.train, tasks, "pipeline", model, options, optimizer)
    assert all(result["links"] for result in found)
    are_those_of_plain_torch(found, model, optimizer, tasks, options)


def test_who_fails_between_devices_is_named(accelerator_groups: Replicas) -> None:
    """Those who wait for its messages hear of it, and do not wait for their time limit."""
    outcomes = accelerator_groups.outcomes(jobs.fails, 3)
    errors = [outcome for outcome in outcomes if isinstance(outcome, ReplicaError)]
    assert [error.kind for error in errors].count("ValueError") == 1
    assert len(errors) == 3
    for error in errors:
        if error.kind != "ValueError":
            assert "ValueError: labels of another world" in error.text, str(error)


def are_those_of_plain_torch(
    found: list[dict[str, Any]], model: str, optimizer: str, tasks: int, options: dict[str, Any]
) -> None:
    """Losses, weights, and what each task has of the model."""
    mesh = options.get("mesh", {"data": tasks // options.get("stages", tasks)})
    shards = mesh.get("data", 1)
    expected = jobs.plain(model, optimizer, shards, options.get("microbatches", 8))
    for result in found:
        for loss, right in zip(result["losses"], expected["losses"], strict=True):
            assert abs(loss - right) <= EXACT
        assert result["weights"].keys() == expected["weights"].keys()
        if model == "cats" and shards > 1:  # each shard has statistics, which are averaged
            continue
        for name, value in result["weights"].items():
            assert torch.allclose(value, expected["weights"][name], rtol=0, atol=1e-10), name
    names = set(dict(jobs.MODELS[model]()[0].named_parameters()))
    pipelines = [[r for r in found if r["shard"][0] == shard] for shard in range(shards)]
    for tasks_of_one in pipelines:
        here = [set(result["here"]) for result in tasks_of_one]
        assert set.union(*here) == names
        assert all(own < names for own in here)  # nobody has all of it
    if not found[0]["links"]:  # else all are others, on a device; the others' memory is free
        assert all(result["alive"] == result["here"] for result in found)
    if optimizer == "Adam":
        learn = sum(len(r["here"]) for r in found)
        assert sum(r["states"] for r in found) <= learn


@pytest.mark.parametrize(
    ("model", "tasks", "options", "text"),
    [
        ("small", 3, {}, "3 stages of a model that has 2 layers in a row"),
        ("branches", 2, {}, r"calls __bool__\(\), and it is a value"),
        ("small", 2, {"split": ["7"]}, "the model has no module '7'"),
        ("small", 2, {"split": ["1", "2"]}, "begins 3 stages, and there are 2"),
        ("small", 2, {"split": ["0"]}, "each stage needs operations"),
        ("writes", 2, {}, r"sub_\(\) changes its input in place|__setitem__\(\) changes its input"),
        ("averages", 2, {}, r"mul_\(\) writes into its parameter 'second.weight', once for each"),
        ("sparse", 1, {}, "a sparse_coo tensor under pipeline"),
        ("often", 2, {}, "scale_grad_by_freq of 0, Embedding"),
        ("together", 2, {}, "the examples of a batch see each other in Sequential's"),
        ("together", 2, {"microbatches": 1}, "^$"),
        ("own", 2, {}, "Own may look at all parameters at once"),
        ("own, by parameter", 2, {}, "^$"),
        ("counts", 2, {}, "each forward pass changes 'calls' of the model"),
        ("maps", 2, {}, r"'first' calls linear\(\) inside of torch.vmap"),
        ("draws", 2, {}, "came to .* where an equal batch did something else"),
        ("keeps", 2, {"split": ["first"]}, "the buffer 'calls', which the forward pass changes"),
    ],
)
def test_what_cannot_be_split_is_refused_on_all_tasks(
    replicas: Replicas, model: str, tasks: int, options: dict[str, Any], text: str
) -> None:
    for error in replicas(jobs.refused, tasks, model, options):
        assert re.search(text, error), error


@pytest.mark.parametrize("change", jobs.CHANGES)
def test_what_a_model_is_like_may_change_between_two_steps(replicas: Replicas, change: str) -> None:
    expected, _ = jobs.changed("one_device", {}, change)
    options = {"microbatches": 1, "split": ["middle"]}
    for losses, recorded in replicas(jobs.changed, 2, "pipeline", options, change):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= EXACT
        assert recorded == 2  # before and after


def test_numbers_that_go_on_changing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    dropout = nn.Dropout(0.5)
    piped = PipedModel(nn.Sequential(nn.Linear(2, 2), dropout), 1, {0}, torch.device("cpu"))
    assert piped.settings() == piped.settings()
    for number in range(3 * MOST_CUTS):
        dropout.p = 1 / (number + 1)
        assert piped.settings() == piped.settings()
    assert caplog.text.count("held other numbers 64 times") == 1


@pytest.mark.parametrize("part", [False, True])
def test_a_second_optimizer_of_a_divided_model_is_refused(replicas: Replicas, part: bool) -> None:
    for first, second in replicas(jobs.two_optimizers, 2, part):
        assert first == second
        assert first.startswith("a Sequential that an earlier Trainer has divided in a pipeline")


def test_a_model_of_which_each_task_has_a_part_is_not_called_by_itself(replicas: Replicas) -> None:
    for is_whole, said in replicas(jobs.called, 2):
        assert is_whole
        assert "Sequential was called by itself under pipeline" in said


@pytest.mark.parametrize(
    ("crosses", "how", "refusal"),
    [
        (False, "keeps", ""),
        (True, "keeps", "add_ of parameters that are on two tasks of a pipeline"),
        (True, "", "add_ of parameters that are on two tasks of a pipeline"),
        (False, "state", "state_dict() of a Sequential in a callback under pipeline"),
    ],
)
def test_an_average_of_layers_of_two_tasks_is_refused(
    replicas: Replicas, crosses: bool, how: str, refusal: str
) -> None:
    """Torch would leave out what is not there, and say nothing."""
    for said in replicas(jobs.averaged, 2, crosses, how):
        assert said.startswith(refusal)
        assert bool(said) == bool(refusal)


def test_the_parts_of_a_step_are_refused(replicas: Replicas) -> None:
    for errors in replicas(jobs.owned, 2):
        assert errors == [
            "backward() under pipeline, which owns the whole step\n"
            "  Call step(), or choose mirrored or mesh for a loop of your own.",
            "update() under pipeline, which owns the whole step\n"
            "  Call step(), or choose mirrored or mesh for a loop of your own.",
        ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": 0}, "stages=0"),
        ({"microbatches": 2.5}, "microbatches=2.5"),
        ({"schedule": "1f1"}, "unknown schedule '1f1'"),
        ({"split": "halves"}, "split='halves'"),
        ({"schedule": "1f1b:2"}, "schedule='1f1b:2': 1f1b has one stage for each task"),
        ({"schedule": "interleaved:0"}, "schedule='interleaved:0'"),
        ({"schedule": "interleaved:two"}, "schedule='interleaved:two'"),
        ({"stages": 2}, "1 tasks for pipelines of 2"),
        ({"communication": "ddp"}, "communication='ddp' in a pipeline"),
        ({"stages": 3, "schedule": "interleaved"}, "3 stages with 2 for each task"),
        ({"mesh": {"model": 1}}, "mesh={'model': 1} has no axis 'pipeline'"),
        ({"mesh": {"pipeline": 1}, "stages": 2}, "stages=2 on mesh={'pipeline': 1}, which has 1"),
        ({"mesh": {"pipeline": 2}}, "a mesh of pipeline 2 = 2 tasks in a job of 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        _ = PipelineStrategy(**options).engine


def test_a_stage_that_ends_without_gradients_leaves_them_on() -> None:
    frozen, head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.head = frozen, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.frozen(x)
            out: torch.Tensor = self.head(x)
            return out

    net, x = Net(), torch.randn(3, 4)
    program = record(net, lambda: net(x))
    start = program.find("frozen.1", 0)
    assert start
    try:
        run(Cut(program, (start,)), 0, [], lambda: net(x))
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_fp16_is_refused() -> None:
    net = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="a stage would not hear of another's overflow"):
        PipelineStrategy().prepare(net, torch.optim.SGD(net.parameters(), 0.1), precision="fp16")


def test_what_crosses_between_stages_is_counted(replicas: Replicas) -> None:
    first, second = replicas(jobs.moved, 2)
    crossing = 8 * 16 * 8  # rows, width and bytes of a number, one way
    assert first == (crossing, 3 * crossing)  # gradients, from the task with the last stage
    assert second == (first[0] + 16, first[1] + 16)  # activations; the first ones tell their dtype


def test_parts_are_measured_by_two_forward_and_backward_passes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    passes = Counter[str]()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: passes.update([name]))

    def call() -> torch.Tensor:
        output: torch.Tensor = model(torch.ones(3, 2))
        return output

    (start,) = balanced(record(model, call), model, 2, call)
    assert start.path in ("1", "2")
    assert passes == {name: 2 for name, _ in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_stages_are_timed_beside_the_whole_model_which_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model(torch.ones(3, 2)).sum().backward()

    def kept() -> list[torch.Tensor]:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [tensor.clone() for tensor in (*model.buffers(), *gradients)]

    before = kept()
    data, state = torch.ones(3, 2), torch.get_rng_state()

    def call() -> torch.Tensor:
        output: torch.Tensor = model(data + torch.rand(()))
        return output

    program = record(model, call)
    found = slowdowns(program, parts_of(program, model, call), model, call, 0.0)
    assert set(found) == {1, 2}
    assert min(found.values()) > 0
    assert all(map(torch.equal, before, kept()))
    assert len(before) == 3 + 6
    assert torch.equal(torch.get_rng_state(), state)
