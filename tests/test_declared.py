"""The text form of strategies: what is written is read again, and mistakes are pointed at."""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Iterable
from dataclasses import fields
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spartito as sp
from spartito.declared import (
    DEEPEST,
    LONGEST,
    Declared,
    declared_by,
    described,
    json_options,
    parse,
    parse_all,
)
from spartito.errors import UserError
from spartito.registry import BUILT_IN, OF_THE_JOB, default_name

NAMES = st.text(string.ascii_letters + "_", min_size=1, max_size=12).filter(
    lambda name: name not in ("None", "True", "False")
)
ANY_TEXT = st.text(max_size=30)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**80), 10**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANY_TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(SCALARS, inner, max_size=3)
    ),
    max_leaves=6,
)
OPTIONS = st.dictionaries(NAMES.filter(lambda name: name != "inside"), VALUES, max_size=4)
ALONE = st.builds(Declared, NAMES, OPTIONS)
STRATEGIES = st.recursive(
    ALONE,
    lambda inner: st.builds(
        lambda name, options, held: Declared(name, {**options, "inside": held}),
        *(NAMES, OPTIONS, inner),
    ),
    max_leaves=3,
)
WORDS = ("local_sgd", "mesh", "inside", "sharded", "every", "zero", "True", "None", "20", "1e5")
PARTS = st.sampled_from([*WORDS, *"""-=,:()[]{}"'\\ \n\0é"""])


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same types all through."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Declared):
        return one.name == other.name and same(dict(one.options), dict(other.options))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(repr(one) == repr(other))  # -0.0 is not 0.0


@given(STRATEGIES)
def test_what_is_written_is_read_again(declared: Declared) -> None:
    text = str(declared)
    found = parse(text, checked=False)
    assert same(found, declared)
    assert found == declared
    assert hash(found) == hash(declared)
    assert str(found) == text
    assert text.isprintable()
    assert text.encode().decode() == text
    assert shlex.split(shlex.quote(text)) == [text]


@given(st.text() | st.lists(PARTS, max_size=30).map("".join), st.booleans())
def test_any_text_is_a_strategy_or_a_mistake(text: str, checked: bool) -> None:
    try:
        found = parse(text, checked=checked)
    except UserError:
        return
    assert parse(str(found), checked=checked) == found


@pytest.mark.parametrize("opened", ["[", "(", "{1:", "a(inside=", "a(x="])
def test_a_text_is_bounded_in_depth_and_length(opened: str) -> None:
    for count in (DEEPEST + 2, 2000):
        with pytest.raises(UserError):
            parse("a(x=" + opened * count, checked=False)
    with pytest.raises(UserError, match="at most"):
        parse("a" * (LONGEST + 1))
    held: Any = 1
    for _ in range(3000):
        held = [held]
    with pytest.raises(UserError, match="literal"):
        Declared("a", {"x": held})
    long = parse("a(x=[" + "1," * (LONGEST // 4) + "])", checked=False)
    assert len(long.options["x"]) == LONGEST // 4


def test_the_canonical_form() -> None:
    text = "local_sgd( inside = sharded( zero=2, ) ,every=0_20.0, compress='4\\x62it')"
    found = parse("local_sgd(inside='sharded(zero=2)', every=20, compress='4bit')")
    assert str(found) == 'local_sgd(compress="4bit", every=20, inside=sharded(zero=2))'
    assert found.inside == Declared("sharded", {"zero": 2})
    assert parse(text.replace("0_20.0", "2_0")) == found
    assert str(parse("mirrored()")) == "mirrored"
    assert parse("local_sgd(every=True)") != parse("local_sgd(every=1)")
    axes = [parse(f"mesh(mesh={{{text}}})") for text in ('"a": 1, "b": 2', '"b": 2, "a": 1')]
    assert axes[0] != axes[1]
    assert parse("local_sgd(sites=(1), every=(1,))").options == {"sites": 1, "every": (1,)}


MISTAKES = [
    ("local_sgd(evry=20)", "evry", "local_sgd has no option 'evry'", "Did you mean 'every'?"),
    ("mesh(data=2)", "data", "mesh has no option 'data'", 'mesh={"data": 2, "model": 2}'),
    ("pipeline(inside=sharded)", "inside", "pipeline has no option 'inside'", "Write zero=1"),
    ("local_sgd(every=20", None, "expected , or ) after every, not the end", ""),
    ("local_sgd(20)", "20", "expected the name of an option", "as local_sgd(groups=...)"),
    ("local_sgd:every=20", ":", "':' after local_sgd", "Options stand in parentheses"),
    ("local_sgd(compress=4bit)", "4bit", "4bit has no quotes", 'Write "4bit"'),
    ("local_sgd(every=true)", "true", "true is no literal", "Write True."),
    ("local_sgd(every=020)", "020", "020 is no number", ""),
    ("local_sgd(every=1e999)", "1e999", "1e999 is no number", ""),
    ("local_sgd(every=5 groups=2)", "groups", "expected , or ) after every", ""),
    ("local_sgd(every=5, every=6)", "every=6", "every is said twice", ""),
    ("local_sgd(every=[1, 2)", ")", "expected , or ]", ""),
    ("local_sgd(outer='diloco)", "'", "the quote is not closed", ""),
    ("local_sgd(outer='a\\qb')", "\\q", "\\q stands for no character", ""),
    ("local_sgd(inside=one_device)", "one_device", "cannot hold one_device", "mirrored"),
    ("parameter_server(inside=pipeline)", "pipeline", "cannot hold pipeline", "mesh"),
    ("local_sgd(inside=local_sgd(every=2))", "local_sgd(every=2", "cannot hold local_sgd", ""),
    ("local_sgd(inside=shard,)", "shard,", "'shard' is not a strategy", "Did you mean 'sharded'?"),
    ("local_sgd(inside=sharded(zer=2))", "zer", "sharded has no option", "'zero'"),
    ("local_sgd(inside=sharded(timeout=2))", "timeout", "of the whole job", "outermost"),
    ("lokal_sgd(every=3)", "lokal", "'lokal_sgd' is not a strategy", "'local_sgd'"),
    ("mirrored mesh", "mesh", "'m' after the strategy", ""),
    ("mesh(mesh={data: 2})", "data", "data has no quotes", 'Write "data"'),
    ("mesh(mesh={'data': 2, 'data': 3})", "'data': 3", "'data' is said twice", ""),
    ("local_sgd(every=__import__('os'))", "__", "has no quotes", ""),
]


@pytest.mark.parametrize(("text", "at", "what", "do"), MISTAKES)
def test_a_mistake_is_pointed_at(text: str, at: str | None, what: str, do: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(text, "--strategy")
    said, shown, caret, hint = str(raised.value).split("\n")
    assert said.startswith("--strategy: ")
    assert what in said
    assert shown.strip() == text
    assert caret.index("^") - 2 == (len(text) if at is None else text.index(at))
    assert do in hint


def test_long_texts_are_shown_around_the_mistake() -> None:
    text = f"local_sgd(outer='{'x' * 200}', evry=1, weights='{'y' * 200}')"
    with pytest.raises(UserError) as raised:
        parse(text)
    _, shown, caret, _ = str(raised.value).split("\n")
    assert shown[caret.index("^") :].startswith("evry=1")
    assert shown.startswith("  ...x")
    assert shown.endswith("y...")
    with pytest.raises(UserError) as raised:
        parse("local_sgd(\n  every=20,\n  evry=3,\n)")
    assert str(raised.value).split("\n")[1:3] == ["    evry=3,", "    ^"]


@pytest.mark.parametrize("name", ["None", "True", "", "a b", "-a", "a-", "é", "a("])
def test_what_cannot_name_a_strategy(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a strategy"):
        Declared(name)


def test_a_name_alone_has_nothing_to_point_into() -> None:
    with pytest.raises(UserError) as raised:
        parse("mirored", "--strategy")
    assert str(raised.value).startswith(
        "--strategy: 'mirored' is not a strategy\n  Did you mean 'mirrored'?"
    )


def test_several_at_commas() -> None:
    found = parse_all("mirrored, local_sgd(every=[5, 50], sites=2), mirrored,", "--strategies")
    assert list(map(str, found)) == ["mirrored", "local_sgd(every=[5, 50], sites=2)"]
    for text, what in {
        "": "names no strategy",
        "mirrored,,mesh": "expected the name",
        "mirrored mesh": "after a strategy",
    }.items():
        with pytest.raises(UserError, match=what):
            parse_all(text, "--strategies")


def test_json_on_top_wins() -> None:
    env = {
        "SPARTITO_STRATEGY": "local_sgd(every=20, groups=2)",
        "SPARTITO_STRATEGY_OPTIONS": '{"every": 50, "inside": "sharded(zero=2)"}',
    }
    found = declared_by(env, "mirrored")
    assert str(found) == "local_sgd(every=50, groups=2, inside=sharded(zero=2))"
    assert str(declared_by({}, "mirrored")) == "mirrored"
    with pytest.raises(UserError, match="no option 'evry'"):
        declared_by({**env, "SPARTITO_STRATEGY_OPTIONS": '{"evry": 50}'}, "mirrored")


@pytest.mark.parametrize("text", ["{", "[1]", "3", "[" * 100_000, '{"a": NaN}', '{"a b": 1}'])
def test_json_that_is_no_options(text: str) -> None:
    with pytest.raises(UserError):
        Declared("local_sgd").with_options(json_options(text, "--strategy-options"))


@given(st.recursive(SCALARS, lambda inner: st.dictionaries(ANY_TEXT, inner), max_leaves=5))
def test_any_json_is_options_or_a_mistake(value: Any) -> None:
    text = json.dumps(value)
    try:
        found = Declared("a", json_options(text, "--strategy-options"))
    except UserError:
        return
    assert parse(str(found), checked=False) == found


@pytest.mark.parametrize("info", BUILT_IN.values(), ids=lambda info: info.name)
def test_the_table_has_the_options_of_each_class(info: Any) -> None:
    """All fields of the declaration, but those of a job of which its steps know nothing."""
    kind = info.load()
    known = {one.name for one in fields(kind)} - {"cluster"}
    assert set(OF_THE_JOB) <= known
    known -= set(kind.without)
    assert len(info.options) == len(set(info.options))
    assert set(info.options) == known
    assert info.nests == kind.nests
    assert info.recovers == (kind.recovers or info.needs_servers)


def test_file_names_differ_where_texts_do() -> None:
    texts = [
        "local_sgd",
        "local_sgd(every=50)",
        'local_sgd(every=50, outer="diloco")',
        "local_sgd(every=[5, 50], sites=[[0, 1], [2]])",
        "local_sgd(every=[5, 50], sites=[[0], [1, 2]])",
        "local_sgd(every=[5, 50], sites=(0, 1, 2))",
        'local_sgd(compress="topk:0.01")',
        "local_sgd(mixing=1)",
        'local_sgd(mixing="1")',
        "local_sgd(mixing=-1)",
        "local_sgd(mixing=True)",
        'local_sgd(mixing="True")',
        'local_sgd(mixing="/../x")',
        "local_sgd(zero=2, inside=sharded)",
        "local_sgd(inside=sharded(zero=2))",
        f'local_sgd(outer="{"x" * 300}")',
        f'local_sgd(outer="{"x" * 301}")',
    ]
    names = [parse(text, checked=False).slug for text in texts]
    assert len(set(names)) == len(names)
    assert all(set(name) <= {*string.ascii_letters, *string.digits, *"._-"} for name in names)
    assert max(map(len, names)) < 120
    assert names[2] == "local_sgd-every-50-outer-diloco"
    assert names[6] == "local_sgd-compress-topk-0.01"
    assert names[14] == "local_sgd-inside-sharded-zero-2"


@given(st.lists(STRATEGIES, min_size=2, max_size=4, unique=True))
def test_file_names_of_any_texts_differ(several: list[Declared]) -> None:
    assert all(one.slug != other.slug for one, other in combinations(several, 2))


def test_strategies_built_in_python_have_a_text() -> None:
    def outer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters)

    alone = sp.ClusterSpec.alone()
    built = sp.LocalSGDStrategy(
        groups=1,
        every=5,
        outer=outer,
        inside=sp.ShardedStrategy(zero=2, cluster=alone),
        cluster=alone,
    )
    name = f'"{outer.__qualname__}"'
    assert str(built) == f"local_sgd(every=5, groups=1, outer={name}, inside=sharded(zero=2))"
    assert str(sp.OneDeviceStrategy(cluster=alone)) == "one_device"
    assert str(described("a", {"x": object(), "y": float("nan")})) == 'a(x="object", y="float")'


def test_the_text_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARTITO_STRATEGY", raising=False)
    asked = sp.strategy("local_sgd(groups=1, every=7, inside=sharded(zero=2))", every=8)
    assert str(asked) == "local_sgd(every=8, groups=1, inside=sharded(zero=2))"
    with pytest.raises(UserError, match="has no option 'evry'"):
        sp.strategy("local_sgd(evry=7)")
    monkeypatch.setenv("SPARTITO_STRATEGY", "one_device(flush_denormals=False)")
    assert str(sp.strategy()) == "one_device(flush_denormals=False)"


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        ("one_device", "cannot hold one_device"),
        ("sharded(zer=2)", "sharded has no option 'zer'"),
        ("sharded(zero=2", "expected , or \\) after zero"),
        ("sharded(timeout=3)", "of the whole job"),
    ],
)
def test_what_cannot_hold_in_a_group(inside: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        sp.strategy("local_sgd", groups=1, inside=inside)


@pytest.mark.parametrize(
    ("replicas", "servers", "name"),
    [
        (1, 0, "one_device"),
        (2, 0, "multi_worker_mirrored"),
        (1, 1, "parameter_server"),
        (2, 1, "parameter_server"),
    ],
)
def test_what_a_cluster_trains_by_where_nobody_says_so(
    replicas: int, servers: int, name: str
) -> None:
    assert default_name(replicas, servers) == name


@pytest.mark.parametrize(
    ("name", "cluster", "why"),
    [
        ("mirrored", (2, 2, 1), "mirrored with 1 ps: it has no parameter servers"),
        ("parameter_server", (2, 2, 0), "parameter_server without a parameter server"),
        ("one_device", (2, 2, 0), "one_device trains in 1 process, but 2 are asked for"),
        ("mirrored", (4, 2, 0), "mirrored is for one machine, but 2 of 4 replicas"),
    ],
)
def test_a_cluster_that_a_strategy_cannot_have_is_refused(
    name: str, cluster: tuple[int, int, int], why: str
) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        BUILT_IN[name].check(*cluster)
    BUILT_IN["multi_worker_mirrored"].check(4, 2, 0)
