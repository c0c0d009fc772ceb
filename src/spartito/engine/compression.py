"""How gradients are sent over a thin line: whole, in bf16, or as products of thin matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from spartito.collectives.collective import Collective
from spartito.collectives.lane import Work
from spartito.errors import UserError

FEWER = 2
"""A matrix is sent as a product where that takes so many times fewer numbers."""

_EXACT_AT_MOST = 1000  # updates at the start, where nothing says how many
_SAMPLED = 16  # updates, of which one is looked at for its error
_FLOATS = (torch.float32, torch.float64)
_WAYS = "Choose 'bf16', 'powersgd', 'powersgd:RANK', or spartito.PowerSGD(...)."


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Gradients as products of two thin matrices, with error feedback (Vogels et al. 2019).

    Each weight of two or more dimensions is seen as a matrix of ``shape[0]`` rows, and sent as
    ``rank * (rows + columns)`` numbers where that is at most half of it; all else is sent as it
    is. What a step leaves out is added to the gradient of the next one.

    Args:
        rank: The columns of the thin matrices. 4 kept the accuracy of the packaged digits.
        exact_steps: Updates at the start that send gradients as they are, while these turn fast;
            None: those of the first pass over the data, 1,000 at most.

    Raises:
        UserError: A rank below 1, or a negative number of steps.
    """

    rank: int = 4
    exact_steps: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"PowerSGD(rank={self.rank})", "One column at least; 4 is usual.")
        if self.exact_steps is not None and self.exact_steps < 0:
            raise UserError(f"PowerSGD(exact_steps={self.exact_steps})", "0 or more.")


Compress = str | PowerSGD | None
"""What a strategy's ``compress`` may be."""


def choose(compress: Compress) -> Compress:
    """``compress`` as None, "bf16" or `PowerSGD`; `UserError` for anything else."""
    if compress is None or compress == "bf16" or isinstance(compress, PowerSGD):
        return compress
    name, colon, rank = str(compress).partition(":")
    if name != "powersgd" or (colon and not rank.isdecimal()):
        raise UserError(f"compress={compress!r}", _WAYS)
    return PowerSGD(int(rank)) if colon else PowerSGD()


class Compression(ABC):
    """How the buckets of one optimizer's gradients are sent."""

    epoch = 0
    """That of the batch that is computed."""

    def __init__(self) -> None:
        self.updates = 0
        """Those that were made."""
        self._lost = self._sent = 0.0

    @abstractmethod
    def summing(self, parameters: Sequence[nn.Parameter], group: Collective, flat: Tensor) -> Work:
        """What sums the gradients of ``parameters`` over ``group``, in place.

        Called where a machine sends what it has summed, which is ``flat``.
        """

    def undo(self) -> None:  # noqa: B027 - few have something to do
        """Forget the last sums: they are made anew."""

    def updated(self) -> None:
        """Take note that an update was made of the last sums."""
        self.updates += 1

    def state_dict(
        self, named: Mapping[str, nn.Parameter], group: Collective, is_leader: bool
    ) -> dict[str, Any]:
        """What is kept between updates, of all tasks of ``group``, which all call this.

        Args:
            named: The model's parameters under the user's names.
            group: The tasks.
            is_leader: Whether this one sends what its machine has summed.

        Returns:
            The same on all tasks; nothing where nothing is kept.
        """
        return {}

    def load_state_dict(  # noqa: B027 - few keep something
        self,
        state: Mapping[str, Any],
        named: Mapping[str, nn.Parameter],
        group: Collective,
        is_leader: bool,
    ) -> None:
        """Take back what `state_dict` returned, under any number of machines.

        Args:
            state: What it was; nothing where the checkpoint has none.
            named: As there.
            group: As there.
            is_leader: As there.
        """

    @property
    def error(self) -> float:
        """What the sums left out, relative to them (L2 norm), in a sample of the updates."""
        return (self._lost / self._sent) ** 0.5 if self._sent else 0.0

    @property
    def _is_sampled(self) -> bool:
        return self.updates % _SAMPLED == 0


def _square(tensors: Sequence[Tensor]) -> float:
    """The sum of all squares."""
    return sum(norm.item() ** 2 for norm in torch._foreach_norm(list(tensors)))


class Whole(Compression):
    """All bits of them."""

    def summing(self, parameters: Sequence[nn.Parameter], group: Collective, flat: Tensor) -> Work:
        return group.summing(flat)


class Rounded(Compression):
    """Rounded to bf16, one's own too; their sum is made in fp32 and rounded once."""

    def summing(self, parameters: Sequence[nn.Parameter], group: Collective, flat: Tensor) -> Work:
        if flat.dtype not in _FLOATS:
            return group.summing(flat)
        rounded = torch.empty_like(flat, dtype=torch.bfloat16)
        add = group.summing(rounded)

        def run() -> None:
            rounded.copy_(flat)
            if self._is_sampled:
                self._lost += _square([flat - rounded])
                self._sent += _square([flat])
            add()
            flat.copy_(rounded)

        return run


class _Memory:
    """What is kept of one matrix from step to step: the error and the right factor.

    Of each there are two, in turn, so that a step can be undone.
    """

    def __init__(self, parameter: nn.Parameter, rank: int) -> None:
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        self.errors = [parameter.new_empty(rows, columns) for _ in range(2)]
        self.rights = [parameter.new_empty(columns, rank) for _ in range(2)]
        self.begin()

    def begin(self) -> None:
        """Nothing was left out yet; the right factor is the same on all."""
        generator = torch.Generator().manual_seed(0)
        right = torch.randn(self.rights[0].shape, generator=generator, dtype=torch.float64)
        for error, kept in zip(self.errors, self.rights, strict=True):
            error.zero_()
            kept.copy_(right)

    def flip(self) -> None:
        """Make what was computed what is kept, or what was kept."""
        self.errors.reverse()
        self.rights.reverse()


class LowRank(Compression):
    """As `PowerSGD` says."""

    def __init__(self, chosen: PowerSGD) -> None:
        super().__init__()
        self._chosen = chosen
        self._memories: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._flipped: list[_Memory] = []

    @property
    def is_exact(self) -> bool:
        """Whether gradients are sent as they are, still."""
        steps = self._chosen.exact_steps
        if steps is None:
            return self.epoch == 0 and self.updates < _EXACT_AT_MOST
        return self.updates < steps

    def summing(self, parameters: Sequence[nn.Parameter], group: Collective, flat: Tensor) -> Work:
        whole = group.summing(flat)
        sizes = [parameter.numel() for parameter in parameters]
        pairs = list(zip(parameters, flat.split(sizes), strict=True))
        thin = [(p, part.view(p.shape[0], -1)) for p, part in pairs if self._is_thin(p)]
        if not thin:
            return whole
        memories = [self._memory(parameter) for parameter, _ in thin]
        matrices = [matrix for _, matrix in thin]
        others = [part for parameter, part in pairs if not self._is_thin(parameter)]
        beside = flat.new_empty(sum(map(len, others)))
        besides = beside.split([len(part) for part in others])
        lefts_flat, lefts = _stacked([len(matrix) for matrix in matrices], self._chosen.rank, flat)
        rights_flat, rights = _stacked([m.shape[1] for m in matrices], self._chosen.rank, flat)
        add_lefts = group.summing(lefts_flat, *([beside] if others else []))
        add_rights = group.summing(rights_flat)

        def run() -> None:
            if self.is_exact:
                whole()
                return
            for matrix, memory, left in zip(matrices, memories, lefts, strict=True):
                torch.add(matrix, memory.errors[0], out=memory.errors[1])
                torch.mm(memory.errors[1], memory.rights[0], out=left)
            torch._foreach_copy_(besides, others) if others else None
            if self._is_sampled:
                self._sent += _square([memory.errors[1] for memory in memories])
            add_lefts()
            for memory, left, right in zip(memories, lefts, rights, strict=True):
                left.copy_(torch.linalg.qr(left)[0])
                torch.mm(memory.errors[1].T, left, out=right)
                memory.errors[1].addmm_(left, right.T, alpha=-1)
            if self._is_sampled:
                self._lost += _square([memory.errors[1] for memory in memories])
            add_rights()
            for matrix, memory, left, right in zip(matrices, memories, lefts, rights, strict=True):
                torch.mm(left, right.T, out=matrix)
                memory.rights[1].copy_(right)
                memory.flip()
                self._flipped.append(memory)
            torch._foreach_copy_(others, besides) if others else None

        return run

    def undo(self) -> None:
        for memory in self._flipped:
            memory.flip()
        self._flipped.clear()

    def updated(self) -> None:
        super().updated()
        self._flipped.clear()

    def _is_thin(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient is sent as a product."""
        if parameter.dim() < 2 or parameter.dtype not in _FLOATS or not parameter.numel():
            return False
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return FEWER * self._chosen.rank * (rows + columns) <= rows * columns

    def _memory(self, parameter: nn.Parameter) -> _Memory:
        if parameter not in self._memories:
            self._memories[parameter] = _Memory(parameter, self._chosen.rank)
        found: _Memory = self._memories[parameter]
        return found

    def state_dict(
        self, named: Mapping[str, nn.Parameter], group: Collective, is_leader: bool
    ) -> dict[str, Any]:
        leaders = _leaders(group, is_leader)
        errors, rights = {}, {}
        for name, parameter in named.items() if not self.is_exact else ():
            if self._is_thin(parameter):
                memory = self._memory(parameter)
                everyone = group.all_gather(memory.errors[0])
                errors[name] = torch.stack([everyone[rank] for rank in leaders])
                rights[name] = group.broadcast(memory.rights[0].clone())
        return {"updates": self.updates, "errors": errors, "factors": rights}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        named: Mapping[str, nn.Parameter],
        group: Collective,
        is_leader: bool,
    ) -> None:
        leaders = _leaders(group, is_leader)
        for begun in self._memories.values():
            begun.begin()  # what another training has left out is none of this one's
        self.updates = state.get("updates", 0)
        for name, errors in state.get("errors", {}).items():
            parameter = named[name]
            if not self._is_thin(parameter):
                continue
            memory, right = self._memory(parameter), state["factors"][name]
            own = errors.sum(0) / len(leaders)  # what all have left out is what counts
            if len(errors) == len(leaders) and is_leader:
                own = errors[leaders.index(group.rank)]
            memory.errors[0].copy_(own)
            if right.shape == memory.rights[0].shape:
                memory.rights[0].copy_(right)


def _leaders(group: Collective, is_leader: bool) -> list[int]:
    """The ranks that send what their machine has summed."""
    flags = group.all_gather(torch.tensor([is_leader]))
    return [rank for rank, flag in enumerate(flags) if flag]


def _stacked(heights: Sequence[int], width: int, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Memory of matrices of these heights, as one row of numbers and each for itself."""
    flat = like.new_empty(sum(heights) * width)
    parts = flat.split([height * width for height in heights])
    return flat, [part.view(-1, width) for part in parts]


def make_compression(compress: Compress) -> Compression:
    """The state of what `choose` returned, for one optimizer."""
    if compress is None:
        return Whole()
    return LowRank(compress) if isinstance(compress, PowerSGD) else Rounded()
