"""The flat vector holds every element once, aligned; the spans of the servers are fair shares."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.ps.protocol.layout import (
    BUFFER,
    ITEM_SIZES,
    LINE,
    Entry,
    Layout,
    Span,
    cut,
    runs,
    table,
)

KINDS = [("float32", 0), ("float32", 1), ("bfloat16", 0), ("float32", BUFFER), ("int64", BUFFER)]
SHAPES = st.lists(st.integers(0, 60), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    found = draw(st.lists(st.tuples(st.sampled_from(KINDS), SHAPES), min_size=1, max_size=12))
    return Layout(
        Entry(f"p{number}", dtype, shape, group)
        for number, ((dtype, group), shape) in enumerate(found)
    )


def possible(layout: Layout, servers: int, min_bytes: int, whole: bool) -> tuple[Span, ...] | None:
    try:
        return cut(layout, servers, min_bytes, whole)
    except UserError:
        return None


@given(layouts())
def test_entries_lie_in_order_and_runs_begin_at_a_line(layout: Layout) -> None:
    keys = [(entry.group == BUFFER, entry.dtype, entry.group) for entry in layout.entries]
    assert keys == sorted(keys)
    end, last, before = 0, -1, None
    for key, entry, offset in zip(keys, layout.entries, layout.offsets, strict=True):
        if key == before:
            assert offset == end
            assert int(entry.name[1:]) > last
        else:
            assert offset % LINE == 0
            assert 0 <= offset - end < LINE
        last, before, end = int(entry.name[1:]), key, offset + entry.nbytes
    assert layout.size % LINE == 0
    assert 0 <= layout.size - end < LINE


@settings(max_examples=300)
@given(layouts(), st.integers(1, 9), st.sampled_from([0, 1, 64, 500, 4096]), st.booleans())
def test_spans_hold_every_element_once_in_fair_shares(
    layout: Layout, servers: int, min_bytes: int, whole: bool
) -> None:
    spans = possible(layout, servers, min_bytes, whole)
    if spans is None:
        return
    assert len(spans) == servers
    assert (spans[0].start, spans[-1].stop) == (0, layout.size)
    assert all(left.stop == right.start for left, right in pairwise(spans))

    held: dict[int, list[tuple[int, int]]] = {}
    for span in spans:
        found = runs(layout, span)
        assert found  # nobody holds nothing
        assert all(left.stop <= right.start for left, right in pairwise(found))
        for run in found:
            item = ITEM_SIZES[run.dtype]
            target = run.start
            assert span.start <= run.start < run.stop <= span.stop
            assert run.start % LINE == 0 or run.start == span.start
            for part in run.parts:
                entry = layout.entries[part.entry]
                assert (entry.name, entry.dtype, entry.group) == (part.name, run.dtype, run.group)
                assert part.offset == target == layout.offsets[part.entry] + part.begin * item
                target += (part.end - part.begin) * item
                held.setdefault(part.entry, []).append((part.begin, part.end))
                kept = (part.end - part.begin) * item
                assert part.end - part.begin == entry.numel or (kept >= min_bytes and not whole)
            assert target == run.stop
    for number, entry in enumerate(layout.entries):
        parts = held.get(number, [])
        ends = [0, *(end for _, end in parts)]
        assert [begin for begin, _ in parts] == ends[:-1]
        assert ends[-1] == entry.numel

    # What cannot be cut: a whole tensor, or what is too short for two parts (to the next line).
    short = 2 * (min_bytes + 2 * LINE)
    blocks = [entry.nbytes if whole else min(entry.nbytes, short) for entry in layout.entries]
    assert max(span.size for span in spans) <= layout.size / servers + max(blocks) + LINE


@given(layouts(), st.sampled_from([0, 64, 500]), st.booleans())
def test_as_many_servers_as_the_error_says_are_filled(
    layout: Layout, min_bytes: int, whole: bool
) -> None:
    with pytest.raises(UserError, match=r"100000 parameter servers .* fill \d+") as raised:
        cut(layout, 100_000, min_bytes, whole)
    fit = int(str(raised.value).split(" fill ")[1].split()[0])
    if fit:
        assert len(cut(layout, fit, min_bytes, whole)) == fit
    with pytest.raises(UserError):
        cut(layout, fit + 1, min_bytes, whole)


def test_equal_tensors_are_shared_out_equally() -> None:
    layout = Layout(Entry(f"p{number}", "float32", (16,), 0) for number in range(6))
    assert [span.size for span in cut(layout, 3, 0, True)] == [128, 128, 128]


def test_one_tensor_is_cut_into_even_parts_unless_it_must_stay_whole() -> None:
    layout = Layout([Entry("p", "float32", (1000, 100), 0)])
    assert [span.size for span in cut(layout, 4, 1000, False)] == [99_968, 100_032] * 2
    assert [span.size for span in cut(layout, 1, 1000, True)] == [layout.size]
    with pytest.raises(UserError, match="2 parameter servers for parameters that fill 1 ") as error:
        cut(layout, 2, 1000, True)
    assert "at most 1 with --ps" in str(error.value)


@pytest.mark.parametrize("servers", [0, -1])
def test_there_must_be_a_server(servers: int) -> None:
    with pytest.raises(UserError, match="at least one"):
        cut(Layout([Entry("p", "float32", (5,), 0)]), servers, 0, False)


def test_a_dtype_that_is_not_known_is_named() -> None:
    with pytest.raises(UserError, match="scale has dtype qint8"):
        Layout([Entry("scale", "qint8", (3,), 0)])


ENTRIES = (Entry("a", "float32", (4, 6), 0), Entry("b", "float32", (4,), 0))


@pytest.mark.parametrize(
    "other",
    [
        ENTRIES[:1],
        ENTRIES[::-1],
        (replace(ENTRIES[0], name="c"), ENTRIES[1]),
        (replace(ENTRIES[0], dtype="int32"), ENTRIES[1]),
        (replace(ENTRIES[0], shape=(6, 4)), ENTRIES[1]),
        (replace(ENTRIES[0], shape=(24,)), ENTRIES[1]),
        (replace(ENTRIES[0], group=1), ENTRIES[1]),
        (ENTRIES[0], replace(ENTRIES[1], group=BUFFER)),
    ],
)
def test_the_digest_changes_with_anything(other: tuple[Entry, ...]) -> None:
    assert Layout(other).digest != Layout(ENTRIES).digest
    assert Layout(list(ENTRIES)).digest == Layout(ENTRIES).digest


def test_the_table_says_who_holds_what() -> None:
    layout = Layout(
        [
            Entry("w", "float32", (40, 16), 0),
            Entry("v", "float32", (3, 100), 0),
            Entry("n", "int64", (), BUFFER),
        ]
    )
    spans = (Span(0, 640), Span(640, 2880), Span(2880, layout.size))
    assert table(layout, spans, ["ps 0", "ps 1", "ps 2"]) == [
        ("ps 0", "w", "rows 0:10 of 40", "640 bytes"),
        ("ps 1", "w", "rows 10:40 of 40", "1,920 bytes"),
        ("ps 1", "v", "elements 0:80 of 300", "320 bytes"),
        ("ps 2", "v", "elements 80:300 of 300", "880 bytes"),
        ("ps 2", "n", "all", "8 bytes"),
    ]
