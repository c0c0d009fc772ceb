"""What the graph of a scalar loss tells of its divisor, and where it tells nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from spartito.data.batch import Batch
from spartito.engine.losses.autograd_graph import compares_rows
from spartito.engine.losses.loss import WeightedLoss, look, look_at_own, weigh
from spartito.engine.losses.loss_halves import Comparisons, makers_of
from spartito.engine.losses.loss_means import (
    COMPARES,
    NORMALIZED,
    NOT_A_MEAN,
    SEVERAL,
    UNTOLD,
    divisor,
)

ce = functional.cross_entropy

SIZE, TOKENS, CLASSES = 6, 5, 4


def scores(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(SIZE, TOKENS, CLASSES, generator=generator, dtype=torch.float64)
    return made.requires_grad_() * 1.0


def labels() -> Tensor:
    found = torch.randint(CLASSES, (SIZE, TOKENS), generator=torch.Generator().manual_seed(2))
    found[1:3, 2:] = -100
    return found


def batch(*data: Any) -> Batch:
    return Batch(data, SIZE, SIZE, torch.arange(SIZE), 0, 0)


def beside_a_teacher(o: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        ce(o.flatten(0, 1), y.flatten())
    return ce(o.flatten(0, 1), y.flatten())


def test_looking_leaves_gradients_as_they_were() -> None:
    kept = float((labels() != -100).sum())
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found = look(beside_a_teacher, scores(), batch(scores(), labels()))
            assert torch.is_grad_enabled() is enabled
        assert found.weight == kept


def of_each(found: list[Tensor]) -> Tensor:
    return torch.stack(found).mean()


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda o, y: ce(o.view(-1, CLASSES), y.reshape(-1)),
    "flat": lambda o, y: ce(o.flatten(0, 1), y.flatten()),
    "shifted": lambda o, y: ce(o[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)),
    "loop": lambda o, y: of_each([ce(o[i], y[i]) for i in range(len(o))]),
    "rows": lambda o, y: of_each([ce(a, b) for a, b in zip(o, y, strict=True)]),
    "unbound": lambda o, y: of_each([ce(a, b) for a, b in zip(o.unbind(), y, strict=True)]),
    "chosen": lambda o, y: of_each([ce(o.select(0, i), y[i]) for i in range(len(o))]),
    "named": lambda o, y: of_each([ce(o.select(dim=-3, index=i), y[i]) for i in range(len(o))]),
    "last": lambda o, y: ce(o.unbind(dim=1)[1], y.select(dim=1, index=1)),
    "cut": lambda o, y: of_each([ce(o[i : i + 1].flatten(0, 1), y[i]) for i in range(len(o))]),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("form", OWN)
def test_a_models_loss_weighs_the_same_with_and_without_gradients(form: str, size: int) -> None:
    """Also that of one example, where a view of all scores is as large as those of one."""

    class Model(nn.Module):
        def forward(self, o: Tensor, y: Tensor) -> Tensor:
            return OWN[form](o * 1.0, y)

    given = Batch((scores()[:size], labels()[:size]), size, size, torch.arange(size), 0, 0)
    with torch.no_grad():
        _, found = look_at_own(Model(), given)
    _, right = look_at_own(Model(), given, from_first=True)
    where = {"shifted": slice(1, None), "last": slice(1, 2)}.get(form, slice(None))
    kept = labels()[:size, where] != -100
    by_example = form in ("loop", "rows", "unbound", "chosen", "named", "cut")
    assert found.weight == right.weight == (size if by_example else float(kept.sum()))
    assert found.value.item() == pytest.approx(right.value.item(), rel=1e-12)


class Own(nn.Module):
    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return beside_a_teacher(o, y)


def test_a_teacher_inside_of_a_model_hides_no_divisor() -> None:
    with torch.no_grad():
        _, found = look_at_own(Own(), batch(scores().detach(), labels()))
        assert not torch.is_grad_enabled()
    assert found.weight == float((labels() != -100).sum())


def read(loss: Any, size: int = SIZE, planned: int = SIZE) -> WeightedLoss:
    o, y = scores()[:size], labels()[:size]
    return weigh(loss(o, y), Batch((o, y), size, planned, torch.arange(size), 0, 0))


def each(o: Tensor, y: Tensor) -> Tensor:
    return ce(o.transpose(1, 2), y.clamp(0), reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: ce(o.flatten(0, 1), y.flatten()),
        lambda o, y: (each(o, y) * (y != -100)).sum() / (y != -100).sum(),
        lambda o, y: (each(o, y) * (y != -100) / (y != -100).sum()).sum(),
        lambda o, y: (each(o, y) * (y != -100)).mean() / (y != -100).double().mean(),
        lambda o, y: each(o, y)[y != -100].mean(),
        lambda o, y: each(o, y).where(y != -100, torch.nan).nanmean(),
        lambda o, y: each(o, y).flatten() @ (y != -100).double().flatten() / (y != -100).sum(),
        lambda o, y: (each(o, y) * (y != -100)).sum() * (1 / (y != -100).sum()),
    ],
)
def test_what_was_counted_is_found(loss: Any) -> None:
    found = read(loss)
    assert not found.doubt
    assert float(found.weight) == float((labels() != -100).sum())


def test_what_is_added_lest_a_count_is_0_counts_once() -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return (each(o, y) * (y != -100)).sum() / ((y != -100).sum() + 1e-4)

    whole, half = read(loss), read(loss, 3)
    kept = (labels() != -100).sum()
    assert float(whole.weight) == pytest.approx(float(kept) + 1e-4, abs=1e-6)
    kept = (labels()[:3] != -100).sum()
    assert float(half.weight) == pytest.approx(float(kept) + 5e-5, abs=1e-6)
    exact = (each(scores(), labels()) * (labels() != -100)).sum()
    torch.testing.assert_close(whole.value * whole.scale, exact, rtol=1e-12, atol=0)


def test_sums_stay_sums() -> None:
    """The parts of a global batch weigh 1 together, so their sum is that of one device."""
    for loss in (lambda o, y: each(o, y).sum(), lambda o, y: each(o, y).sum(0).mean()):
        whole, part = read(loss), read(loss, 2)
        assert (whole.scale, whole.weight) == (1.0, 1.0)
        assert (part.scale, part.weight) == (1.0, 2 / SIZE)


def two(o: Tensor) -> Tensor:
    return torch.stack([o.square().mean(), o.abs().mean()])


LEARNED = torch.nn.Parameter(torch.tensor([0.2, -0.1]).double())


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: (two(o) * LEARNED.exp()).sum(),
        lambda o, y: (two(o) * torch.exp(-LEARNED) + LEARNED).sum(),
        lambda o, y: (two(o) / (2 * LEARNED**2) + LEARNED.tanh()).sum() + LEARNED.sum(),
        lambda o, y: (LEARNED.softmax(0) * two(o)).sum(),
    ],
)
def test_losses_with_weights_that_are_learned_stay_means(loss: Any) -> None:
    for size in (SIZE, 3):
        found = read(loss, size)
        assert (found.doubt, found.scale, found.weight) == ("", size, size)


def shares(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight of its own for each target; together they are 1, as far as they are rounded."""
    weights = torch.rand(y.shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("loss", "doubt"),
    [
        (lambda o, y: ce(o.flatten(0, 1), y.flatten()) + o.square().mean(), SEVERAL),
        (lambda o, y: o.square().mean() + o.sum(), NOT_A_MEAN),
        (lambda o, y: o.mean(0).square().mean(), COMPARES),
        (lambda o, y: (each(o, y) * shares(y, torch.float32)).sum(), NORMALIZED),
        (lambda o, y: (each(o, y) * shares(y, torch.float64)).sum(), NORMALIZED),
        (lambda o, y: (each(o, y) * shares(y, torch.bfloat16)).sum(), NORMALIZED),
        (lambda o, y: (each(o, y) * (shares(y, torch.float32) * y.numel())).mean(), NORMALIZED),
        (lambda o, y: o.square().mean().sqrt(), "a loss made by Sqrt"),
        (lambda o, y: (two(o) ** 2).sum(), "a loss made by Pow"),
        (lambda o, y: o.square().sum() / 7, "a loss that is a sum over the batch divided by 7"),
    ],
)
def test_doubts(loss: Any, doubt: str) -> None:
    assert read(loss).doubt.startswith(doubt)


class Twice(torch.autograd.Function):
    """A mean over examples, of which the graph tells nothing."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.number = scores.numel()
        ctx.shape = scores.shape
        return 2 * scores.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].expand(ctx.shape) * 2 / ctx.number


apply: Any = Twice.apply


def test_halves_end_a_guess_for_good_and_find_what_the_graph_hides() -> None:
    def compare(comparisons: Comparisons, loss: Any, rows: Any = batch) -> WeightedLoss:
        o, y = scores(), labels()
        return comparisons.look(loss, o, rows(o, y), weigh(loss(o, y), rows(o, y)))

    def opaque(o: Tensor, y: Tensor) -> Any:
        return apply(o)

    comparisons = Comparisons()
    assert read(opaque).is_guess
    for _ in range(5):
        assert not compare(comparisons, opaque).doubt
    known = comparisons._of(opaque)
    assert (known.left, known.agreed) == (0, True)
    for loss in (
        lambda o, y: apply(o[y != -100]),
        lambda o, y: (each(o, y) * (each(o, y) / each(o, y).max()).detach()).mean(),
    ):
        assert compare(Comparisons(), loss).doubt


_calls, _kept = 0, {"calls": 0}


def counts_by_name(o: Tensor, y: Tensor) -> Tensor:
    global _calls
    _calls += 1
    return ((o - y[..., None].clamp(0)) ** 2).mean() * 0.5**_calls


def counts_in_a_table(o: Tensor, y: Tensor) -> Tensor:
    _kept["calls"] += 1
    return ((o - y[..., None].clamp(0)) ** 2).mean() * 0.5 ** _kept["calls"]


class Counts:
    """Weighs less with each call, as a loss that is annealed does."""

    calls = 0

    def __call__(self, o: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return ((o - y[..., None].clamp(0)) ** 2).mean() * 0.5**self.calls


def counting() -> Any:
    calls = 0

    def loss(o: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return ((o - y[..., None].clamp(0)) ** 2).mean() * 0.5**calls

    return loss


@pytest.mark.parametrize(
    "loss",
    [counts_by_name, counts_in_a_table, Counts(), Counts().__call__, counting(),
     partial(counting()), partial(counts_by_name)],
)  # fmt: skip
def test_to_compare_halves_of_a_loss_leaves_its_own_state_alone(loss: Any) -> None:
    o, y = scores(), labels()
    first = weigh(loss(o, y), batch(o, y))
    Comparisons().look(loss, o, batch(o, y), first)
    assert float(loss(o, y).detach()) == float(first.value.detach()) / 2


def test_a_loss_that_compares_examples_is_seen_after_many_that_do_not() -> None:
    o = scores()[:, 0]
    for _ in range(100):
        assert divisor(ce(o, labels()[:, 0]), SIZE) is None
    found = divisor(ce(o @ o.T, torch.arange(SIZE)), SIZE)
    assert found is not None
    assert found.doubt == COMPARES


SAME, OTHER = (torch.tensor(7.0), torch.tensor(7.0)), (torch.tensor(7.0), torch.tensor(9.0))
"""Torch has no device for this that has numbers; they are taken for a device's."""


def seen(comparisons: Comparisons, *each: tuple[Tensor, Tensor], loss: Any = None) -> list[str]:
    """The doubts of losses of which each has such numbers on a device, as of one step."""
    found = [WeightedLoss(torch.ones(()), 1.0, 7.0, apart=numbers) for numbers in each]
    o, y = scores(), labels()
    return [comparisons.look(loss, o, batch(o, y), one).doubt for one in found]


def test_numbers_of_a_device_are_told_apart() -> None:
    o, y = scores(), labels()
    found = weigh(ce(o.flatten(0, 1), y.flatten()) + ce(o[:, 0], y[:, 0]), batch(o, y))
    assert (found.doubt, found.apart) == (SEVERAL, ())  # the host knows them


def test_means_over_different_counts_are_seen_after_many_over_one() -> None:
    """On a device, where not each loss is looked at: in each training, and of any number a step."""
    comparisons = Comparisons()
    for _ in range(100):
        assert seen(comparisons, SAME) == [""]
    assert seen(Comparisons(), OTHER) == [SEVERAL]  # that of another model
    for count in (1, 2, 3, 4, 64):
        for bad in (0, count - 1):
            step = [OTHER if number == bad else SAME for number in range(count)]
            assert any(SEVERAL in seen(comparisons, *step) for _ in range(61))


def test_numbers_of_another_loss_are_looked_at_from_its_first_step() -> None:
    comparisons = Comparisons()
    for _ in range(100):
        seen(comparisons, SAME, loss=beside_a_teacher)
    assert seen(comparisons, OTHER, loss=each) == [SEVERAL]


def given(loss: Any, scale: float = 1.0) -> Any:
    """A loss that each step makes a function of its own of."""
    return lambda o, y: loss(o, y) * scale


def logsumexp(o: Tensor, y: Tensor) -> Any:
    return apply(o) if len(o) == SIZE else apply(o) * 3


def test_what_one_loss_has_told_is_not_about_another() -> None:
    comparisons = Comparisons()

    def opaque(o: Tensor, y: Tensor) -> Any:
        return apply(o)

    def doubt(loss: Any) -> str:
        o, y = scores(), labels()
        return comparisons.look(loss, o, batch(o, y), weigh(loss(o, y), batch(o, y))).doubt

    for number in range(5):
        assert not doubt(given(opaque, number + 1.0))
    assert comparisons._of(given(opaque)).left == 0  # it is one loss
    for bad in (given(logsumexp), logsumexp, partial(given(logsumexp))):
        assert doubt(bad)
        assert not doubt(given(opaque))


class _Means:
    def one(self, o: Tensor, y: Tensor) -> Any:
        return apply(o)


def test_what_tells_one_loss_from_another() -> None:
    one, other = _Means(), _Means()
    named: Any = lambda name: lambda o, y: name  # noqa: E731

    def empty(is_there: bool) -> Any:
        if is_there:
            there = 1
        return lambda o, y: there

    for first, second in (
        (one.one, one.one), (given(one.one), given(one.one)), (partial(ce), partial(ce)),
        (named("".join("ab")), named("".join("ab"))), (empty(False), empty(False)),
    ):  # fmt: skip
        assert makers_of(first) == makers_of(second) or first == second
    for first, second in (
        (one.one, other.one), (given(ce), given(each)), (one, other),
        (named("a"), named("b")), (partial(given, ce), partial(given, each)), (ce, each),
    ):  # fmt: skip
        assert makers_of(first) != makers_of(second)


def test_a_loss_of_the_models_own_without_a_graph_is_a_guess() -> None:
    class Detached(nn.Module):
        def forward(self, o: Tensor, y: Tensor) -> Tensor:
            return each(o, y).mean().detach()

    given = batch(scores(), labels())
    for from_first in (False, True):
        found = look_at_own(Detached(), given, from_first)[1]
        assert (found.doubt, found.is_guess) == (UNTOLD, True)


class _Along(torch.autograd.Function):
    """Has the name of what a mesh does with a weight that is cut for a product alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("cut", [False, True])
def test_a_product_with_a_weight_that_a_mesh_cuts_compares_no_examples(cut: bool) -> None:
    rows, weight = scores()[:, 0], nn.Parameter(torch.ones(3, CLASSES, dtype=torch.float64))
    given = _Along.apply(weight) if cut else weight  # type: ignore[no-untyped-call]
    assert not compares_rows([(rows @ given.T).grad_fn], SIZE)
    assert compares_rows([(rows @ scores(2)[:, 0].T).grad_fn], SIZE)
