"""What the processes of a pool do: many small cases in one job."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh import functions, shard, spec, whole
from spartito.mesh.recomputation import keep_shards
from tests.mesh import tables
from tests.mesh.cases import axes_of_this_process, failures
from tests.mesh.tables import Cases, r
from tests.replicas import warns


@warns(".* has no rule for", "reduction: 'mean'")
def check(
    what: str, sizes: dict[str, int], most: int = 400, rows_from: float = math.inf
) -> list[str]:
    """The failing cases of one of the functions above, on this process."""
    torch.manual_seed(0)
    with axes_of_this_process(sizes, rows_from) as axes:
        return failures(getattr(tables, what)(), axes, most)


def checkpointed() -> dict[str, Any]:
    """`torch.utils.checkpoint` over shards, and what has no rule that could see it."""
    from torch.utils.checkpoint import checkpoint

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    def part(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.dropout(F.gelu(F.linear(x, a)), 0.3), b)

    def outer(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return checkpoint(part, torch.tanh(x), a, b, use_reentrant=False) * x

    found: dict[str, Any] = {}
    again: Any = checkpoint
    torch.manual_seed(0)
    keep_shards()
    with axes_of_this_process({"model": 2}) as axes:
        cases: Cases = {
            "checkpoint": (
                lambda x, a, b: checkpoint(part, x, a, b, use_reentrant=False) + x,
                [r(2, 4), r(8, 4), r(4, 8)],
            ),
            "nested": (
                lambda x, a, b: checkpoint(outer, x, a, b, use_reentrant=False) + x,
                [r(2, 4), r(8, 4), r(4, 8)],
            ),
        }
        found["wrong"] = failures(cases, axes)
        x: Any = shard(r(2, 4).requires_grad_(), spec((None, "model")), axes)
        twice_of: Any = Twice
        functions.watch()
        found["gradients"] = [
            torch.autograd.grad(whole(made).sum(), x.local)[0].tolist()
            for made in (twice_of.apply(x), x * 1 + twice_of.apply(x))
        ]
        unseen: Any = functions._plain.__func__  # as C++ code calls it
        calls: dict[str, Callable[[], Any]] = {
            "function": lambda: unseen(Twice, x),
            "reentrant": lambda: again(lambda t: t * 2, x, use_reentrant=True),
            "hidden": lambda: x * 1 + unseen(Twice, x),
            "memory": lambda: x.untyped_storage(),
        }
        for name, run in calls.items():
            try:
                whole(run()).sum().backward()
                found[name] = "nothing"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        twice = torch.autograd.grad((whole(x * x) ** 2).sum(), x.local, create_graph=True)[0]
        second = torch.autograd.grad(twice.sum(), x.local)[0]
        found["second"] = torch.allclose(second, 12 * x.local.detach() ** 2)
        seen: list[Any] = []
        y = x * 1
        y.register_hook(lambda grad: seen.append(grad.shape))
        (y * 3).sum().backward()
        found["hook"] = seen[0]
        grads = [torch.ones(y.shape), torch.full(y.shape, 2.0)]
        leaf = r(2, 4).requires_grad_()
        half: Any = shard(leaf, spec((None, "model")), axes)
        torch.autograd.backward([half * 2, whole(half * 3)], grads)
        found["several"] = None if leaf.grad is None else leaf.grad.unique().tolist()
        with torch.autocast("cpu", torch.bfloat16):
            w = shard(torch.randn(8, 4), spec(("model", None)), axes)
            found["autocast"] = F.linear(torch.randn(2, 4), w).dtype
    return found
