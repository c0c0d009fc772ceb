"""Metrics of classifiers are what direct computation over all examples says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import spartito as sp
from spartito.errors import UserError
from spartito.training.metrics.base import State, decode, encode, named
from spartito.training.metrics.names import make_metrics
from tests.training import jobs


def replicated(
    metric: sp.metrics.Metric, output: Tensor, target: Tensor, cuts: Sequence[int]
) -> Any:
    """The figure where each part between two cuts is a batch of another replica."""
    states: list[State] = []
    for start, stop in zip([0, *cuts], [*cuts, len(output)], strict=True):
        own = metric.fresh()
        if stop > start:
            own.update(output[start:stop], target[start:stop], stop - start)
        states += decode(encode([own.state_dict()]))
    whole = metric.fresh()
    whole.merge(states)
    values = named(metric.name, whole.compute())
    return values.get(metric.name, values)


def by_name(name: str, loss: Any = None) -> sp.metrics.Metric:
    return make_metrics(name, loss)[0]


def counts(found: list[int], labels: list[int], c: int) -> tuple[int, int, int]:
    """True positives, predicted and real ones of class ``c``."""
    both = sum(f == c and y == c for f, y in zip(found, labels, strict=True))
    return both, found.count(c), labels.count(c)


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def pairwise_auc(scores: list[float], labels: list[bool]) -> float:
    yes = [s for s, y in zip(scores, labels, strict=True) if y]
    no = [s for s, y in zip(scores, labels, strict=True) if not y]
    if not yes or not no:
        return float("nan")
    return sum((a > b) + (a == b) / 2 for a in yes for b in no) / (len(yes) * len(no))


def average_precision(scores: list[float], labels: list[bool]) -> float:
    total, area, before = sum(labels), 0.0, 0.0
    for level in sorted(set(scores), reverse=True):
        chosen = [y for s, y in zip(scores, labels, strict=True) if s >= level]
        area += (sum(chosen) / total - before) * sum(chosen) / len(chosen)
        before = sum(chosen) / total
    return area


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


SPLITS = st.lists(st.integers(0, 12), max_size=4).map(sorted)
LEVELS = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 3.0]), min_size=36, max_size=36)
LABELS = st.lists(st.integers(0, 2), min_size=12, max_size=12)


@given(LEVELS, LABELS, SPLITS)
def test_several_classes(levels: list[float], labels: list[int], cuts: list[int]) -> None:
    output, target = torch.tensor(levels, dtype=torch.float64).reshape(12, 3), torch.tensor(labels)
    found = output.argmax(1).tolist()
    each = [counts(found, labels, c) for c in range(3)]
    seen = [(r, f, t) for r, f, t in each if f + t]

    def value(name: str) -> Any:
        return replicated(by_name(name), output, target, cuts)

    assert value("precision") == pytest.approx(mean([ratio(r, f) for r, f, _ in seen]))
    assert value("recall") == pytest.approx(mean([ratio(r, t) for r, _, t in seen]))
    assert value("f1") == pytest.approx(mean([2 * r / (f + t) for r, f, t in seen]))
    weighted = sum(t * ratio(2 * r, f + t) for r, f, t in each) / 12
    assert value("f1_weighted") == pytest.approx(weighted)
    assert value("recall_micro") == pytest.approx(sum(r for r, _, _ in each) / 12)
    per_class = replicated(sp.metrics.Recall(average=None), output, target, cuts)
    assert per_class == pytest.approx([ratio(r, t) for r, _, t in each])
    pairs = list(zip(labels, found, strict=True))
    assert value("confusion_matrix") == [[pairs.count((i, j)) for j in range(3)] for i in range(3)]
    columns = [
        pairwise_auc(output.softmax(1)[:, c].tolist(), [y == c for y in labels]) for c in range(3)
    ]
    known = [area for area in columns if area == area]
    assert value("auc") == pytest.approx(mean(known) if known else float("nan"), nan_ok=True)


@given(LEVELS, LABELS, SPLITS, st.sets(st.integers(0, 11)), st.sampled_from([-100, -1, 2]))
def test_ignored_labels_have_no_part_in_areas(
    levels: list[float], labels: list[int], cuts: list[int], left_out: set[int], ignored: int
) -> None:
    output, target = torch.tensor(levels, dtype=torch.float64).reshape(12, 3), torch.tensor(labels)
    target[sorted(left_out)] = ignored
    kept = target != ignored
    for name in ("auc", "pr_auc"):
        found = replicated(
            by_name(name, nn.CrossEntropyLoss(ignore_index=ignored)), output, target, cuts
        )
        expected = replicated(by_name(name), output[kept], target[kept], [])
        assert found == pytest.approx(expected, nan_ok=True)


@given(LEVELS, st.lists(st.booleans(), min_size=12, max_size=12), SPLITS)
def test_yes_or_no(levels: list[float], labels: list[bool], cuts: list[int]) -> None:
    scores = levels[:12]
    output, target = torch.tensor(scores, dtype=torch.float64)[:, None], torch.tensor(labels)
    right, found, there = counts([int(s > 0) for s in scores], [int(y) for y in labels], 1)

    def value(name: str) -> Any:
        return replicated(by_name(name), output, target, cuts)

    assert value("precision") == pytest.approx(ratio(right, found))
    assert value("recall") == pytest.approx(ratio(right, there))
    assert value("f1") == pytest.approx(ratio(2 * right, found + there))
    assert value("auc") == pytest.approx(pairwise_auc(scores, labels), nan_ok=True)
    expected = average_precision(scores, labels) if any(labels) else float("nan")
    assert value("pr_auc") == pytest.approx(expected, nan_ok=True)
    two = torch.cat([torch.zeros_like(output), output], 1)
    for name, average in (("precision", right / found if found else 0.0), ("auc", value("auc"))):
        other = by_name("precision_binary" if name == "precision" else name)
        assert replicated(other, two, target.long(), cuts) == pytest.approx(average, nan_ok=True)


def test_what_outputs_and_targets_may_be() -> None:
    scores = torch.tensor([0.2, 0.7, 0.9, 0.4])
    labels = torch.tensor([0.0, 1.0, 0.0, 1.0])
    probabilities = by_name("recall", nn.BCELoss())
    assert replicated(probabilities, scores, labels, [1]) == 0.5
    assert replicated(sp.metrics.Recall(from_logits=False), scores, labels, [1]) == 0.5
    assert replicated(by_name("recall"), scores, labels, [1]) == 1.0
    logits, classes = torch.eye(3)[[0, 1, 2, 2]], torch.tensor([0, 1, 1, -100])
    assert replicated(by_name("confusion_matrix"), logits, classes, [2]) == [
        [1, 0, 0],
        [0, 1, 1],
        [0, 0, 0],
    ]
    assert replicated(by_name("precision_micro"), logits, classes, [2]) == pytest.approx(2 / 3)
    ignoring = by_name("recall_micro", nn.CrossEntropyLoss(ignore_index=1))
    assert replicated(ignoring, logits, classes.clamp(min=0), [2]) == 0.5
    one_hot = nn.functional.one_hot(classes.clamp(min=0), 3).float()
    assert replicated(by_name("recall_micro"), logits, one_hot, [2]) == 0.5
    several = sp.metrics.Recall(average=None)
    several.adapt(nn.BCEWithLogitsLoss())
    assert replicated(several, logits - 0.5, one_hot, [2]) == [0.5, 0.5, 0.0]
    images, pixels = logits.T.reshape(1, 3, 2, 2), classes.reshape(1, 2, 2)
    assert replicated(by_name("precision_micro"), images, pixels, []) == pytest.approx(2 / 3)
    for name in ("auc", "f1", "confusion_matrix"):
        assert by_name(name).compute() != by_name(name).compute()  # nothing yet
    assert replicated(by_name("auc"), torch.full((2,), float("nan")), classes[:2], []) != 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sp.metrics.F1Score(average="makro"), "Did you mean 'macro'"),
        (lambda: sp.metrics.AUC(curve="roc"), "curve is 'roc'"),
        (lambda: make_metrics("f1_macros", None), "Did you mean 'f1_macro'"),
        (lambda: make_metrics([sp.metrics.AUC], None), "Give AUC"),
        (lambda: make_metrics([3], None), "3 is no metric"),
        (lambda: encode([{"name": ["a"]}]), "the state 'name' of a metric is of str"),
    ],
)
def test_mistakes(make: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make()


def test_a_metric_of_ones_own_and_its_dictionary_in_the_history() -> None:
    class Range(sp.metrics.Metric):
        reductions: ClassVar = {"high": "max", "low": "min"}

        def reset(self) -> None:
            self.state = {"high": torch.tensor(-9.0), "low": torch.tensor(9.0)}

        def update(self, output: Any, target: Any, size: int) -> None:
            self.state["high"] = self.state["high"].maximum(output.max())
            self.state["low"] = self.state["low"].minimum(output.min())

        def compute(self) -> Any:
            return {name: value.item() for name, value in self.state.items()}

    made = jobs.trainer(metrics=[Range("range"), "confusion_matrix"])
    history = made.fit(jobs.data(), epochs=1, validation_data=jobs.data(), verbose=0).history
    output = made.predict(jobs.data())
    assert history["val_range_high"] == [pytest.approx(output.max().item())]
    assert history["val_range_low"] == [pytest.approx(output.min().item())]
    assert sum(map(sum, history["val_confusion_matrix"][0])) == 20


def test_a_matrix_is_in_the_history_and_the_report_and_not_in_the_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [sp.callbacks.TensorBoard(), sp.callbacks.CSVLogger(tmp_path / "rows.csv")]
    made = jobs.trainer(metrics=["confusion_matrix", "f1"], run_dir=tmp_path)
    history = made.fit(
        jobs.data(), epochs=2, validation_data=jobs.data(), callbacks=callbacks
    ).history
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["val_confusion_matrix"] for line in lines] == history["val_confusion_matrix"]
    shown = capsys.readouterr().out
    assert "f1 " in shown
    assert "confusion" not in shown
    page = (tmp_path / "report.html").read_text()
    (right, wrong), _ = lines[-1]["val_confusion_matrix"]
    assert f"<td>{right}</td><td>{wrong}</td>" in page
    watch = sp.callbacks.EarlyStopping("confusion_matrix")
    with pytest.raises(UserError, match="'confusion_matrix', which has several values"):
        made.fit(jobs.data(), epochs=1, callbacks=[watch], verbose=0)


def test_of_two_classes_the_second_one_counts() -> None:
    """As scikit-learn's ``f1_score`` has it by default; of several it is the mean over classes."""
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0], [1.0, 0.0]])
    labels = torch.tensor([0, 1, 0, 1, 0])
    for name, expected in (("precision", 1 / 2), ("recall", 1 / 2), ("f1", 1 / 2)):
        (metric,) = make_metrics([name], nn.CrossEntropyLoss())
        metric.update(scores, labels, 5)
        assert metric.compute() == pytest.approx(expected)
        (macro,) = make_metrics([f"{name}_macro"], nn.CrossEntropyLoss())
        macro.update(scores, labels, 5)
        assert macro.compute() == pytest.approx((expected + 2 / 3) / 2)
    (labelled,) = make_metrics(["f1"], nn.BCEWithLogitsLoss())
    labelled.update(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [1, 0]]), 2)
    assert labelled.compute() == pytest.approx((1.0 + 0.0) / 2)  # of both labels
