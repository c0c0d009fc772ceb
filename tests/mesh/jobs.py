"""What the processes of a pool do: many small cases in one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.mesh.cases import axes_of_this_process, failures

Cases = dict[str, tuple[Callable[..., Any], list[Any]]]


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def products() -> Cases:
    return {
        "linear": (F.linear, [r(2, 4), r(6, 4), r(6)]),
        "linear without bias": (F.linear, [r(2, 3, 4), r(6, 4)]),
        "linear of a vector": (F.linear, [r(4), r(6, 4), r(6)]),
        "matmul": (torch.matmul, [r(2, 4, 6), r(2, 6, 8)]),
        "matmul, broadcast": (torch.matmul, [r(2, 1, 4, 6), r(4, 6, 2)]),
        "matrix times vector": (torch.matmul, [r(4, 6), r(6)]),
        "vector times matrices": (torch.matmul, [r(6), r(2, 6, 4)]),
        "@": (lambda a, b: a @ b, [r(4, 6), r(6, 2)]),
    }


def elementwise() -> Cases:
    return {
        "relu": (F.relu, [r(2, 4)]),
        "relu in place": (lambda x: F.relu(x * 2, inplace=True), [r(2, 4)]),
        "gelu": (F.gelu, [r(2, 4)]),
        "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), [r(2, 4)]),
        "add": (torch.add, [r(2, 4), r(2, 4)]),
        "add, alpha": (lambda a, b: torch.add(a, b, alpha=3), [r(2, 4), r(4)]),
        "broadcast": (lambda a, b: a * b, [r(2, 1, 4), r(6, 4)]),
        "scalar": (lambda a: 1 - a / 3 + 2**a, [r(2, 4)]),
        "tensor of no dims": (lambda a, b: a * b, [r(4, 2), r()]),
        "twice the same": (lambda a: a * a + a, [r(2, 4)]),
        "+=": (lambda a, b: (a * 1).__iadd__(b), [r(2, 4), r(2, 4)]),
        "where": (lambda a, b: torch.where(a > 0, a, b), [r(2, 4), r(4)]),
        "promotion": (lambda a, b: a.float() + b, [r(2, 4), r(2, 4)]),
    }


def views() -> Cases:
    return {
        "heads": (lambda x: x.view(2, 4, 4, -1).transpose(1, 2), [r(2, 4, 8)]),
        "heads joined": (lambda x: x.transpose(1, 2).reshape(2, 3, -1), [r(2, 4, 3, 2)]),
        "flatten": (lambda x: x.flatten(1), [r(2, 4, 2, 2)]),
        "flatten all": (lambda x: torch.flatten(x), [r(2, 4, 2)]),
        "rows": (lambda x: x.reshape(-1, x.size(-1)), [r(2, 4, 6)]),
        "permute": (lambda x: x.permute(2, 0, 1), [r(2, 4, 6)]),
        "t": (lambda x: x.t() @ x, [r(2, 4)]),
        "T": (lambda x: x.T, [r(2, 4)]),
        "mT": (lambda x: x.mT, [r(2, 4, 6)]),
        "unsqueeze": (lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)), [r(2, 4)]),
        "squeeze": (lambda x: (x.squeeze(1), x.squeeze(), x.squeeze(0)), [r(2, 1, 4)]),
        "expand": (lambda x: x.expand(3, 2, 4, 6), [r(2, 1, 6)]),
        "movedim": (lambda x: x.movedim(-1, 0), [r(2, 4, 6)]),
        "other sizes": (lambda x: x.view(3, 2, 4).view(2, 12), [r(2, 3, 4)]),
        "of ones": (lambda x: x.view(1, 2, 1, 4, 1), [r(2, 4)]),
        "contiguous": (lambda x: x.transpose(0, 1).contiguous().view(-1), [r(2, 4)]),
        "shape": (lambda x: x * (x.shape[0] + 10 * x.size(1) + x.numel() + x.dim()), [r(2, 4)]),
    }


def models() -> Cases:
    at = torch.tensor([[0, 3, 1], [2, 2, 5]])
    return {
        "embedding": (lambda w: F.embedding(at, w), [r(6, 4)]),
        "embedding, padding": (lambda w: F.embedding(at, w, padding_idx=2), [r(6, 4)]),
        "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [r(2, 6, 4), r(4), r(4)]),
        "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), [r(2, 6, 4), r(4)]),
        "attention": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            [r(2, 4, 3, 2), r(2, 4, 3, 2), r(2, 4, 3, 2)],
        ),
        "not on the table": (lambda x: torch.cumsum(x, 1), [r(2, 4)]),
    }


def check(what: str, sizes: dict[str, int], most: int = 400) -> list[str]:
    """The failing cases of one of the functions above, on this process."""
    torch.manual_seed(0)
    with axes_of_this_process(sizes) as axes:
        return failures(globals()[what](), axes, most)
