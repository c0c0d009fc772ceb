"""The contracts of every strategy. A new strategy joins by a line in CASES."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.replicas import ReplicaError, Replicas
from tests.strategies import jobs

Case = tuple[str, int, dict[str, Any]]

AVERAGE = {"lr": 1.0, "momentum": 0.0}
ONE_GROUP: Case = (
    "local_sgd", 3, {"groups": 1, "every": 3, "outer": AVERAGE, "inside": "sharded"}
)  # fmt: skip
"""Its meetings change nothing. Several groups are in test_groups_in_shards.py: batches of three
examples are too few for two groups of two."""

ONE_SERVED: Case = (
    "parameter_server", 3, {"groups": 1, "every": 3, "min_shard_bytes": 16, "shared_memory": False}
)  # fmt: skip
"""What it pushes are its own values."""
SEVERAL_SERVED: Case = (
    "parameter_server", 3,
    {"groups": [[0, 2], [1]], "every": 3, "quorum": 2, "min_shard_bytes": 16},
)  # fmt: skip

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("mirrored", 3, {}),
    ("multi_worker_mirrored", 2, {}),
    ("multi_worker_mirrored", 3, {"communication": "process_group"}),
    ("multi_worker_mirrored", 2, {"communication": "sockets"}),
    ("multi_worker_mirrored", 3, {"communication": "sockets"}),
    ("multi_worker_mirrored", 2, {"communication": "sockets", "bucket_bytes": 64}),  # overlaps
    ("mirrored", 2, {"communication": "ddp"}),  # the engine of GPUs, here on gloo
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
    ("parameter_server", 2, {"max_staleness": 0, "min_shard_bytes": 16}),
    ("parameter_server", 3, {"max_staleness": 0, "min_shard_bytes": 16, "shared_memory": False}),
    ("parameter_server", 2, {"groups": 2, "every": 3, "quorum": 2, "min_shard_bytes": 16}),
    ONE_SERVED,
    SEVERAL_SERVED,
]

if jobs.DEVICE == "cuda":  # NCCL refuses two ranks on one GPU, and the rest is for CPUs
    GPUS = torch.cuda.device_count()
    CASES = [case for case in CASES if case[0] in ("one_device", "parameter_server")]
    CASES[1:1] = [
        ("mirrored", 1, {}),
        *[("mirrored", count, {}) for count in (2, 3) if count <= GPUS],
        *[("multi_worker_mirrored", 2, {}) for _ in range(GPUS > 1)],
        ("tests.strategies.sharing:SharingStrategy", 2, {"communication": "ddp"}),
    ]

SLOWER = [
    ("mirrored", 3, {}),
    ("multi_worker_mirrored", 3, {"communication": "process_group"}),
    ("multi_worker_mirrored", 3, {"communication": "sockets"}),
    ("central_storage", 3, {}),
    ("sharded", 3, {"zero": 1}),
    ("pipeline", 4, {"stages": 2, "schedule": "zero_bubble"}),
    ("pipeline", 4, {"mesh": {"pipeline": 2, "model": 2}}),
    ONE_GROUP,
    ("parameter_server", 3, {"max_staleness": 0, "min_shard_bytes": 16, "shared_memory": False}),
    ONE_SERVED,
    SEVERAL_SERVED,
]
"""Forms whose strategy has others in the quick tests; they run with the slow ones."""

EXACT = 1e-12
COUPLED = 0.3
"""How far from one device the losses of groups may be that train apart, in the few steps of these
jobs. All else is as under others: equal on all replicas. That the numbers are those of the
published methods is in test_local_sgd.py."""


def named(case: Case) -> str:
    values = [n for v in case[2].values() for n in (v.values() if isinstance(v, dict) else [v])]
    return "-".join(map(str, [case[0], case[1], *values]))


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow,) if case in SLOWER else ()


def each_of(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """A test that is given each of ``cases``."""
    given = [pytest.param(case, marks=marks(case), id=named(case)) for case in cases]
    return pytest.mark.parametrize("case", given)


def crossed(
    name: str, options: Mapping[str, Any], cases: Sequence[Case] = CASES
) -> pytest.MarkDecorator:
    """All ``options`` under the first case of each strategy, every other one under its variants.

    Two variants in a row have all of them between them.
    """
    variants: Counter[str] = Counter()
    given = []
    for case in cases:
        turn = variants[case[0]]
        variants[case[0]] += 1
        given += [
            pytest.param(case, value, marks=marks(case), id=f"{label}-{named(case)}")
            for number, (label, value) in enumerate(options.items())
            if turn == 0 or (number + turn) % 2 == 0
        ]
    return pytest.mark.parametrize(("case", name), given)


every_strategy = each_of(CASES)
"""Asynchronous ones wait for each other here (max_staleness=0), so they are exact too; what they
promise without that is in test_parameter_server.py."""

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
    """``left`` without the figures that only groups have."""
    if not isinstance(left, dict) or not isinstance(right, dict):
        return left
    return {name: common(left[name], value) for name, value in right.items()}


def agree(case: Case, left: Any, right: Any) -> None:
    """As exact as the strategy promises."""
    if case == ONE_SERVED:
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
        "plain": {},
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
    losses = result["history"]["loss"]
    assert losses[-1] < losses[0]
    assert len(result["predictions"]) == 7


@crossed("kind", {"own": "own", "torchmetrics": "torchmetrics"})
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
    assert len(result["history"]["val_accuracy"]) == 3


@every_strategy
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
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


@every_strategy
def test_dict_batches_and_models_with_their_own_loss(replicas: Replicas, case: Case) -> None:
    same_as_one_device(replicas, case, jobs.dict_batches)


@every_strategy
def test_a_corrupt_example_weighs_nothing(replicas: Replicas, case: Case) -> None:
    same_as_one_device(replicas, case, jobs.corrupt_examples)


@crossed("kind", {kind: kind for kind in ("iterable", "dataset", "loader", "sampler")})
def test_torch_data_sets(replicas: Replicas, case: Case, kind: str) -> None:
    same_as_one_device(replicas, case, jobs.streams, kind=kind)


@every_flat
def test_replicas_with_uneven_data_end_together(replicas: Replicas, case: Case) -> None:
    result = run(replicas, case, jobs.uneven_workers)
    assert result["steps"] == 2 * case[1]


@every_strategy
def test_one_replica_can_stop_all(replicas: Replicas, case: Case) -> None:
    late = case[2].get("communication") == "ddp"  # its scalars are read one update later
    meeting = "groups" in case[2]  # the groups agree on it when they meet, after every third update
    assert run(replicas, case, jobs.stop_by_one) == 5 + late + meeting


@crossed("compiled", {"plain": False, "compiled": True})
def test_low_precision_and_compiled_modules(replicas: Replicas, case: Case, compiled: bool) -> None:
    name, world_size, options = case
    results = replicas(
        jobs.low_precision, world_size, name, options, compiled, servers=servers(case)
    )
    for result in results:
        assert result["history"] == results[0]["history"]
        assert result["history"]["loss"][-1] < result["history"]["loss"][0]
        assert result["names"] == ["0.weight", "0.bias", "3.weight", "3.bias"]


@every_flat
def test_facts_and_reductions(replicas: Replicas, case: Case) -> None:
    name, world_size, options = case
    ranks = range(1, world_size + 1)
    for rank, result in enumerate(replicas(jobs.facts, world_size, name, options)):
        count, is_chief, task, reduced = result
        assert (count, is_chief, task) == (world_size, rank == 0, f"worker {rank}")
        assert reduced == [sum(ranks), sum(ranks) / world_size, world_size, 1]


@every_strategy
def test_the_run_folder(replicas: Replicas, case: Case, tmp_path: Path) -> None:
    run(replicas, case, jobs.write_model, folder=str(tmp_path))
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "report.html").exists()
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


@every_strategy
def test_the_best_weights_come_back_and_rates_follow_epochs(replicas: Replicas, case: Case) -> None:
    result = run(replicas, case, jobs.best_weights)
    assert len(result["val_loss"]) == 3  # the first was the best
    assert result["evaluated"] == pytest.approx(result["val_loss"][0], abs=1e-12)
    assert result["lr"] == 0.01 / 2**3
    assert result["begun"] == 4  # no optimizer lost its state


@every_flat
@pytest.mark.parametrize("act", ["evaluate", "save"])
def test_what_the_chief_does_alone_ends_the_job(
    replicas: Replicas, case: Case, act: str, tmp_path: Path
) -> None:
    name, world_size, options = case
    if world_size == 1:
        return
    texts = replicas(
        jobs.chief_alone, world_size, name, options, act=act, folder=str(tmp_path / "saved")
    )
    for text in texts:
        alone = "MismatchedCallsError: the replicas make different calls: worker 0 "
        assert re.match(rf"{alone}.* is at .*\[{act}\], worker [12] .*at .*\[step\]\n", text), text


@every_flat
def test_all_load_what_was_saved_or_none_does(
    replicas: Replicas, case: Case, tmp_path: Path
) -> None:
    name, world_size, options = case
    results = replicas(jobs.save_and_load, world_size, name, options, folder=str(tmp_path))
    for rank, (found, refused, missing) in enumerate(results):
        assert found == [1.0, 2.0, 3.0]  # at once what was saved last
        if world_size > 1:
            last = world_size - 1
            assert "the replicas have read different checkpoints: worker 0 " in refused
            assert f"worker {last} {tmp_path}/2.0 (" in refused
            assert missing.startswith("" if rank == last else f"worker {last}: ")
            assert f"{tmp_path}/none has no manifest.json" in missing


@every_flat
def test_outputs_of_different_lengths_are_refused(replicas: Replicas, case: Case) -> None:
    same_as_one_device(replicas, case, jobs.predict_lengths, lengths=[4] * 7, batch=6)
    name, world_size, options = case
    growing = replicas(jobs.predict_lengths, world_size, name, options, [1, 2, 3, 4, 5, 6], 6)
    for found in growing if world_size > 1 else ():
        assert "rows of different kinds cannot be gathered: (" in found
        assert f"({6 // world_size}, 6) float64 on worker {world_size - 1}\n" in found
    for found in replicas(jobs.predict_lengths, world_size, name, options, [3] * 6 + [4] * 6, 6):
        assert found.startswith("outputs of (6, 3) for batch 0, of (6, 4) for batch 1")


@every_flat
def test_replicas_that_drift_are_named_at_the_end_of_the_epoch(
    replicas: Replicas, case: Case
) -> None:
    name, world_size, options = case
    last = world_size - 1
    drifts = {"value": "parameters than", "frozen": "that learn than", "seed": "in another order"}
    for what, text in drifts.items():
        for step, error in replicas(jobs.drift, world_size, name, options, what):
            if options.get("communication") == "ddp" and what == "frozen":
                assert "the replicas make different calls" in error  # at once: DDP is set up anew
            elif name == "sharded" and what == "value" and "communication" in options:
                assert "parameter without its module" in error  # nobody else asks for it
            elif world_size > 1:
                once = name == "sharded" and what == "value"  # noticed by the next update
                once = once or (is_coupled(case) and what == "value")  # by the next meeting
                assert step == (2 if once else 4), error
                assert error.startswith(f"the replicas have drifted apart: worker {last} has ")
                assert text in error
            else:
                assert (step, error) == (8, "")


@every_strategy
def test_a_mean_over_tokens_is_one_over_all_tokens(replicas: Replicas, case: Case) -> None:
    result = run(replicas, case, jobs.tokens)
    net, sentences = jobs.Tagger(), jobs.Sentences()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)

    def figures(update: bool) -> tuple[float, float]:
        loss, right, count = 0.0, 0, 0
        for start in range(0, 13, 4):
            batch = jobs.padded([sentences[n] for n in range(start, min(13, start + 4))])
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


@every_synchronous
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_a_strategy_goes_with_its_model_and_memory(
    replicas: Replicas, case: Case, closes: bool
) -> None:
    name, world_size, options = case
    for folds in replicas(jobs.folds, world_size, name, options, closes):
        assert [fold[:2] for fold in folds] == [(True, True)] * 3
        assert folds[2][2] == folds[0][2]


@every_synchronous
def test_a_closed_strategy_leaves_its_address_to_the_next(replicas: Replicas, case: Case) -> None:
    name, world_size, options = case
    for steps in replicas(jobs.one_after_the_other, world_size, name, options):
        assert steps == [2, 2, 2]
