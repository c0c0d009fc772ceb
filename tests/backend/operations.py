"""Collective operations, each with what a pure function of all ranks' values says it must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
SHAPES = ((5,), (3, 4), (), (0,), (2, 0), (70000,))
"""The last is larger than one message."""
LAYOUTS = ("contiguous", "offset", "transposed", "strided")


@dataclass(frozen=True)
class Step:
    """One operation of the ranks ``members``; ``root`` is a position among them."""

    kind: str
    members: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    shape: tuple[int, ...] = (5,)
    layout: str = "contiguous"
    root: int = 0
    is_async: bool = False
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def reduction(self) -> Any:
        return getattr(dist.ReduceOp, self.op)

    def value(self, position: int, part: int = 0) -> Tensor:
        """What the member at ``position`` brings, for the member ``part`` where each gets its own.

        Small whole numbers: sums and products are exact in any order and type.
        """
        count = torch.Size(self.shape).numel()
        numbers = (torch.arange(count) * 3 + position * 5 + part * 7 + self.seed) % 4 + 1
        if self.op == "AVG":
            numbers = numbers * self.size
        return numbers.to(self.dtype).reshape(self.shape)

    def tensor(self, position: int, part: int = 0) -> Tensor:
        """`value`, laid out in memory as the step says."""
        return _laid_out(self.value(position, part), self.layout)

    def empty(self) -> Tensor:
        """Where one value is received; filled with what no rank sends."""
        return _laid_out(torch.full(self.shape, 99).to(self.dtype), self.layout)

    def reduced(self, part: int = 0) -> Tensor:
        """All members' values for ``part``, put together."""
        values = [self.value(position, part) for position in range(self.size)]
        total = reduce(REDUCTIONS[self.op], values)
        return (total / self.size).to(self.dtype) if self.op == "AVG" else total

    def rows(self, sender: int, receiver: int) -> int:
        """How many rows ``sender`` has for ``receiver`` when splits are uneven; 0 among them."""
        return (sender + 2 * receiver + self.seed) % 3


Outputs = list[Any]
Pending = Callable[[], Outputs]


def _laid_out(values: Tensor, layout: str) -> Tensor:
    if layout == "offset":
        return torch.cat([values.new_zeros(1), values.flatten()])[1:].view(values.shape)
    if layout == "transposed" and values.dim() == 2:
        return values.t().contiguous().t()
    if layout == "strided" and values.dim():
        return values.repeat_interleave(2, dim=-1)[..., ::2]
    return values.clone()


# What a rank does. Each takes the step, its position, and the group; it returns what to wait for
# (None where the call has waited) and where the results are.
Start = Callable[[Step, int, Any], tuple[Any, Outputs]]


def _all_reduce(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    tensor = step.tensor(me)
    return dist.all_reduce(tensor, step.reduction, group, step.is_async), [tensor]


def _reduce(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    tensor = step.tensor(me)
    root = step.members[step.root]
    work = dist.reduce(tensor, root, step.reduction, group, step.is_async)
    return work, [tensor] if me == step.root else []


def _broadcast(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    tensor = step.tensor(me)
    return dist.broadcast(tensor, step.members[step.root], group, step.is_async), [tensor]


def _all_gather(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = [step.empty() for _ in step.members]
    return dist.all_gather(found, step.tensor(me), group, step.is_async), found


def _all_gather_into_tensor(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = torch.cat([torch.atleast_1d(step.empty()) for _ in step.members])
    return dist.all_gather_into_tensor(found, step.tensor(me), group, step.is_async), [found]


def _stacked(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    """Both operations on one tensor in their other form, with a row for each member."""
    gathered = torch.stack([step.empty() for _ in step.members])
    dist.all_gather_into_tensor(gathered, step.tensor(me), group)
    parts, found = torch.stack([step.tensor(me, n) for n in range(step.size)]), step.empty()
    work = dist.reduce_scatter_tensor(found, parts, step.reduction, group, step.is_async)
    return work, [gathered, found]


def _gather(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = [step.empty() for _ in step.members] if me == step.root else None
    work = dist.gather(step.tensor(me), found, step.members[step.root], group, step.is_async)
    return work, found or []


def _scatter(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    parts = [step.tensor(me, part) for part in range(step.size)] if me == step.root else None
    found = step.empty()
    return dist.scatter(found, parts, step.members[step.root], group, step.is_async), [found]


def _reduce_scatter(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = step.empty()
    parts = [step.tensor(me, part) for part in range(step.size)]
    return dist.reduce_scatter(found, parts, step.reduction, group, step.is_async), [found]


def _reduce_scatter_tensor(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = step.empty()
    parts = torch.cat([torch.atleast_1d(step.tensor(me, part)) for part in range(step.size)])
    work = dist.reduce_scatter_tensor(found, parts, step.reduction, group, step.is_async)
    return work, [found]


def _all_to_all(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = [step.empty() for _ in step.members]
    parts = [step.tensor(me, part) for part in range(step.size)]
    return dist.all_to_all(found, parts, group, step.is_async), found


def _all_to_all_single(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = torch.stack([step.empty() for _ in step.members])
    parts = torch.stack([step.tensor(me, part) for part in range(step.size)])
    work = dist.all_to_all_single(found, parts, group=group, async_op=step.is_async)
    return work, [found]


def _uneven(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    sent = [step.rows(me, other) for other in range(step.size)]
    received = [step.rows(other, me) for other in range(step.size)]
    parts = torch.cat([_rows(step, me, other) for other in range(step.size)])
    found = parts.new_full((sum(received), *parts.shape[1:]), 99)
    work = dist.all_to_all_single(found, parts, received, sent, group, step.is_async)
    return work, [found]


def _rows(step: Step, sender: int, receiver: int) -> Tensor:
    return torch.stack([step.value(sender, receiver)] * 2)[: step.rows(sender, receiver)]


def _ring(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    """Each sends to the next, two messages in the other order of their tags."""
    after, before = step.members[(me + 1) % step.size], step.members[me - 1]
    first, second = step.empty(), step.empty()
    works = [
        dist.isend(step.tensor(me, 1), after, group, tag=1),
        dist.isend(step.tensor(me, 2), after, group, tag=2),
        dist.irecv(second, before, group, tag=2),
        dist.irecv(first, before, group, tag=1),
    ]
    return works, [first, second]


def _blocking(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    """From the root to all others, one after the other."""
    if me == step.root:
        for part, rank in enumerate(step.members):
            if part != me:
                dist.send(step.tensor(me, part), rank, group, tag=step.seed)
        return None, []
    found = step.empty()
    dist.recv(found, step.members[step.root], group, tag=step.seed)
    return None, [found]


def _any_source(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    """All others send to the root, which takes them as they come; none sends again before."""
    if me != step.root:
        dist.send(step.tensor(me), step.members[step.root], group, tag=step.seed)
        dist.barrier(group)
        return None, []
    found: dict[int, Tensor] = {}
    for _ in range(step.size - 1):
        tensor = step.empty()
        found[dist.recv(tensor, None, group, tag=step.seed)] = tensor
    dist.barrier(group)
    return None, [found[rank] for rank in sorted(found)]


def _batch(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    found = [step.empty() for _ in range(step.size - 1)]
    others = [position for position in range(step.size) if position != me]
    operations = [
        operation
        for tensor, other in zip(found, others, strict=True)
        for operation in (
            dist.P2POp(dist.irecv, tensor, step.members[other], group),
            dist.P2POp(dist.isend, step.tensor(me, other), step.members[other], group),
        )
    ]
    return dist.batch_isend_irecv(operations) if operations else None, found


def _coalesced(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    tensors = [step.tensor(me, part) for part in range(3)]
    return dist.all_reduce_coalesced(tensors, step.reduction, group, step.is_async), tensors


def _manager(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    """Several operations in one block."""
    tensors = [step.tensor(me, part) for part in range(3)]
    with dist._coalescing_manager(group, async_ops=step.is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, step.reduction, group)
    return manager if step.is_async else None, tensors


def _functional(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    """What `torch.compile` and DTensor call."""
    rows = torch.cat([step.tensor(me, part).reshape(1, -1) for part in range(step.size)])
    found = [
        functional.all_reduce(step.tensor(me), step.op, group),
        functional.broadcast(step.tensor(me), step.root, group),
        functional.all_gather_tensor(step.tensor(me).reshape(1, -1), 0, group),
        functional.reduce_scatter_tensor(rows, step.op, 0, group),
        functional.all_to_all_single(rows, None, None, group),
        *functional.all_reduce_coalesced(
            [step.tensor(me, part) for part in (0, 1)], step.op, group
        ),
    ]
    return None, [functional.wait_tensor(tensor) for tensor in found]


def _objects(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    root, is_root = step.members[step.root], me == step.root
    gathered: list[Any] = [None] * step.size
    dist.all_gather_object(gathered, _object(step, me), group)
    broadcast = [_object(step, me), me]
    dist.broadcast_object_list(broadcast, root, group)
    collected: Any = [None] * step.size if is_root else None
    dist.gather_object(_object(step, me), collected, root, group)
    scattered = [None]
    parts = [_object(step, part) for part in range(step.size)] if is_root else None
    dist.scatter_object_list(scattered, parts, root, group)
    return None, [gathered, broadcast, collected, scattered]


def _object(step: Step, position: int) -> Any:
    return {"seed": step.seed, "from": position, "text": "x" * 1000 * position}


def _barrier(step: Step, me: int, group: Any) -> tuple[Any, Outputs]:
    return dist.barrier(group, step.is_async), []


START: dict[str, Start] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "stacked": _stacked,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "uneven": _uneven,
    "ring": _ring,
    "blocking": _blocking,
    "any_source": _any_source,
    "batch": _batch,
    "coalesced": _coalesced,
    "manager": _manager,
    "functional": _functional,
    "objects": _objects,
    "barrier": _barrier,
}
REDUCING = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "coalesced",
    "manager",
)
MOVING = tuple(
    kind for kind in START if kind not in (*REDUCING, "stacked", "functional", "objects")
)


def start(step: Step, rank: int, group: Any) -> Pending:
    """Begin ``step`` on ``rank``; the returned function waits, and has the results."""
    work, outputs = START[step.kind](step, step.members.index(rank), group)
    works = work if isinstance(work, list) else [work] if work is not None else []

    def end() -> Outputs:
        for one in works:
            one.wait()
        return outputs

    return end


def expected(step: Step, rank: int) -> Outputs:
    """What ``step`` must give on ``rank``, from nothing but the values."""
    me, everyone, root = step.members.index(rank), range(step.size), step.root
    brought = [step.value(position) for position in everyone]
    to_me = [step.value(position, me) for position in everyone]
    others = [position for position in everyone if position != me]
    match step.kind:
        case "all_reduce":
            return [step.reduced()]
        case "reduce":
            return [step.reduced()] if me == root else []
        case "broadcast":
            return [brought[root]]
        case "all_gather":
            return list(brought)
        case "all_gather_into_tensor":
            return [torch.cat([torch.atleast_1d(value) for value in brought])]
        case "stacked":
            return [torch.stack(brought), step.reduced(me)]
        case "gather":
            return list(brought) if me == root else []
        case "scatter":
            return [step.value(root, me)]
        case "reduce_scatter" | "reduce_scatter_tensor":
            return [step.reduced(me)]
        case "all_to_all":
            return list(to_me)
        case "all_to_all_single":
            return [torch.stack(to_me)]
        case "uneven":
            return [torch.cat([_rows(step, sender, me) for sender in everyone])]
        case "ring":
            return [step.value((me - 1) % step.size, part) for part in (1, 2)]
        case "blocking":
            return [] if me == root else [step.value(root, me)]
        case "any_source":
            return [brought[position] for position in others] if me == root else []
        case "batch":
            return [step.value(other, me) for other in others]
        case "coalesced" | "manager":
            return [step.reduced(part) for part in range(3)]
        case "functional":
            return [
                step.reduced(),
                brought[root],
                torch.cat([value.reshape(1, -1) for value in brought]),
                step.reduced(me).reshape(1, -1),
                torch.cat([value.reshape(1, -1) for value in to_me]),
                *(step.reduced(part) for part in (0, 1)),
            ]
        case "objects":
            objects = [_object(step, position) for position in everyone]
            from_root = [objects[root], root]
            return [objects, from_root, objects if me == root else None, [objects[me]]]
        case "barrier":
            return []
    raise AssertionError(step.kind)


def differences(step: Step, found: Sequence[Any], wanted: Sequence[Any]) -> list[str]:
    """What is wrong with the results of ``step``: values, shapes and types count."""
    if len(found) != len(wanted):
        return [f"{step}: {len(found)} results, not {len(wanted)}"]
    return [
        f"{step}: {one} is not {other}"
        for one, other in zip(found, wanted, strict=True)
        if not _same(one, other)
    ]


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(found == wanted)
    return found.dtype == wanted.dtype and torch.equal(found, wanted)
