"""Whether replicas are still alike, and who differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.errors import UserError

ROUNDING = 1e-3
"""How far apart, relative to their size, parameters may get by rounding alone in a long training:
an update differs by 1e-7 of itself where processors round differently."""


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
