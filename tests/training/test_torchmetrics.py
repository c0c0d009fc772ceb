"""Metrics of torchmetrics over uneven replicas are what they are over all examples at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.errors import UserError
from spartito.training.metrics.base import plain
from spartito.training.metrics.names import make_metrics
from tests.training.test_class_metrics import replicated

tm = pytest.importorskip("torchmetrics")
SCORES = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double() / 3 + 0.4
LABELS = torch.arange(40) % 3
TARGETS = SCORES.flip(0)

CASES: dict[str, tuple[Any, Any, Any]] = {
    "sum": (tm.classification.MulticlassF1Score(3), SCORES, LABELS),
    "rows": (tm.classification.MulticlassAUROC(3), SCORES, LABELS),
    "binned": (tm.classification.MulticlassAUROC(3, thresholds=50), SCORES, LABELS),
    "matrix": (tm.classification.MulticlassConfusionMatrix(3), SCORES, LABELS),
    "maximum": (tm.MaxMetric(), SCORES, None),
    "inside of another": (
        tm.ClasswiseWrapper(tm.classification.MulticlassRecall(3, average=None)),
        SCORES,
        LABELS,
    ),
    "composed": (tm.MeanSquaredError() + tm.MeanAbsoluteError(), SCORES, TARGETS),
    "merged by itself": (tm.PearsonCorrCoef(num_outputs=3), SCORES, TARGETS),
}


@pytest.mark.parametrize("cuts", [[], [1], [0, 7, 7, 30], [10, 20]])
@pytest.mark.parametrize("case", CASES)
def test_any_split_is_the_whole(case: str, cuts: list[int]) -> None:
    given, output, target = CASES[case]
    whole = given.clone()
    if target is LABELS:
        whole.update(output.softmax(1), target)
    else:
        whole.update(*(part for part in (output, target) if part is not None))
    expected = plain(whole.compute())
    inputs = (lambda output, _: (output,)) if target is None else None
    metric = sp.metrics.TorchMetric(given, "figure", inputs)
    target = LABELS if target is None else target
    found = replicated(metric, output, target, cuts)
    if isinstance(expected, dict):
        expected = {f"figure_{name}": value for name, value in expected.items()}
    one, other = (torch.tensor(_flat(value)) for value in (found, expected))
    assert torch.allclose(one, other, atol=1e-6)


def _flat(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


def test_a_mean_is_weighted_by_its_examples_and_starts_count_once() -> None:
    class Mean(tm.Metric):  # type: ignore[misc, name-defined]
        level: Any
        count: Any

        def __init__(self) -> None:
            super().__init__()
            self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")
            self.add_state("count", torch.tensor(5), dist_reduce_fx="sum")

        def update(self, output: Any, target: Any) -> None:
            self.level = output.mean()
            self.count += len(output)

        def compute(self) -> Any:
            return torch.stack([self.level, self.count])

    found = replicated(sp.metrics.TorchMetric(Mean()), SCORES, LABELS, [3, 3, 29])
    assert found == pytest.approx([SCORES.mean().item(), 45.0], abs=1e-6)


def test_logits_are_no_matter_of_the_batch() -> None:
    """torchmetrics takes the first batch for probabilities, and the second one for logits."""
    output, labels = torch.tensor([0.3, 0.6, -2.0, 2.0]), torch.tensor([1, 1, 0, 0])
    (metric,) = make_metrics(tm.classification.BinaryAccuracy(), nn.BCEWithLogitsLoss())
    assert metric.name == "binary_accuracy"
    for cuts in ([], [2]):
        assert replicated(metric, output[:, None], labels, cuts) == 0.75
    (plain_one,) = make_metrics(tm.classification.BinaryAccuracy(), nn.BCELoss())
    assert replicated(plain_one, output.clamp(0, 1), labels, [2]) == 0.5


def test_names_collections_and_the_users_own_object() -> None:
    given = tm.classification.MulticlassF1Score(3)
    collection = tm.MetricCollection([tm.MeanSquaredError(), tm.MaxMetric()], prefix="my_")
    metrics = make_metrics([given, collection], None)
    assert [metric.name for metric in metrics] == [
        "multiclass_f1_score", "my_MeanSquaredError", "my_MaxMetric",
    ]  # fmt: skip
    metrics[0].update(SCORES, LABELS, 40)
    assert not given.update_called


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="BootStrapper of torchmetrics depends on the order"):
        make_metrics(tm.BootStrapper(tm.MeanSquaredError()), None)
    with pytest.raises(UserError, match="Running of torchmetrics depends on the order"):
        make_metrics(tm.wrappers.Running(tm.MeanSquaredError()), None)

    class Product(tm.MeanSquaredError):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("product", torch.tensor(1.0), dist_reduce_fx=torch.prod)

    with pytest.raises(UserError, match="the state 'product' of Product is reduced by a function"):
        make_metrics(Product(), None)
