"""Metrics by name are what direct computation says, over any batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spartito.errors import UserError
from spartito.training.metrics import Metric
from spartito.training.metrics.names import make_metrics
from tests.training import jobs

CLASSES = torch.tensor([2, 0, 5, 1, 1, 3, 4])
SCORES = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
LOGITS = SCORES[:, 0]
BITS = torch.tensor([0, 1, 1, 0, 0, 1, 1])


def measured(name: Any, output: Tensor, target: Tensor, cuts: list[int], loss: Any = None) -> float:
    """The metric over batches that end at ``cuts``."""
    (metric,) = make_metrics([name], loss)
    for start, stop in zip([0, *cuts], [*cuts, len(output)], strict=True):
        if stop > start:
            metric.update(output[start:stop], target[start:stop], stop - start)
    value: float = metric.compute()
    return value


def sums(metric: Metric) -> list[float]:
    found: list[float] = metric.state_dict()["sums"].tolist()
    return found


def share_in_top(k: int) -> float:
    ranks = SCORES.argsort(1, descending=True)[:, :k]
    hits = [label in best for label, best in zip(CLASSES.tolist(), ranks.tolist(), strict=True)]
    return sum(hits) / 7


EXPECTED: list[tuple[str, Tensor, Tensor, Any, float]] = [
    ("accuracy", SCORES, CLASSES, None, share_in_top(1)),
    ("accuracy", SCORES, nn.functional.one_hot(CLASSES, 6).float(), None, share_in_top(1)),
    ("accuracy", LOGITS, BITS, None, ((LOGITS > 0) == (BITS > 0)).double().mean().item()),
    ("accuracy", LOGITS[:, None], BITS, None, ((LOGITS > 0) == (BITS > 0)).double().mean().item()),
    (
        "binary_accuracy",
        LOGITS.sigmoid(),
        BITS.float(),
        nn.BCELoss(),
        ((LOGITS.sigmoid() > 0.5) == (BITS > 0)).double().mean().item(),
    ),
    ("top_k_accuracy", SCORES, CLASSES, None, share_in_top(5)),
    ("top_3_accuracy", SCORES, CLASSES, None, share_in_top(3)),
    ("top_2", SCORES, CLASSES, None, share_in_top(2)),
    ("top_9_accuracy", SCORES, CLASSES, None, 1.0),
    *(
        (f"top_{k}", SCORES, nn.functional.one_hot(CLASSES, 6), None, share_in_top(k))
        for k in (1, 2, 6)
    ),
    *(
        (
            "top_2",
            SCORES[:, None].repeat(1, n, 1),
            CLASSES[:, None].repeat(1, n),
            None,
            share_in_top(2),
        )
        for n in (1, 4)
    ),  # classes come last
    ("mean_absolute_error", LOGITS[:, None], BITS, None, (LOGITS - BITS).abs().mean().item()),
    ("mae", SCORES, SCORES + 2, None, 2.0),
    ("mean_squared_error", SCORES, SCORES - 3, None, 9.0),
    ("mse", LOGITS, BITS, None, (LOGITS - BITS).square().mean().item()),
]


@pytest.mark.parametrize(("name", "output", "target", "loss", "expected"), EXPECTED)
def test_names(name: str, output: Tensor, target: Tensor, loss: Any, expected: float) -> None:
    for cuts in ([], [1], [2, 6], [3, 3]):
        assert measured(name, output, target, cuts, loss) == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.integers(0, 7), max_size=4).map(sorted))
def test_any_batches_give_the_same(cuts: list[int]) -> None:
    for function in (jobs.largest, lambda out, y: jobs.largest(out, y).mean()):
        got = measured(function, SCORES, CLASSES, cuts)
        assert got == pytest.approx(SCORES.amax(1).mean().item(), abs=1e-6)


def test_replicas_with_uneven_batches_agree() -> None:
    x, y = jobs.data(7)
    output = jobs.net()(x)
    expected = {
        "loss": nn.functional.cross_entropy(output, y).item(),
        "accuracy": (output.argmax(1) == y).double().mean().item(),
        "largest": output.amax(1).mean().item(),
    }
    for figures in jobs.on_replicas(jobs.uneven_figures, 2):
        assert figures == pytest.approx(expected, abs=1e-12)


def test_low_precision_rounds_no_target() -> None:
    (metric,) = make_metrics(["mae"], None)
    metric.update(torch.full((2,), 256.0).bfloat16(), torch.full((2,), 257.0), 2)
    assert metric.compute() == 1.0


def test_values_of_every_kind() -> None:
    def half(output: Tensor, target: Tensor) -> Any:
        return 0.5

    class Squares:
        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return output.square()  # several values an example: their mean

    metrics = make_metrics([half, Squares(), "loss"], None)
    assert [metric.name for metric in metrics] == ["half", "Squares"]
    for metric in metrics:
        assert metric.compute() != metric.compute()  # nothing yet
        metric.update(SCORES, CLASSES, 7)
    assert metrics[0].compute() == 0.5
    assert metrics[1].compute() == pytest.approx(SCORES.square().mean().item())
    metrics[0].reset()
    assert sums(metrics[0]) == [0.0, 0.0]


def test_what_is_no_metric() -> None:
    with pytest.raises(UserError, match=r"unknown metric 'acuracy'\n.*Did you mean 'accuracy'\?"):
        make_metrics(["acuracy"], None)
    with pytest.raises(UserError, match=r"two metrics are named \{'accuracy'\}"):
        make_metrics(["accuracy", "accuracy"], None)
    (wrong,) = make_metrics([lambda output, target: output[:3]], None)
    with pytest.raises(UserError, match=r"returned \(3, 6\) float32 for 7 examples"):
        wrong.update(SCORES, CLASSES, 7)
    (wordy,) = make_metrics([lambda output, target: {"a": 1}], None)
    with pytest.raises(UserError, match=r"returned dict\n.*one value per example"):
        wordy.update(SCORES, CLASSES, 7)
    (top,) = make_metrics(["top_1"], None)
    for target in (CLASSES[:, None], CLASSES[:, None, None].repeat(1, 2, 6)):
        with pytest.raises(UserError, match="a metric does not fit"):
            top.update(SCORES, target, 7)
    with pytest.raises(UserError, match="a metric does not fit"):
        top.update(SCORES[:, :1], CLASSES, 7)
    for name in ("mae", "mse", "binary_accuracy"):
        (metric,) = make_metrics([name], None)
        with pytest.raises(UserError, match=r"output of \(7, 6\) float32 and a target of \(7, 1\)"):
            metric.update(SCORES, BITS[:, None], 7)


def test_one_name_is_enough_and_ignored_targets_do_not_count() -> None:
    (metric,) = make_metrics("accuracy", nn.CrossEntropyLoss(ignore_index=5))
    metric.update(SCORES[:3], CLASSES[:3], 3)
    metric.update(SCORES[3:], CLASSES[3:], 4)
    counted = CLASSES != 5
    right = (SCORES.argmax(1) == CLASSES)[counted]
    assert sums(metric) == [right.sum().item(), counted.sum().item()]
    (top,) = make_metrics(["top_2_accuracy"], nn.CrossEntropyLoss(ignore_index=5))
    top.update(SCORES, CLASSES, 7)
    assert sums(top)[1] == counted.sum().item()


@pytest.mark.parametrize("length", [5, 6])  # 6: as many tokens as classes
@pytest.mark.parametrize("form", [dict, lambda **parts: SimpleNamespace(**parts)])
def test_names_find_their_tensors_in_mappings_and_objects(form: Any, length: int) -> None:
    """As models of transformers return them: classes last, labels of -100 left out."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, length, 6, generator=generator)
    labels = torch.randint(0, 6, (4, length), generator=generator)
    labels[1:, 3:] = -100
    (metric,) = make_metrics("accuracy", None)
    for rows in (slice(0, 1), slice(1, 4)):  # uneven in tokens too
        output = form(loss=torch.tensor(1.0), logits=logits[rows].bfloat16(), num_items=7)
        metric.update(output, {"input_ids": labels[rows], "labels": labels[rows]}, 3)
    counted = labels != -100
    right = (logits.bfloat16().float().argmax(-1) == labels)[counted]
    assert metric.compute() == pytest.approx(right.double().mean().item(), abs=1e-12)
    for output in (form(loss=torch.tensor(1.0)), form(one=logits, two=logits)):
        with pytest.raises(UserError, match="a metric does not fit an output of"):
            metric.update(output, labels, 4)


def test_a_class_of_bytes_is_not_taken_for_an_ignored_one() -> None:
    (metric,) = make_metrics("accuracy", None)
    metric.update(torch.eye(157)[[156, 1]], torch.tensor([156, 0], dtype=torch.uint8), 2)
    assert sums(metric) == [1.0, 2.0]


def test_perplexity_is_that_of_all_tokens_that_count() -> None:
    generator = torch.Generator().manual_seed(5)
    output = torch.randn(7, 4, 3, generator=generator)
    target = torch.randint(3, (7, 4), generator=generator)
    target[1:3], target[5, 2] = -100, -100
    kept = torch.ne(target, -100)
    wanted = nn.functional.cross_entropy(output[kept], target[kept]).exp().item()
    assert measured("perplexity", output, target, [2, 5]) == pytest.approx(wanted, rel=1e-6)
    (own,) = make_metrics(["perplexity"], nn.CrossEntropyLoss(ignore_index=1))
    own.update(output, target.clamp(min=1), 7)
    assert own.compute() == pytest.approx(
        nn.functional.cross_entropy(
            output.flatten(0, 1), target.clamp(min=1).flatten(), ignore_index=1
        )
        .exp()
        .item(),
        rel=1e-6,
    )
    own.update(torch.tensor([[[-2000.0, 2000.0, 0.0]]]), torch.tensor([[0]]), 1)
    own.update(torch.tensor([[[-1e6, 1e6, 0.0]]]), torch.tensor([[0]]), 1)
    assert own.compute() == float("inf")
    with pytest.raises(UserError, match="does not fit"):
        measured("perplexity", output.mT, target, [])


def test_functions_may_count_what_they_like() -> None:
    (metric,) = make_metrics(lambda output, target: (output["hits"], output["of"]), None)
    for hits, of in ((1, 2), (torch.tensor(5), 6)):
        metric.update({"hits": hits, "of": of}, None, 3)
    assert metric.compute() == 6 / 8


class Reads(TorchDispatchMode):
    """Counts how often the host waits for the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "given", ["accuracy", "top_2", lambda output, target: output.sum(), lambda output, target: 0.5]
)
def test_nothing_is_read_from_the_device_before_somebody_looks(given: Any) -> None:
    (metric,) = make_metrics(given, None)
    with Reads() as reads:
        metric.update(SCORES, CLASSES, 7)
        metric.update(SCORES.bfloat16(), CLASSES, 7)
        assert reads.count == 0
        assert metric.compute() == metric.compute()
        assert reads.count > 0 or isinstance(given, str)  # counts on the host are numbers
