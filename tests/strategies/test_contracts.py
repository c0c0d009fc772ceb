"""The contracts of every strategy. A new strategy joins by a line in CASES."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spartito.system import shares_memory
from tests.replicas import ReplicaError, Replicas
from tests.strategies import data_jobs, jobs

Case = tuple[str, int, dict[str, Any]]

AVERAGE = {"lr": 1.0, "momentum": 0.0}
ONE_GROUP: Case = (
    "local_sgd", 3, {"groups": 1, "every": 3, "outer": AVERAGE, "inside": "sharded"}
)  # fmt: skip
"""Its meetings change nothing. Several groups are in test_groups_in_shards.py: batches of three
examples are too few for two groups of two."""

APART = {"min_shard_bytes": 16, "shared_memory": False}
ONE_SERVED: Case = (
    "parameter_server", 3, {"groups": 1, "every": 3, "servers": APART}
)  # fmt: skip
"""What it pushes are its own values."""
SEVERAL_SERVED: Case = (
    "parameter_server", 3,
    {"groups": [[0, 2], [1]], "every": 3, "quorum": 2, "servers": {"min_shard_bytes": 16}},
)  # fmt: skip

GLOO = {"communication": "process_group"}
OVER_GLOO: list[Case] = [
    ("multi_worker_mirrored", 3, GLOO),
    ("sharded", 3, {"zero": 3, "block_bytes": 100, **GLOO}),
    ("sharded", 3, {"communication": "fsdp", "block_bytes": 100}),  # the engine of GPUs
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}, "zero": 1, **GLOO}),
    ("pipeline", 4, {"stages": 2, "microbatches": 3, **GLOO}),
    ("local_sgd", 3, {"groups": [[0, 2], [1]], "every": 3, **GLOO}),
]
"""Every strategy takes any process group of torch: what it holds and sends is ordinary memory."""

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("mirrored", 3, {}),
    ("multi_worker_mirrored", 2, {}),
    ("multi_worker_mirrored", 2, {"communication": "sockets"}),
    ("multi_worker_mirrored", 3, {"communication": "sockets"}),
    ("multi_worker_mirrored", 2, {"communication": "sockets", "bucket_bytes": 64}),  # overlaps
    ("mirrored", 2, {"communication": "ddp"}),  # the engine of GPUs, here on gloo
    ("tpu", 2, {}),
    ("central_storage", 2, {}),
    ("central_storage", 3, {}),
    ("sharded", 2, {}),
    ("sharded", 3, {"zero": 2, "block_bytes": 100}),
    ("sharded", 3, {"zero": 1}),
    ("sharded", 3, {"communication": "sockets", "block_bytes": 100}),  # gathers the parameters
    ("tests.strategies.paired:PairedStrategy", 4, {}),  # two processes for each data shard
    ("mesh", 2, {"model": 2}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    ("pipeline", 2, {"microbatches": 3}),
    ("pipeline", 4, {"stages": 2, "schedule": "zero_bubble"}),  # two for each data shard
    ("pipeline", 4, {"mesh": {"pipeline": 2, "model": 2}}),
    ("local_sgd", 3, {"groups": [[0, 2], [1]], "every": 3}),
    ONE_GROUP,
    ("parameter_server", 2, {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}),
    (
        "parameter_server",
        3,
        {"max_staleness": 0, "servers": APART},
    ),
    (
        "parameter_server",
        2,
        {"groups": 2, "every": 3, "quorum": 2, "servers": {"min_shard_bytes": 16}},
    ),
    ONE_SERVED,
    SEVERAL_SERVED,
    *OVER_GLOO,
]

if not shares_memory():
    CASES = [case for case in CASES if case[0] != "central_storage"]

SLOWER = [
    ("mirrored", 3, {}),
    ("multi_worker_mirrored", 3, {"communication": "sockets"}),
    ("central_storage", 3, {}),
    ("sharded", 3, {"zero": 1}),
    ("pipeline", 4, {"stages": 2, "schedule": "zero_bubble"}),
    ("pipeline", 4, {"mesh": {"pipeline": 2, "model": 2}}),
    ONE_GROUP,
    (
        "parameter_server",
        3,
        {"max_staleness": 0, "servers": APART},
    ),
    ONE_SERVED,
    SEVERAL_SERVED,
    *OVER_GLOO,
]
"""Forms whose strategy has others in the quick tests; they run at night."""

ALIKE = {
    "multi_worker_mirrored": "mirrored",
    "tpu": "mirrored",
    "tests.strategies.paired:PairedStrategy": "mesh",
}
"""Strategies whose steps are made of the parts of another one's: what is to meet one of them meets
either."""

EXACT = 1e-12
COUPLED = 0.3
"""How far from one device the losses of groups may be that train apart, in the few steps of these
jobs. All else is as under others: equal on all replicas. That the numbers are those of the
published methods is in test_local_sgd.py."""


def named(case: Case) -> str:
    values = [n for v in case[2].values() for n in (v.values() if isinstance(v, dict) else [v])]
    return "-".join(map(str, [case[0], case[1], *values]))


def marks(case: Case, late: bool = False) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow, pytest.mark.night) if late or case in SLOWER else ()


def firsts(cases: Sequence[Case]) -> list[Case]:
    """The first form of each strategy."""
    return [case for n, case in enumerate(cases) if case[0] not in [c[0] for c in cases[:n]]]


def each_of(cases: Sequence[Case], variants: bool = True) -> pytest.MarkDecorator:
    """A test that is given each of ``cases``.

    Without ``variants`` only the first of each strategy runs at every change: for what does not ask
    how many tasks there are, or how their sums travel.
    """
    soon = cases if variants else firsts(cases)
    given = [pytest.param(c, marks=marks(c, c not in soon), id=named(c)) for c in cases]
    return pytest.mark.parametrize("case", given)


def covering(pairs: Sequence[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """Few of ``pairs``, in which are all cases, and each option with each strategy.

    Strategies that are alike share out the options.
    """

    def met(case: Case, option: str) -> set[Any]:
        return {named(case), (ALIKE.get(case[0], case[0]), option)}

    left, chosen = set[Any]().union(*(met(*pair) for pair in pairs)), []
    while left:
        chosen.append(max(pairs, key=lambda pair: len(met(*pair) & left)))
        left -= met(*chosen[-1])
    return chosen


def crossed(
    name: str,
    options: Mapping[str, Any],
    cases: Sequence[Case] = CASES,
    variants: bool = True,
) -> pytest.MarkDecorator:
    """All ``options`` under the first case of each strategy, every other one under its variants.

    Two variants in a row have all of them between them. At every change a part of them runs, which
    is `covering`; without ``variants`` of the first ones, as in `each_of`.
    """
    seen: Counter[str] = Counter()
    pairs = []
    for case in cases:
        turn = seen[case[0]]
        seen[case[0]] += 1
        pairs += [
            (case, label)
            for number, label in enumerate(options)
            if turn == 0 or (number + turn) % 2 == 0
        ]
    often = [case for case in (cases if variants else firsts(cases)) if case not in SLOWER]
    soon = covering([pair for pair in pairs if pair[0] in often])
    given = [
        pytest.param(
            case,
            options[label],
            marks=marks(case, (case, label) not in soon),
            id=f"{label}-{named(case)}",
        )
        for case, label in pairs
    ]
    return pytest.mark.parametrize(("case", name), given)


every_strategy = each_of(CASES)
"""Asynchronous ones wait for each other here (max_staleness=0), so they are exact too; what they
promise without that is in test_parameter_server.py."""

every_first = each_of(CASES, variants=False)
"""For what is of data, losses and callbacks."""

SYNCHRONOUS = [case for case in CASES if case[0] != "parameter_server"]
every_synchronous = each_of(SYNCHRONOUS)
"""For what needs replicas that meet inside of a step, or several models."""

LOOPS = [case for case in CASES if case[0] not in ("parameter_server", "pipeline")]
every_loop = each_of(LOOPS)
"""For loops of one's own, and BatchNorm over the whole batch: a pipeline owns the step, and
BatchNorm sees its microbatches. Both are in tests/pipeline/test_strategy.py."""

every_backward = each_of([c for c in CASES if c[0] != "pipeline"])
"""For parameters that a step does not use, in a loop of one's own."""

SEVERAL = ("parameter_server", "mesh", "pipeline")

every_flat = each_of([c for c in CASES if c[0] not in SEVERAL and ":" not in c[0]])
"""For what speaks of ranks: each process is one data shard. What it says of meshes is in
test_mesh.py, of pipelines in tests/pipeline."""


def is_coupled(case: Case) -> bool:
    """Whether groups train apart."""
    return case[0] == "local_sgd" or case[2].get("groups", 1) != 1


def near(left: Any, right: Any, name: str = "") -> None:
    """The same structures of finite numbers, with losses that are alike."""
    if isinstance(left, dict):
        assert left.keys() >= right.keys()  # and what only groups have
        for each in right:
            near(left[each], right[each], each)
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            near(one, other, name)
    elif hasattr(left, "shape"):
        assert left.shape == right.shape
        assert left.isfinite().all()
    else:
        assert math.isfinite(left)
        assert not name.endswith("loss") or abs(left - right) <= COUPLED, (name, left, right)


def common(left: Any, right: Any) -> Any:
    """``left`` without the figures that only servers and groups have."""
    if not isinstance(left, dict) or not isinstance(right, dict):
        return left
    return {name: common(left[name], value) for name, value in right.items()}


def agree(case: Case, left: Any, right: Any) -> None:
    """As exact as the strategy promises."""
    if servers(case):
        left = common(left, right)
    (near if is_coupled(case) else close)(left, right)


def close(left: Any, right: Any) -> None:
    """Equal structures of numbers and tensors, to rounding in double precision."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            close(left[name], right[name])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            close(one, other)
    elif hasattr(left, "shape"):
        assert left.shape == right.shape
        assert (left.cpu() - right.cpu()).abs().max().item() <= EXACT if left.numel() else True
    else:
        assert math.isclose(left, right, rel_tol=0, abs_tol=EXACT), (left, right)


def servers(case: Case) -> int:
    """How many parameter servers a case has."""
    return case[1] - 1 if case[0] == "parameter_server" else 0


def run(replicas: Replicas, case: Case, job: Any, **options: Any) -> Any:
    """The job's result under ``case``, which must be the same on every replica."""
    name, world_size, strategy_options = case
    first, *others = replicas(
        job, world_size, name, strategy_options, servers=servers(case), **options
    )
    for other in others:
        close(first, other)
    return first


alone: dict[tuple[str, str], Any] = {}
"""What one device returns, by job and options: the same for all cases."""


def of_one_device(replicas: Replicas, job: Any, **options: Any) -> Any:
    asked = job.__name__, repr(sorted(options.items()))
    if asked not in alone:
        alone[asked] = run(replicas, CASES[0], job, **options)
    return alone[asked]


def same_as_one_device(replicas: Replicas, case: Case, job: Any, **options: Any) -> Any:
    result = run(replicas, case, job, **options)
    agree(case, result, of_one_device(replicas, job, **options))
    return result


@crossed(
    "options",
    {
        "uneven": {"batch": 7, "examples": 22, "dropout": 0.5},  # the last batch has one example
        "clip": {"optimizer": "SGD", "clip": 0.05, "loss": "each"},
        "accumulate": {"accumulate": 3, "schedule": True, "loss": "weighted"},
        "virtual-epochs": {"steps": 4, "epochs": 4, "loss": "sum", "optimizer": "RMSprop"},
    },
)
def test_numbers_are_those_of_one_device(
    replicas: Replicas, case: Case, options: dict[str, Any]
) -> None:
    if "clip" in options and servers(case) > 1 and "groups" not in case[2]:
        with pytest.raises(ReplicaError, match="on several servers"):
            run(replicas, case, jobs.fit_mlp, **options)
        return
    result = same_as_one_device(replicas, case, jobs.fit_mlp, **options)
    first, *later = result["history"]["loss"]
    assert min(*later, *result["again"]["loss"]) < first
    assert len(result["predictions"]) == 7


@pytest.mark.parametrize("case", [pytest.param(case, id=named(case)) for case in OVER_GLOO])
def test_numbers_over_gloo_are_those_of_one_device(replicas: Replicas, case: Case) -> None:
    """Quickly, for each strategy; all contracts are with the slow tests."""
    same_as_one_device(replicas, case, jobs.fit_mlp, clip=0.05, accumulate=3, schedule=True)


@crossed("kind", {"own": "own", "torchmetrics": "torchmetrics"}, variants=False)
def test_metrics_with_state_are_those_of_all_examples(
    replicas: Replicas, case: Case, kind: str
) -> None:
    if kind == "torchmetrics":
        pytest.importorskip("torchmetrics")
    result = same_as_one_device(replicas, case, jobs.fit_metrics, kind=kind)
    history, scores, labels = result["history"], result["predictions"], jobs.blobs(29)[1]
    right = scores.argmax(1) == labels
    close(history["val_accuracy"][-1], right.double().mean().item())
    if kind == "own":
        matrix = torch.tensor(history["val_confusion_matrix"][-1])
        assert matrix.sum(1).tolist() == labels.bincount().tolist()
        assert matrix.trace() == right.sum()
    else:
        pairs = torch.stack([scores[:, 0], labels.double()])
        assert history["val_max_metric"][-1] == pytest.approx(scores.max().item())
        assert history["val_pearson_corr_coef"][-1] == pytest.approx(pairs.corrcoef()[0, 1].item())


@every_loop
def test_batchnorm_dropout_and_augmentation_too(replicas: Replicas, case: Case) -> None:
    result = same_as_one_device(replicas, case, jobs.fit_convolutions)
    assert len(result["history"]["val_accuracy"]) == 2


@every_first
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(examples=st.integers(3, 30), batch=st.integers(3, 12))
def test_any_split_gives_the_same_numbers(
    replicas: Replicas, case: Case, examples: int, batch: int
) -> None:
    same_as_one_device(replicas, case, jobs.fit_mlp, examples=examples + 10, batch=batch, epochs=1)


@every_synchronous
def test_a_checkpoint_in_the_middle_of_an_update_loads_anywhere(
    replicas: Replicas, case: Case, tmp_path: Path
) -> None:
    whole: Any = {"folder": "", "phase": "whole", "accumulate": 2}
    if is_coupled(case):
        whole = run(replicas, case, jobs.checkpoint_and_resume, **whole)
    else:
        whole = of_one_device(replicas, jobs.checkpoint_and_resume, **whole)
    given = {"folder": str(tmp_path), "accumulate": 2}
    run(replicas, case, jobs.checkpoint_and_resume, phase="save", **given)
    other = CASES[1] if case is CASES[0] else CASES[0]
    for reader in (case,) if is_coupled(case) else (case, other):
        resumed = run(replicas, reader, jobs.checkpoint_and_resume, phase="resume", **given)
        close(resumed["weights"], whole["weights"])
        history = {name: values[2:] for name, values in whole["history"].items()}
        close(resumed["history"], history)


@every_loop
def test_a_custom_loop_trains_a_gan(replicas: Replicas, case: Case) -> None:
    same_as_one_device(replicas, case, jobs.gan)


@every_backward
def test_a_parameter_that_nobody_uses_is_left_alone(replicas: Replicas, case: Case) -> None:
    assert same_as_one_device(replicas, case, jobs.unused_parameters)["kept"]


@every_first
def test_dict_batches_and_models_with_their_own_loss(replicas: Replicas, case: Case) -> None:
    same_as_one_device(replicas, case, data_jobs.dict_batches)


@every_first
def test_a_corrupt_example_weighs_nothing(replicas: Replicas, case: Case) -> None:
    same_as_one_device(replicas, case, data_jobs.corrupt_examples)


@crossed(
    "kind",
    {kind: kind for kind in ("iterable", "dataset", "loader", "sampler")},
    variants=False,
)
def test_torch_data_sets(replicas: Replicas, case: Case, kind: str) -> None:
    same_as_one_device(replicas, case, data_jobs.streams, kind=kind)


@crossed("compiled", {"plain": False, "compiled": True}, variants=False)
def test_low_precision_and_compiled_modules(replicas: Replicas, case: Case, compiled: bool) -> None:
    name, world_size, options = case
    results = replicas(
        jobs.low_precision, world_size, name, options, compiled, servers=servers(case)
    )
    for result in results:
        assert result["history"] == results[0]["history"]
        assert result["history"]["loss"][-1] < result["history"]["loss"][0]
        assert result["names"] == ["0.weight", "0.bias", "3.weight", "3.bias"]


@every_first
def test_a_mean_over_tokens_is_one_over_all_tokens(replicas: Replicas, case: Case) -> None:
    result = run(replicas, case, data_jobs.tokens)
    net, sentences = data_jobs.Tagger(), data_jobs.Sentences()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)

    def figures(update: bool) -> tuple[float, float]:
        loss, right, count = 0.0, 0, 0
        for start in range(0, 13, 4):
            batch = data_jobs.padded([sentences[n] for n in range(start, min(13, start + 4))])
            output = net(**batch)
            items, counted = int(output["num_items"]), batch["labels"] != -100
            loss += output["loss"].item() * items
            right += int((output["logits"].argmax(-1) == batch["labels"])[counted].sum())
            count += items
            if update:
                optimizer.zero_grad()
                output["loss"].backward()
                optimizer.step()
        return loss / count, right / count

    for epoch in range(2):
        for update, prefix in ((True, ""), (False, "val_")):
            loss, accuracy = figures(update)
            found = {name: result["history"][prefix + name][epoch] for name in ("loss", "accuracy")}
            agree(case, found, {"loss": loss, "accuracy": accuracy})
    agree(case, result["weights"], {k: v.detach() for k, v in net.state_dict().items()})
