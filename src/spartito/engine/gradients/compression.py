"""How gradients go over a thin line: whole, in fewer bits, or as products of thin matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from spartito.collectives.collective import Collective, Piggybacked, scale_of
from spartito.collectives.standing_sum import Work, standing_sum
from spartito.engine.gradients import codes
from spartito.engine.gradients.codes import Code, Quantized, TopK
from spartito.errors import UserError

FEWER = 2
"""A matrix is sent as a product where that takes so many times fewer numbers."""

BLOCK = 256
"""How many numbers of a gradient are coded together: few are lost where parameters end."""

_EXACT_AT_MOST = 1000  # updates at the start, where nothing says how many
_SAMPLED = 16  # updates, of which one is looked at for its error
_FLOATS = (torch.float32, torch.float64)
_CODES: dict[str, Code] = {
    "bf16": codes.Rounded(), "8bit": Quantized(8), "4bit": Quantized(4), "topk": TopK(),
}  # fmt: skip
_WAYS = (
    "Choose 'bf16', '8bit', '4bit', 'topk', 'topk:FRACTION' (as 'topk:0.01'), 'powersgd', "
    "'powersgd:RANK', or spartito.PowerSGD(...)."
)


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

Way = Code | PowerSGD | None
"""What it stands for; None: numbers are sent as they are."""


def choose(compress: Compress) -> Way:
    """What ``compress`` stands for.

    Args:
        compress: "bf16", "8bit", "4bit", "topk", "topk:FRACTION", "powersgd", "powersgd:RANK", a
            `PowerSGD` or None.

    Raises:
        UserError: It is something else.
    """
    if compress is None or isinstance(compress, PowerSGD):
        return compress
    name, colon, text = str(compress).partition(":")
    if not colon and name in _CODES:
        return _CODES[name]
    if name == "powersgd" and (not colon or text.isdecimal()):
        return PowerSGD(int(text)) if colon else PowerSGD()
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if name != "topk" or not 0 < fraction <= 1:
        raise UserError(f"compress={compress!r}", _WAYS)
    return TopK(fraction)


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

    def state_dict(self, named: Mapping[str, nn.Parameter], group: Collective) -> dict[str, Any]:
        """What is kept between updates, of all tasks of ``group``, which all call this.

        Args:
            named: The parameters that learn under the user's names.
            group: The tasks; leaders among them send what their machine has summed.

        Returns:
            The same on all tasks; nothing where nothing is kept.
        """
        return {}

    def load_state_dict(  # noqa: B027 - few keep something
        self, state: Mapping[str, Any], named: Mapping[str, nn.Parameter], group: Collective
    ) -> None:
        """Take back what `state_dict` returned, under any number of machines.

        Args:
            state: What it was; nothing where the checkpoint has none.
            named: As there.
            group: As there.
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
    """What is kept of one parameter from step to step: the error, and perhaps the right factor.

    Of each there are two, in turn, so that a step can be undone.
    """

    def __init__(self, parameter: nn.Parameter, rank: int) -> None:
        shape, device = parameter.shape, parameter.device
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.errors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
        columns = parameter.numel() // max(1, shape[0]) if rank else 0
        self.rights = [torch.empty(columns, rank, dtype=dtype, device=device) for _ in range(2)]
        self.begin()

    @property
    def matrices(self) -> list[Tensor]:
        """The errors as matrices."""
        return [error.view(error.shape[0], -1) for error in self.errors]

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


class Feedback(Compression):
    """What a step leaves out is kept for each parameter, and added to what the next one sends.

    Seide et al. 2014, Karimireddy et al. 2019.
    """

    rank = 0
    """The columns of the factors that are kept beside; 0: none are."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._flipped: list[_Memory] = []

    @abstractmethod
    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether something of a parameter's gradient is left out."""

    @property
    def is_exact(self) -> bool:
        """Whether gradients are sent as they are, still."""
        return False

    def undo(self) -> None:
        for memory in self._flipped:
            memory.flip()
        self._flipped.clear()

    def updated(self) -> None:
        super().updated()
        self._flipped.clear()

    def _flip(self, memories: Sequence[_Memory]) -> None:
        """What was computed is what is kept from now on."""
        for memory in memories:
            memory.flip()
        self._flipped += memories

    def _memory(self, parameter: nn.Parameter) -> _Memory:
        if parameter not in self._memories:
            self._memories[parameter] = _Memory(parameter, self.rank)
        found: _Memory = self._memories[parameter]
        return found

    def state_dict(self, named: Mapping[str, nn.Parameter], group: Collective) -> dict[str, Any]:
        leaders = _leaders(group)
        errors, factors = {}, {}
        for name, parameter in named.items() if not self.is_exact else ():
            if not self.keeps(parameter):
                continue
            memory = self._memories.get(parameter) or _Memory(parameter, self.rank)
            everyone = group.all_gather(memory.errors[0])
            errors[name] = torch.stack([everyone[rank] for rank in leaders])
            if self.rank:
                factors[name] = group.broadcast(memory.rights[0].clone())
        return {"updates": self.updates, "errors": errors, "factors": factors}

    def load_state_dict(
        self, state: Mapping[str, Any], named: Mapping[str, nn.Parameter], group: Collective
    ) -> None:
        leaders = _leaders(group)
        for begun in self._memories.values():
            begun.begin()  # what another training has left out is none of this one's
        self.updates = state.get("updates", 0)
        for name, errors in state.get("errors", {}).items():
            parameter = named.get(name)
            if parameter is None or errors.shape[1:] != parameter.shape:
                continue  # it was cut otherwise
            if not (group.is_leader and self.keeps(parameter)):
                continue
            memory, right = self._memory(parameter), state["factors"].get(name)
            own = errors.sum(0) / len(leaders)  # what all have left out is what counts
            if len(errors) == len(leaders):
                own = errors[leaders.index(group.rank)]
            memory.errors[0].copy_(own)
            if right is not None and right.shape == memory.rights[0].shape:
                memory.rights[0].copy_(right)


class Coded(Feedback):
    """In a code of fewer bits; each gets what all have sent, and adds it up.

    Blocks of the code lie inside of parameters: those that several tasks of one model have come
    out equal on all, whatever else is sent with them.

    Args:
        code: The code.
    """

    def __init__(self, code: Code) -> None:
        super().__init__()
        self._code = code

    def keeps(self, parameter: nn.Parameter) -> bool:
        return parameter.is_floating_point()

    def summing(self, parameters: Sequence[nn.Parameter], group: Collective, flat: Tensor) -> Work:
        if not flat.is_floating_point() or not flat.numel():
            return group.summing(flat)
        memories, code = [self._memory(parameter) for parameter in parameters], self._code
        sizes = [parameter.numel() for parameter in parameters]
        spaces = [-(-size // code.block) * code.block for size in sizes]
        wanted = flat.new_zeros(sum(spaces), dtype=memories[0].errors[0].dtype)
        total = torch.empty_like(wanted)

        def parts(of: Tensor) -> list[Tensor]:
            found = zip(of.split(spaces), sizes, strict=True)
            return [space[:size] for space, size in found]

        given, errors, sums = flat.split(sizes), parts(wanted), parts(total)
        packed = code.pack(wanted.float())
        gather = group.gathering(packed)

        def run() -> None:
            wanted.zero_()  # between parameters too, where a sum that is not finite has left NaN
            torch._foreach_copy_(errors, given)
            torch._foreach_add_(errors, [memory.errors[0].view(-1) for memory in memories])
            if self._is_sampled:
                self._sent += _square([wanted])
            packed.copy_(code.pack(wanted.float()))
            total.zero_()
            for rank, came in enumerate(gather()):
                sent = code.unpack(came, len(wanted)).to(wanted.dtype)
                total.add_(sent)
                if rank == group.rank:
                    wanted.sub_(sent)
            if self._is_sampled:
                self._lost += _square([wanted])
            torch._foreach_copy_([memory.errors[1].view(-1) for memory in memories], errors)
            self._flip(memories)
            torch._foreach_copy_(given, sums)

        return run


class LowRank(Feedback):
    """As `PowerSGD` says.

    Args:
        chosen: The rank, and for how many updates gradients are sent as they are.
    """

    def __init__(self, chosen: PowerSGD) -> None:
        super().__init__()
        self._chosen, self.rank = chosen, chosen.rank

    @property
    def is_exact(self) -> bool:
        steps = self._chosen.exact_steps
        if steps is None:
            return self.epoch == 0 and self.updates < _EXACT_AT_MOST
        return self.updates < steps

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient is sent as a product."""
        if parameter.dim() < 2 or parameter.dtype not in _FLOATS or not parameter.numel():
            return False
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return FEWER * self.rank * (rows + columns) <= rows * columns

    def summing(self, parameters: Sequence[nn.Parameter], group: Collective, flat: Tensor) -> Work:
        whole = group.summing(flat)
        sizes = [parameter.numel() for parameter in parameters]
        pairs = list(zip(parameters, flat.split(sizes), strict=True))
        thin = [(p, part.view(p.shape[0], -1)) for p, part in pairs if self.keeps(p)]
        if not thin:
            return whole
        memories = [self._memory(parameter) for parameter, _ in thin]
        matrices = [matrix for _, matrix in thin]
        others = [part for parameter, part in pairs if not self.keeps(parameter)]
        beside = flat.new_empty(sum(map(len, others)))
        besides = beside.split([len(part) for part in others])
        lefts_flat, lefts = _stacked([len(matrix) for matrix in matrices], self.rank, flat)
        rights_flat, rights = _stacked([m.shape[1] for m in matrices], self.rank, flat)
        add_lefts = group.summing(lefts_flat, *([beside] if others else []))
        add_rights = group.summing(rights_flat)

        def run() -> None:
            if self.is_exact:
                whole()
                return
            errors = []
            for matrix, memory, left in zip(matrices, memories, lefts, strict=True):
                before, error = memory.matrices
                torch.add(matrix, before, out=error)
                torch.mm(error, memory.rights[0], out=left)
                errors.append(error)
            torch._foreach_copy_(besides, others) if others else None
            if self._is_sampled:
                self._sent += _square(errors)
            add_lefts()
            for error, left, right in zip(errors, lefts, rights, strict=True):
                left.copy_(torch.linalg.qr(left)[0])
                torch.mm(error.T, left, out=right)
                error.addmm_(left, right.T, alpha=-1)
            if self._is_sampled:
                self._lost += _square(errors)
            add_rights()
            for matrix, memory, left, right in zip(matrices, memories, lefts, rights, strict=True):
                torch.mm(left, right.T, out=matrix)
                memory.rights[1].copy_(right)
            self._flip(memories)
            torch._foreach_copy_(others, besides) if others else None

        return run


def _leaders(group: Collective) -> list[int]:
    """The ranks that send what their machine has summed."""
    flags = group.all_gather(torch.tensor([group.is_leader]))
    return [rank for rank, flag in enumerate(flags) if flag]


def _stacked(heights: Sequence[int], width: int, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Memory of matrices of these heights, as one row of numbers and each for itself."""
    flat = like.new_empty(sum(heights) * width)
    parts = flat.split([height * width for height in heights])
    return flat, [part.view(-1, width) for part in parts]


def make_compression(way: Way) -> Compression:
    """The state of what `choose` returned, for one optimizer.

    Args:
        way: It.
    """
    if isinstance(way, PowerSGD):
        return LowRank(way)
    if way is None or isinstance(way, codes.Rounded):
        return Whole() if way is None else Rounded()
    return Coded(TopK(way.fraction, BLOCK) if isinstance(way, TopK) else way)


class CompressedSum:
    """The sum of gradients that leave a machine compressed: fill ``input``, `run`.

    Args:
        parameters: Whose gradients.
        group: The tasks; all make it together.
        compression: How they are sent.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Collective, compression: Compression
    ) -> None:
        first, numel = parameters[0], sum(parameter.numel() for parameter in parameters)
        summing = partial(compression.summing, parameters)
        self._sum = standing_sum(group, numel, first.dtype, summing, first.device)
        self._group, self.input, self.output = group, self._sum.input, self._sum.output

    def run(self, exactly: bool = False) -> Tensor:
        """Sum ``input`` over the group; all call it.

        Args:
            exactly: Whether it is sent as it is, and what was left out before stays so.

        Returns:
            The sum.
        """
        if exactly:
            return self._group.all_reduce(self.input)
        self._sum.run()
        return self.output


class CompressedReducer(CompressedSum):
    """As `Reducer`: such a sum with piggybacked scalars at its side."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Collective, compression: Compression
    ) -> None:
        super().__init__(parameters, group, compression)
        self._scalars = group.reducer(0, torch.float64, torch.device("cpu"))

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """As `Reducer.reduce`."""
        total = self._scalars.reduce(piggybacked, loss_divisor)
        self.run()
        if (factor := scale_of(total[0], loss_divisor)) != 1.0:
            self.output.mul_(factor)
        return total
