"""Which groups a job has, and what is refused before the first step."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spartito.errors import UserError
from spartito.outer.fragments import fragments_of
from spartito.outer.groups import check_weights, groups_of, sites_of, updates_between
from spartito.outer.optimizer import (
    Average,
    DiLoCo,
    choose,
    load_outer_state,
    make_outer,
    outer_state,
)


@given(st.integers(1, 40), st.data())
def test_groups_divide_the_replicas(tasks: int, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([n for n in range(1, tasks + 1) if tasks % n == 0]))
    found = groups_of(count, (), tasks)
    assert [rank for group in found for rank in group] == list(range(tasks))
    assert {len(group) for group in found} == {tasks // count}


@given(st.permutations(range(9)), st.sets(st.integers(1, 8)))
def test_listed_groups_are_sorted_by_their_first_ranks(ranks: list[int], cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), 9]
    listed = [ranks[a:b] for a, b in pairwise(edges)]
    found = groups_of(listed, (), 9)
    assert sorted(map(sorted, listed)) == [list(group) for group in found]
    assert groups_of("machine", listed, 9) == found
    assert found[0][0] == 0  # the chief's group is the first
    assert sites_of(listed if len(listed) > 1 else 3, 9)[0][0] == 0


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (3, "groups=3 of 4 replicas.*divides their number \\(1, 2, 4\\)"),
        (0, "groups=0 of 4"),
        (True, "groups=True of 4 replicas"),
        ("machines", "groups='machines'.*machine"),
        ([[0, 1], [2, 3], []], "a group without members"),
        ([], "a group without members"),
        ([[0, 1], [2]], "rank 3 is in none"),
        ([[0, 1], [1, 2, 3]], "rank 1 is in more than one"),
        ([[0, 1], [2, 3, 4]], "there is no rank 4"),
        ([[0, 1], [2, "3"]], "ranks are whole numbers"),
        ([0, 1, 2, 3], "List the ranks of each group"),
    ],
)
def test_other_groups_are_refused(asked: Any, text: str) -> None:
    with pytest.raises(UserError, match=re.compile(text, re.DOTALL)):
        groups_of(asked, (), 4)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (2, "sites=2 of 3 groups.*divides their number \\(1, 3\\)"),
        (1, "all groups are in one"),
        ([[0, 1, 2]], "all groups are in one"),
        ([[0, 1], []], "a site without members"),
        ([[0, 1], [1, 2]], "group 1 is in more than one"),
        ([[0], [1]], "group 2 is in none"),
        ("machine", "List the groups of each site"),
    ],
)
def test_other_sites_are_refused(asked: Any, text: str) -> None:
    with pytest.raises(UserError, match=re.compile(text, re.DOTALL)):
        sites_of(asked, 3)


def test_other_numbers_are_refused() -> None:
    for every in (0, -1, 2.5, True, "20"):
        with pytest.raises(UserError, match=f"every={every!r}"):
            updates_between(every, None)
    for listed in (20, [20], [20, 20], [20, 30], [40, 20], [0, 20], [20, 40, 80], "20"):
        with pytest.raises(UserError, match="every="):
            updates_between(listed, 2)
    assert updates_between([20, 200], [[0, 1], [2]]) == (20, 200)
    with pytest.raises(UserError, match=r"weights='token'\n.*tokens"):
        check_weights("token")


def copies() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]


def test_outer_optimizers() -> None:
    assert choose(None) == choose("average") == Average()
    assert choose("diloco") == DiLoCo(0.7, 0.9)
    assert choose({"lr": 1.0}) == DiLoCo(1.0, 0.9)
    for wrong in ("dilco", {"rate": 1}, {"lr": 0}, {"momentum": 1.0}, {"lr": "0.7"}, 0.7):
        with pytest.raises(UserError, match="outer"):
            choose(wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="outer=SGD"):
        choose(torch.optim.SGD(copies(), 0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (lambda p: torch.optim.SGD(list(p)[:1], 0.1), "1 parameters, of 2 that meet"),
        (lambda p: torch.optim.SGD(copies(), 0.1), "of 2 that meet"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS"),
        (lambda p: None, "returned NoneType"),
    ],
)
def test_outer_optimizers_of_other_parameters_are_refused(factory: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make_outer(factory, copies())


def test_the_state_of_another_outer_optimizer_is_refused() -> None:
    def begun(parameters: list[nn.Parameter]) -> Any:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer = make_outer(DiLoCo(), parameters)
        optimizer.step()
        names = dict(zip(map(id, parameters), "ab", strict=True))
        return outer_state(optimizer, names)

    fresh = copies()
    named = dict(zip("ab", fresh, strict=True))
    optimizer = make_outer(DiLoCo(), fresh)
    load_outer_state(optimizer, named, begun(copies()))
    assert [*optimizer.state[fresh[0]]["momentum_buffer"].view(-1)] == [0.5] * 6
    with pytest.raises(UserError, match="outer optimizer SGD, this one is Adam"):
        load_outer_state(torch.optim.Adam(fresh), named, begun(copies()))
    with pytest.raises(UserError, match=r"'momentum_buffer' of a is \(3,\).*\(2, 3\)"):
        load_outer_state(optimizer, named, begun([*reversed(copies())]))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_fragments_are_all_layers_in_their_order(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    found = fragments_of(sizes, count)
    assert [layer for part in found for layer in part] == list(range(len(sizes)))
    assert all(found)
    assert len(found) == count
    sums = [sum(sizes[n] for n in part) for part in found]
    if count < len(sizes):  # none is larger than its part by more than two layers
        assert max(sums) <= sum(sizes) / count + 2 * max(sizes)
