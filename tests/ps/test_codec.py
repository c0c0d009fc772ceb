"""What travels has the promised size; floating numbers are rounded once, all else is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spartito.errors import UserError
from spartito.ps.protocol.codec import NarrowCodec, PlainCodec, check_wire_dtype, make_codec
from spartito.ps.protocol.layout import BUFFER, ITEM_SIZES, Entry, Layout, Span, cut, runs
from spartito.ps.protocol.memory import allocate, dtype_of

ROUNDED = ("float32", "float64")
MODEL = Layout(
    [
        Entry("weight", "float32", (700,), 0),
        Entry("scale", "float64", (33,), 1),
        Entry("half", "bfloat16", (50,), 0),
        Entry("wave", "complex64", (9,), 0),
        Entry("mean", "float32", (40,), BUFFER),
        Entry("count", "int64", (3,), BUFFER),
        Entry("mask", "bool", (21,), BUFFER),
        Entry("bytes", "uint8", (5,), BUFFER),
    ]
)


def filled(layout: Layout, span: Span, seed: int, scale: float = 1.0) -> Tensor:
    """Memory of a span in which every element is a number of its dtype."""
    memory, dice = allocate(span), torch.Generator().manual_seed(seed)
    for run in runs(layout, span):
        view = memory[run.start - span.start : run.stop - span.start].view(dtype_of(run.dtype))
        numbers = torch.randn(view.shape, generator=dice, dtype=torch.float64)
        view.copy_((numbers * scale if view.is_floating_point() else numbers * 100).to(view.dtype))
    return memory


def through(layout: Layout, span: Span, memory: Tensor, name: str | None) -> tuple[Tensor, int]:
    """What arrives, and how many bytes went over the wire."""
    near, progress = make_codec(layout, span, name), make_codec(layout, span, name)
    sent = b"".join(near.encode(memory))
    assert len(sent) == near.size == progress.size
    arrived = allocate(span)
    buffer = progress.buffer(arrived)
    assert buffer.nbytes == len(sent)
    buffer[:] = sent
    progress.decode(arrived, buffer)
    return arrived, len(sent)


@given(
    servers=st.integers(1, 4),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    name=st.sampled_from(["bfloat16", "float16"]),
)
def test_numbers_are_rounded_and_all_else_is_exact(
    servers: int, seed: int, scale: float, name: str
) -> None:
    sent_as = dtype_of(name)
    for span in cut(MODEL, servers, 1, False):
        memory = filled(MODEL, span, seed, scale)
        arrived, size = through(MODEL, span, memory, name)
        least = 0
        for run in runs(MODEL, span):
            here = slice(run.start - span.start, run.stop - span.start)
            old, new = (bytes_[here].view(dtype_of(run.dtype)) for bytes_ in (memory, arrived))
            rounded = run.dtype in ROUNDED and run.group != BUFFER
            item = 2 if rounded else ITEM_SIZES[run.dtype]
            least += old.numel() * item
            if rounded:
                about = torch.finfo(sent_as)
                buffer = old.abs() * about.eps / 2 + about.smallest_normal * about.eps / 2
                assert bool(((new - old).abs() <= buffer * (1 + 1e-6)).all())
                assert torch.equal(new, old.to(sent_as).to(old.dtype))
            else:
                assert torch.equal(memory[here], arrived[here])
        assert least <= size <= least + 64 * len(runs(MODEL, span))


@given(
    servers=st.integers(1, 4),
    left_out=st.frozensets(st.integers(0, 7)),
    name=st.sampled_from([None, "bfloat16"]),
)
def test_runs_can_be_left_out(servers: int, left_out: frozenset[int], name: str | None) -> None:
    for span in cut(MODEL, servers, 1, False):
        found = runs(MODEL, span)
        out = left_out & frozenset(range(len(found)))
        near, progress = make_codec(MODEL, span, name), make_codec(MODEL, span, name)
        old, new = filled(MODEL, span, 1), filled(MODEL, span, 2)
        whole, _ = through(MODEL, span, new, name)
        sent = b"".join(near.encode(new, out))
        assert len(sent) == near.size_without(out)
        arrived = old.clone()
        if out:
            progress.decode(arrived, memoryview(sent), out)
        else:
            progress.buffer(arrived)[:] = sent
            progress.decode(arrived, progress.buffer(arrived))
        for number, run in enumerate(found):
            here = slice(run.start - span.start, run.stop - span.start)
            assert torch.equal(arrived[here], (old if number in out else whole)[here])


def test_what_has_no_narrow_form_stays_what_it_is() -> None:
    span = Span(0, MODEL.size)
    memory = filled(MODEL, span, 0)
    start = next(run.start for run in runs(MODEL, span) if run.dtype == "float32")
    numbers = memory[start : start + 4 * 700].view(torch.float32)
    inf, nan = float("inf"), float("nan")
    numbers[:6] = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1e-45])
    for name in ("bfloat16", "float16"):
        arrived, _ = through(MODEL, span, memory, name)
        found = arrived[start : start + 24].view(torch.float32)
        assert found[:2].tolist() == [inf, -inf]
        assert found[2].isnan()
        assert found[3:].tolist() == [0.0, 0.0, 0.0]
        assert found[4].signbit()


def test_a_finite_number_stays_finite_in_float16() -> None:
    layout = Layout([Entry("weight", "float32", (16,), 0)])
    span = Span(0, layout.size)
    memory = allocate(span)
    memory.view(torch.float32)[:3] = torch.tensor([1e9, -7e4, 65504.0])
    arrived, size = through(layout, span, memory, "float16")
    assert arrived.view(torch.float32)[:3].tolist() == [65504.0, -65504.0, 65504.0]
    assert size == 64  # 16 numbers, filled up to a line


def test_plain_bytes_are_not_copied() -> None:
    span = Span(0, MODEL.size)
    memory = filled(MODEL, span, 3)
    codec = make_codec(MODEL, span, None)
    assert isinstance(codec, PlainCodec)
    assert (
        torch.frombuffer(codec.encode(memory)[0], dtype=torch.uint8).data_ptr() == memory.data_ptr()
    )
    arrived, size = through(MODEL, span, memory, None)
    assert torch.equal(arrived, memory)
    assert size == span.size


def test_half_the_bytes_travel() -> None:
    layout = Layout([Entry("weight", "float32", (1 << 16,), 0)])
    codec = make_codec(layout, Span(0, layout.size), "bfloat16")
    assert isinstance(codec, NarrowCodec)
    assert codec.size * 2 == layout.size


@pytest.mark.parametrize(
    ("said", "meant"),
    [(None, None), ("bf16", "bfloat16"), ("fp16", "float16"), ("bfloat16", "bfloat16")],
)
def test_names_of_wire_dtypes(said: str | None, meant: str | None) -> None:
    assert check_wire_dtype(said) == meant


@pytest.mark.parametrize("name", ["fp8", "", "float32"])
def test_an_unknown_wire_dtype(name: str) -> None:
    with pytest.raises(UserError, match=f"wire_dtype='{name}'"):
        check_wire_dtype(name)
