"""Whether replicas are still alike: a checksum of their parameters, and who differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.errors import UserError

ROUNDING = 1e-3
"""How far apart, relative to their size, parameters may get by rounding alone in a long training:
an update differs by 1e-7 of itself where processors round differently."""


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STIR = -7046029254386353131
"""An odd number with bits all over."""
_AT_ONCE = 1 << 24
"""Values that are stirred at once: each takes 8 bytes, some times over."""


def checksum(tensors: Iterable[Tensor]) -> int:
    """A CRC-32 of the values bit by bit, about 1 ms for 3 MB; those of a GPU are copied."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        found = crc32(flat.view(torch.uint8).numpy().data, found)
    return found


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """A number for each tensor, another one where any of its values was changed or moved.

    Those in the host's memory are checksums; the others are made where they are, and read at once.

    Args:
        tensors: Strided ones, of any types.
    """
    here = [tensor.device.type == "cpu" for tensor in tensors]
    there = [_mixed(tensor) for tensor, is_here in zip(tensors, here, strict=True) if not is_here]
    read = iter(torch.stack(there).tolist() if there else [])
    both = zip(tensors, here, strict=True)
    return [checksum([tensor]) if is_here else next(read) for tensor, is_here in both]


def _mixed(tensor: Tensor) -> Tensor:
    """A sum of all values' bits, each stirred by its own and by where it is; int64, wrapping."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _AT_ONCE):
        bits = flat[start : start + _AT_ONCE].view(_BITS[flat.element_size()]).long() * _STIR
        bits ^= bits >> 29  # the top bit, as a sign is, changes more than itself
        bits *= torch.arange(start, start + bits.numel(), device=bits.device) * 2 + 1
        total += bits.sum()
    return total


def moments(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """The sum and the norm of all values: both are alike where the values are."""
    sums = [(float(t.detach().double().sum()), float(t.detach().double().norm())) for t in tensors]
    return sum(total for total, _ in sums), sum(norm**2 for _, norm in sums) ** 0.5


def drifted(found: Sequence[tuple[float, float]]) -> list[bool]:
    """Whose `moments` differ from those of rank 0 by more than rounding."""
    (total, norm), limit = found[0], ROUNDING * max(norm for _, norm in found)
    return [not (abs(t - total) <= limit and abs(n - norm) <= limit) for t, n in found]


def outliers(found: Sequence[object]) -> list[int]:
    """The ranks whose value is not that of most; of equally many, that of the lowest rank."""
    usual, _ = Counter(found).most_common(1)[0]
    return [rank for rank, value in enumerate(found) if value != usual]


class DriftedError(UserError):
    """Replicas that are to be equal are not."""


def different(group: Collective, ranks: Sequence[int], what: str, do: str) -> DriftedError:
    """The error that names the tasks of a group which are not as the others."""
    odd = " and ".join(group.names[rank] for rank in ranks)
    rest = " and ".join(name for rank, name in enumerate(group.names) if rank not in ranks)
    return DriftedError(f"the replicas have drifted apart: {odd} {what} {rest}", do)


OTHERS_LEARN = (
    "has other parameters that learn than",
    "Freeze and unfreeze the same ones on every replica.",
)
"""What `different` says where others were frozen."""

OTHER_VALUES = (
    "has other parameters than",
    "Something changed them on one replica alone, as a callback may. Go on from a checkpoint: then "
    "all start from the same.",
)
"""What `different` says where parameters differ."""
