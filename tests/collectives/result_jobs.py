"""What ranks compute together, and where it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.collectives.memory.rank_memory import SMALL
from spartito.errors import UserError
from tests.collectives.group import join

DTYPES = {
    "all": [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8],
    "piggybacked": [torch.float32, torch.float64, torch.bfloat16],
}


LARGE = (torch.float32, torch.uint8)


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers that differ by rank and index: their sums are exact in every dtype."""
    return ((torch.arange(numel) * (rank + 2)) % 7 + rank).to(dtype)


def shaped(kind: str, rank: int, dtype: torch.dtype) -> Tensor:
    """Tensors of every layout that a caller may have."""
    if kind == "transposed":
        return values(rank, 60, dtype).view(6, 10).t()
    if kind == "strided":
        return values(rank, 99, dtype)[::3]
    if kind == "channels_last":
        image = values(rank, 2 * 3 * 4 * 5, dtype).view(2, 3, 4, 5)
        return image.to(memory_format=torch.channels_last)
    if kind == "scalar":
        return values(rank, 1, dtype)[0]
    sizes = {"empty": 0, "one": 1, "odd": 13, "slot": SMALL // dtype.itemsize}
    sizes["over"] = 2 * sizes["slot"] + 5
    return values(rank, sizes[kind], dtype)


KINDS = ["empty", "one", "odd", "slot", "over", "transposed", "strided", "channels_last", "scalar"]
FEW = ["empty", "odd", "strided", "scalar"]


def wrong_results(
    _: Connection, rank: int, world_size: int, ways: Sequence[tuple[str, int]]
) -> list[str]:
    """What the groups (ways and ports) result differently from each other or from plain torch."""
    wrong: list[str] = []

    def check(what: str, got: Tensor, expected: Tensor) -> None:
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            wrong.append(what)

    for way, port in ways:
        group = join(rank, world_size, port, 60, way)
        name = type(group).__name__
        for dtype in DTYPES["all"]:
            for kind in KINDS if dtype in LARGE else FEW:
                case = f"{name} {kind} {dtype}"
                everyone = [shaped(kind, r, dtype) for r in range(world_size)]
                mine = everyone[rank].clone(memory_format=torch.preserve_format)
                result = group.all_reduce(mine)
                check(f"all_reduce {case}", mine, sum(everyone[1:], everyone[0]))
                if result is not mine:
                    wrong.append(f"not in place {case}")
                for part, other in zip(group.all_gather(everyone[rank]), everyone, strict=True):
                    check(f"all_gather {case}", part, other)
                for source in {0, world_size // 2, world_size - 1}:
                    mine = everyone[rank].clone(memory_format=torch.preserve_format)
                    result = group.broadcast(mine, source)
                    check(f"broadcast {source} {case}", result, everyone[source])
        _rows_and_bytes(group, check)
        _reducers(group, check)
        group.barrier()
        group.close()
        group.close()
    return wrong


def _rows_and_bytes(group: Collective, check: Any) -> None:
    rank, ranks = group.rank, range(group.world_size)
    for counts in (list(ranks), [r % 2 for r in ranks], [0 for _ in ranks]):
        rows = [torch.full((counts[r], 2, 3), float(r)) for r in ranks]
        for got, expected in zip(group.all_gather_rows(rows[rank]), rows, strict=True):
            check(f"rows {counts}", got, expected)
    one = torch.ones(1, 2)
    for name, odd in {
        "(1, 3) float32": torch.ones(1, 3),
        "(1, 2) float64": one.double(),
        "(1, 2, 1) float32": one[..., None],
        "a float32 scalar": torch.tensor(1.0),
    }.items():
        try:
            group.all_gather_rows(odd if rank == group.world_size - 1 else one)
            text = "nothing"
        except UserError as error:
            text = str(error)
        told = f"{name} on {group.names[-1]}\n" in text and "(1, 2) float32 on" in text
        check(f"{name}: {text}", torch.tensor(told), torch.tensor(True))
    rows = [torch.zeros(0, 5).double() if r else torch.full((2, 3), 1.0) for r in ranks]
    for got, count in zip(group.all_gather_rows(rows[rank]), [2] + [0] * len(ranks), strict=False):
        check("rows of one", got, torch.ones(count, 3))
    for long in (0, 3, 40 * SMALL):
        texts = [bytes([65 + r]) * (long * r + r) for r in ranks]
        heard = group.all_gather_bytes(texts[rank])
        check(f"bytes {long}", torch.tensor(heard == texts), torch.tensor(True))


def _reducers(group: Collective, check: Any) -> None:
    ranks = range(group.world_size)
    for dtype in DTYPES["piggybacked"]:
        for numel in (0, 1, 3, 10_001):
            reducer = group.reducer(numel, dtype, torch.device("cpu"))
            for turn in range(3):  # the same memory again: nobody may overtake anybody
                weights = [float(r + turn) for r in ranks]
                parts = [values(r + turn, numel, dtype) for r in ranks]
                reducer.input.copy_(parts[group.rank])
                loss_divisor = 2 * sum(weights)  # doubles the sum, exactly
                total = reducer.reduce((weights[group.rank], 1.5, -1.0), loss_divisor)
                expected = sum(parts[1:], parts[0]) * 2
                check(f"reducer {dtype} {numel} {turn}", reducer.output, expected)
                piggybacked = (sum(weights), 1.5 * len(ranks), -1.0 * len(ranks))
                check(f"piggybacked {turn}", torch.tensor(total), torch.tensor(piggybacked))
            reducer.input.copy_(values(group.rank, numel, dtype))
            reducer.reduce((0.0,), 8.0)  # nothing came: no scale
            everyone = [values(r, numel, dtype) for r in ranks]
            check("unweighted", reducer.output, sum(everyone[1:], everyone[0]))


def random_sums(
    _: Connection, rank: int, world_size: int, port: int, communication: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sums whose last bits depend on the order: by all_reduce, by a reducer, and the parts."""
    group = join(rank, world_size, port, 60, communication)
    mine = torch.randn(5000, generator=torch.Generator().manual_seed(rank)) * 1e3
    reducer = group.reducer(5000, torch.float32, torch.device("cpu"))
    reducer.input.copy_(mine)
    reducer.reduce((3.0,), 1.0)
    result = (group.all_reduce(mine.clone()), reducer.output.clone(), group.all_gather(mine))
    group.close()
    return result
