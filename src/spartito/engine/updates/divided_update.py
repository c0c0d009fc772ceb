"""An update that is divided by elements: each replica of a machine updates a range of them.

ZeRO's first stage (Rajbhandari et al. 2020; Xu et al. 2020), for parameters that lie in memory
which all replicas share. A replica shows the gradients of the others' ranges to them, adds up those
of its own range in the order of the ranks, and runs the optimizer on views of it: nobody writes a
sum that only others read, and the state of an element exists once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from spartito.collectives.calls import encode
from spartito.collectives.collective import Collective, Piggybacked
from spartito.collectives.memory.shared_memory import LINE, SharedMemoryCollective
from spartito.engine.devices.host_reads import Number
from spartito.engine.devices.memory_layout import shaped
from spartito.engine.gradients.compression import Compression
from spartito.engine.gradients.gradient_sum import PackedGradients, clip_factor

ELEMENTWISE = {
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
}  # fmt: skip
"""Optimizers of torch, by their exact types, that update each element by itself."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates each element by itself, and so may have parts of parameters.

    Another than torch's says so: ``elementwise = True`` in its class.
    """
    return type(optimizer) in ELEMENTWISE or getattr(type(optimizer), "elementwise", False) is True


def say_elementwise(optimizer: Optimizer) -> str:
    """What to do where it does not say so."""
    name = type(optimizer).__name__
    return (
        "Choose AdamW, SGD or another that updates each element by itself. If this one does, "
        f"whatever the shape of a parameter, say so: {name}.elementwise = True."
    )


class Span(NamedTuple):
    """The elements of a parameter, in the order of its memory, that a replica updates."""

    rank: int
    start: int
    stop: int


def cut(sizes: Sequence[int], ranks: int, multiple: int) -> list[list[Span]]:
    """Divide blocks of ``sizes`` elements, one after the other, evenly among ``ranks``.

    Args:
        sizes: Elements of each block.
        ranks: Among how many.
        multiple: Inside of a block ranges begin at multiples of this.

    Returns:
        The spans of each block, in the order of the ranks; none is empty.
    """
    total, before, spans = sum(sizes), 0, []
    for size in sizes:
        edges = [total * rank // ranks - before for rank in range(1, ranks)]
        inner = [
            min(max(edge, 0) // multiple * multiple, size) if edge < size else size
            for edge in edges
        ]
        bounds = [0, *inner, size]
        spans.append(
            [Span(rank, *bounds[rank : rank + 2]) for rank in range(ranks)
             if bounds[rank] < bounds[rank + 1]]
        )  # fmt: skip
        before += size
    return spans


class Owned(Protocol):
    """This replica's elements of a parameter ``whole``, as one that an optimizer can have."""

    whole: nn.Parameter
    own: nn.Parameter
    state: dict[str, Any] | None

    def cut(self, value: Any) -> Any:
        """These elements of an optimizer's value of the whole parameter; any other as it is."""
        ...


class DividedUpdates(PackedGradients):
    """Of the reduced gradients each replica gets those of its own elements, and updates these.

    The optimizer sees only `update`: parameters that are these elements, and their state. Between
    updates its state is under the user's parameters, a row of elements for each that is divided.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        collective: Collective,
        owners: Collective | None = None,
        learned: Sequence[nn.Parameter] = (),
        compression: Compression | None = None,
    ) -> None:
        self.spans: dict[int, list[Span]] = {}
        """Who of ``owners`` updates what, by the ids of the parameters; what is given out stays."""
        self._owners = collective if owners is None else owners
        self._parts: dict[int, Owned] = {}
        self._state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        super().__init__(optimizer, collective, learned, compression)

    def update(self, step: Callable[[], None]) -> None:
        """Call ``step`` while the optimizer has this replica's elements, and nothing else."""
        optimizer, parts = self._optimizer, self._parts
        groups, state = optimizer.param_groups, optimizer.state
        whole = [group["params"] for group in groups]
        self.adopt()
        for group in groups:
            group["params"] = [parts[id(p)].own for p in group["params"] if id(p) in parts]
        optimizer.state = self._state
        try:
            step()
        finally:
            optimizer.state = state
            for part in parts.values():
                if part.state is None and part.own in self._state:
                    part.state = state[part.whole] = self._state[part.own]
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def adopt(self) -> None:
        """Take up state that was put under the user's parameters, and only what is needed here."""
        state, rank = self._optimizer.state, self._owners.rank
        for part in self._parts.values():
            values = state.get(part.whole)
            if values is part.state:
                continue
            part.state = values
            if values is None:
                self._state.pop(part.own, None)
            else:
                values |= {key: part.cut(value) for key, value in values.items()}
                self._state[part.own] = values
        if len(state) > len(self._parts):
            for parameter in list(state):
                spans = self.spans.get(id(parameter), ())
                if all(span.rank != rank for span in spans):
                    del state[parameter]

    def own_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        found = ((part.whole, part.own.grad) for part in self._parts.values())
        return ((whole, grad) for whole, grad in found if grad is not None)

    def sum(self, number: Tensor) -> Tensor:
        return self._owners.all_reduce(number)

    def norm(self) -> Tensor:
        """The L2 norm of the reduced gradients of all replicas; they meet for it."""
        own = [grad for _, grad in self.own_gradients()]
        square = torch.nn.utils.get_total_norm(own).to(self._where).double().square()
        return self.sum(square.view(1)).sqrt()[0]

    @property
    def _where(self) -> torch.device:
        """Where the gradients of one's own elements are, also of those who have none."""
        return torch.device("cpu")

    def clip(self, norm: float, total: Tensor) -> None:
        scale = clip_factor(norm, total)
        grads = [part.own.grad for part in self._parts.values() if part.own.grad is not None]
        if grads:
            torch._foreach_mul_(grads, scale)


class DividedGradients(DividedUpdates):
    """Those of replicas whose parameters lie in memory that they share.

    ``homes`` has the values there of parameters that lie elsewhere, on devices, by their ids: these
    are updated, and the optimizer's state is there too. ``replicas`` is the group for tensors of
    those devices. ``share`` is given what learns, before that is divided.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        collective: SharedMemoryCollective,
        homes: Mapping[int, Tensor] = MappingProxyType({}),
        replicas: Collective | None = None,
        share: Callable[[Sequence[nn.Parameter]], None] | None = None,
    ) -> None:
        self._shared, self._homes, self._share = collective, homes, share
        super().__init__(optimizer, replicas or collective)

    def _plan(self) -> None:
        if self._share is not None:
            self._share(self.parameters)
        for learns in (True, False):
            self._give_out([p for p in self._given if p.requires_grad is learns])
        self._parts.clear()
        super()._plan()
        self._state.clear()
        self.adopt()

    def _pack(self, parameters: list[nn.Parameter]) -> _DividedPack:
        made = _DividedPack(parameters, self._shared, self.spans, self._homes)
        self._parts |= {id(part.whole): part for part in made.parts}
        return made

    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        found = super().reduce(piggybacked)
        if not found[0]:  # no update follows, which would end by a meeting
            self._shared.barrier()
        return found

    def _give_out(self, parameters: Sequence[nn.Parameter]) -> None:
        new = [parameter for parameter in parameters if id(parameter) not in self.spans]
        for dtype in dict.fromkeys(parameter.dtype for parameter in new):
            alike = [parameter for parameter in new if parameter.dtype == dtype]
            sizes = [parameter.numel() for parameter in alike]
            found = cut(sizes, self._shared.world_size, LINE // dtype.itemsize)
            self.spans |= dict(zip(map(id, alike), found, strict=True))


class _Part:
    """This replica's elements of a parameter, as one that an optimizer can have."""

    def __init__(self, whole: nn.Parameter, span: Span, total: Tensor, home: Tensor) -> None:
        self.whole, self.span, self.sum = whole, span, total
        self.is_all = span.stop - span.start == whole.numel()
        self.own = nn.Parameter(self.view(home))
        self.state: dict[str, Any] | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor that is like the parameter."""
        if self.is_all:
            return tensor
        return _flat(tensor, self.whole, self.span.start, self.span.stop)

    def cut(self, value: Any) -> Any:
        """These elements of an optimizer's value of the whole parameter; any other as it is."""
        if not isinstance(value, Tensor):
            return value
        whole = value.dim() and value.shape == self.whole.shape
        found = self.view(value).clone() if whole and not self.is_all else value
        return found.to(self.own.device)


class _DividedPack:
    """The parameters of one dtype: what goes to the others, and what comes from them."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        shared: SharedMemoryCollective,
        spans: dict[int, list[Span]],
        homes: Mapping[int, Tensor],
    ) -> None:
        self.parameters, self._shared = parameters, shared
        dtype, rank = parameters[0].dtype, shared.rank
        numel = sum(parameter.numel() for parameter in parameters)
        size = numel * dtype.itemsize
        segment = shared.segment(max(1, size * shared.world_size))
        inputs = [segment.tensor(r * size, numel, dtype) for r in range(shared.world_size)]
        self._tag = encode("reduce", numel, dtype)
        self.parts: list[_Part] = []
        self._out: list[tuple[nn.Parameter, int, int, Tensor]] = []
        others = [r for r in range(shared.world_size) if r != rank]
        self._come: list[list[Tensor]] = [[] for _ in others]
        first = done = 0
        for parameter in parameters:
            count = parameter.numel()
            mine = next((s for s in spans[id(parameter)] if s.rank == rank), Span(rank, 0, 0))
            for start, stop in ((0, mine.start), (mine.stop, count)):
                if start < stop:
                    target = inputs[rank][first + start : first + stop]
                    whole = stop - start == count
                    target = shaped(target, parameter) if whole else target
                    self._out.append((parameter, start, stop, target))
            if mine.start < mine.stop:
                shown = [inputs[r][first + mine.start : first + mine.stop] for r in others]
                if mine.stop - mine.start == count:
                    shown = [shaped(tensor, parameter) for tensor in shown]
                for tensors, tensor in zip(self._come, shown, strict=True):
                    tensors.append(tensor)
                home = homes.get(id(parameter), parameter.detach())
                self.parts.append(_Part(parameter, mine, shown[0], home))
                done += mine.stop - mine.start
            first += count
        self._sums = self._come[0]
        self._nbytes = size - done * dtype.itemsize

    def fill(self) -> None:
        grads: list[Tensor] = []
        targets: list[Tensor] = []
        for parameter, start, stop, target in self._out:
            grad = parameter.grad
            if grad is None:
                target.zero_()
                continue
            if stop - start != parameter.numel():
                grad = _flat(grad, parameter, start, stop)
            grads.append(grad)
            targets.append(target)
        if grads:
            torch._foreach_copy_(targets, grads)

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """Meet, and add up the gradients of one's own elements."""
        with self._shared.current_call.call(self._tag):
            total = self._shared.exchange_piggybacked(piggybacked)
        self._shared.traffic.moved(self._nbytes)
        self._add()
        if self._sums and total[0] and total[0] != loss_divisor:
            torch._foreach_mul_(self._sums, loss_divisor / total[0])
        return total

    def _add(self) -> None:
        """Add one's own gradients to what came from the others, in the order of the ranks."""
        sums: list[Tensor] = []
        own: list[Tensor] = []
        for part in self.parts:
            if part.whole.grad is not None:
                sums.append(part.sum)
                own.append(part.view(part.whole.grad).to(part.sum.device))
        first = max(self._shared.rank, 1)
        for other in self._come[1:first] if self._sums else ():
            torch._foreach_add_(self._sums, other)
        if sums:
            torch._foreach_add_(sums, own)
        for other in self._come[first:] if self._sums else ():
            torch._foreach_add_(self._sums, other)

    def give_back(self, unused: frozenset[int]) -> None:
        for part in self.parts:
            part.own.grad = None if id(part.whole) in unused else part.sum
        for parameter in self.parameters:
            parameter.grad = None


def _flat(tensor: Tensor, like: Tensor, start: int, stop: int) -> Tensor:
    """Elements of ``tensor`` in the order of the memory of ``like``, a dense one."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like.detach()).copy_(tensor)
    return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)
