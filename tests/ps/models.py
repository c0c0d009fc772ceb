"""Models of strange tensors, drawn at random, and the memory of the servers that hold them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import Span, cut
from spartito.ps.protocol.memory import allocate, dtype_of

LEARNED = ("float64", "float32", "bfloat16", "float16", "complex64")
KEPT = ("int64", "bool", "float32", "uint8", "int16", "uint32", "float8_e5m2", "complex128")
FORMS = ("rows", "columns", "last")
SHAPES = st.one_of(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.sampled_from([(3, 5, 7, 2), (150,), (20, 11)]),  # large enough to be cut
)


class Odd(nn.Module):
    """Parameters in two groups, tied and frozen ones, and buffers of any dtype."""

    def __init__(self, facts: list[tuple[str, tuple[int, ...], str, str]], seed: int) -> None:
        super().__init__()
        self.dice = torch.Generator().manual_seed(seed)
        for number, (dtype, shape, form, kind) in enumerate(facts):
            tensor = shaped(numbers(shape, dtype, self.dice), form)
            name = f"t{number}"
            if kind == "buffer":
                self.register_buffer(name, tensor)
            else:
                parameter = nn.Parameter(tensor, requires_grad=kind != "frozen")
                self.register_parameter(name, parameter)
                if kind == "tied":
                    self.register_parameter(f"{name}_again", parameter)
        self.register_buffer("passing", torch.zeros(3), persistent=False)


@st.composite
def models(draw: st.DrawFn) -> Odd:
    learned = st.tuples(
        st.sampled_from(LEARNED),
        SHAPES,
        st.sampled_from(FORMS),
        st.sampled_from(["free", "free", "tied", "frozen", "unknown"]),
    )
    kept = st.tuples(st.sampled_from(KEPT), SHAPES, st.sampled_from(FORMS), st.just("buffer"))
    facts = draw(st.lists(learned, max_size=5)) + draw(st.lists(kept, max_size=4))
    facts.append(("float32", draw(st.sampled_from([(1,), (30, 9)])), "rows", "free"))
    return Odd(facts, draw(st.integers(0, 1000)))


def numbers(shape: tuple[int, ...], dtype: str, dice: torch.Generator) -> Tensor:
    """Whole numbers from 0 to 7 of any dtype: exact in all, and so are their sums."""
    return torch.randint(0, 8, shape, generator=dice).to(dtype_of(dtype))


def shaped(tensor: Tensor, form: str) -> Tensor:
    """The same elements in another order of the memory."""
    if form == "columns" and tensor.dim() > 1:
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if form == "last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def optimizer(model: nn.Module) -> SGD:
    """Knows the parameters in two groups, but every fifth one not at all."""
    found = [p for name, p in model.named_parameters() if not name.startswith("t4")]
    groups = [part for part in (found[::2], found[1::2]) if part]
    return SGD([{"params": part} for part in groups] or [torch.zeros(1)], lr=0.5)


def spans_of(vector: Vector, servers: int) -> tuple[Span, ...]:
    """As many spans as the model fills, up to ``servers``."""
    sizes = [entry for entry in vector.layout.entries if entry.numel]
    return cut(vector.layout, max(1, min(servers, len(sizes))), 1, False)


def sides(vector: Vector, servers: int) -> list[tuple[Span, Tensor, SpanCopies]]:
    """Of each server its span, memory, and the copies between it and the model."""
    found = [(span, allocate(span)) for span in spans_of(vector, servers)]
    return [(span, memory, SpanCopies(vector, span, memory)) for span, memory in found]
