from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster.nodelist import MOST_NODES, expand, expand_counts
from spartito.errors import UserError


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("gpu5", "gpu5"),
        ("node[01-03,07],gpu5", "node01 node02 node03 node07 gpu5"),
        ("rack[1-2]n[1-2]", "rack1n1 rack1n2 rack2n1 rack2n2"),
        ("a[1]b,c-d.e", "a1b c-d.e"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[2,1]", "n2 n1"),
        ("[1-2]", "1 2"),
    ],
)
def test_a_list_is_written_out_in_its_order(nodelist: str, nodes: str) -> None:
    assert expand(nodelist) == tuple(nodes.split())


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "a[1-2",
        "a1-2]",
        "a[]",
        "a[1,]",
        "a[1-]",
        "a[x]",
        "a[1-2-3]",
        "a[[1]]",
        "a[3-1]",
        "a b",
        "a[1-2] b",
        "a[1-9999999]",
        "a[1-999]b[1-999]",
        f"a[1-{MOST_NODES}],b",
        "a[²]",
    ],
)
def test_what_is_no_list_is_named(nodelist: str) -> None:
    with pytest.raises(UserError, match="does not parse") as error:
        expand(nodelist)
    assert repr(nodelist) in str(error.value)


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@given(st.lists(NAMES, min_size=1, max_size=20))
def test_plain_names_stay_as_they_are(names: list[str]) -> None:
    assert expand(",".join(names)) == tuple(names)


@given(NAMES, st.sets(st.integers(0, 3000), min_size=1, max_size=50), st.integers(1, 5))
def test_numbers_come_back_from_their_short_form(name: str, chosen: set[int], width: int) -> None:
    numbers = sorted(chosen)
    wanted = tuple(f"{name}x{n:0{width}d}" for n in numbers)
    # As Slurm writes it: neighbours are one range.
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and ranges[-1][-1] == n - 1:
            ranges[-1].append(n)
        else:
            ranges.append([n])
    written = ",".join(
        f"{r[0]:0{width}d}" if len(r) == 1 else f"{r[0]:0{width}d}-{r[-1]:0{width}d}"
        for r in ranges
    )
    assert expand(f"{name}x[{written}]") == wanted


@given(NAMES, NAMES, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_second_bracket_multiplies(a: str, b: str, first: int, more: int, other: int) -> None:
    nodes = expand(f"{a}[{first}-{first + more}]{b}[0-{other}]")
    assert len(nodes) == len(set(nodes)) == (more + 1) * (other + 1)
    assert nodes[0] == f"{a}{first}{b}0"
    assert nodes[-1] == f"{a}{first + more}{b}{other}"


@given(st.text(alphabet="an[]0-19,. ", max_size=20))
def test_any_text_is_a_list_of_plain_names_or_an_error_of_ours(text: str) -> None:
    try:
        nodes = expand(text)
    except UserError:
        return
    assert nodes
    assert all(re.fullmatch(r"[^\[\],\s]+", node) for node in nodes)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=9))
def test_counts_come_back(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in runs)
    assert expand_counts(text) == tuple(n for n, times in runs for _ in range(times))


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(3)", "2,", "-1", "2(x0)", "1(x9999999)"])
def test_what_are_no_counts_is_named(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(text))):
        expand_counts(text)
