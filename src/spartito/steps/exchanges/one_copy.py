"""The exchange of replicas that compute with one copy of the parameters, in memory of a machine."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.cuts import Cut, SpanCut
from spartito.checkpoint.saved_state import Saved
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.membership.rendezvous import WORLD, Rendezvous
from spartito.collectives.memory.segment import Segment
from spartito.collectives.memory.shared_memory import LINE, SharedMemoryCollective
from spartito.collectives.staged import on_host
from spartito.engine.gradients.gradient_sum import same
from spartito.engine.updates import fused_update
from spartito.engine.updates.divided_update import ELEMENTWISE, DividedGradients, Span
from spartito.engine.updates.optimizers import optimizer_parameters, unwrap
from spartito.errors import UserError
from spartito.fingerprints import checksum
from spartito.outer.group_values import Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.coordination import Alike
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.groups import one_shard_each
from spartito.steps.parts import Prepared, Settings, State
from spartito.steps.prepared import Pair
from spartito.steps.team import Team
from spartito.steps.topology import Connected, OneShardEach
from spartito.system import give_back_memory


@dataclass(frozen=True, slots=True)
class Owners:
    """Who updates which of an optimizer's parameters, and so holds their state: their ranks."""

    parameters: list[nn.Parameter]
    owners: list[int]

    def others(self, rank: int) -> list[nn.Parameter]:
        """The parameters that are not this rank's."""
        pairs = zip(self.parameters, self.owners, strict=True)
        return [parameter for parameter, owner in pairs if owner != rank]

    def of(self, rank: int) -> list[nn.Parameter]:
        """The parameters that are this rank's."""
        pairs = zip(self.parameters, self.owners, strict=True)
        return [parameter for parameter, owner in pairs if owner == rank]

    @property
    def spans(self) -> dict[int, list[Span]]:
        """The same by the parameters' ids, as spans of all of each."""
        pairs = zip(self.parameters, self.owners, strict=True)
        return {id(parameter): [Span(owner, 0, parameter.numel())] for parameter, owner in pairs}


@dataclass(frozen=True)
class OneMemory(OneShardEach):
    """Replicas of one machine, which share memory."""

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        """As `Topology.connect`.

        Raises:
            UserError: If the replicas share no memory.
        """
        groups = one_shard_each(rendezvous, cluster)
        if cluster.world_size > 1 and not isinstance(
            on_host(groups[WORLD]), SharedMemoryCollective
        ):
            rendezvous.close()
            raise UserError(
                f"central_storage for {cluster.world_size} replicas that share no memory",
                "Choose mirrored: only those of one Linux machine with x86-64 or ARM share memory.",
            )
        return groups


class OneCopy:
    """Each replica adds up the gradients of its part of the elements, and updates it in place.

    Replicas on devices compute with copies: gradients come to the host, and new values go back.

    Args:
        team: The replicas.
    """

    brings = divides = False

    def __init__(self, team: Team) -> None:
        self._team = team
        self._whole = AllReduce(team, slices=False)  # of what is not divided by elements
        self._owners: dict[Optimizer, Owners] = {}
        self._scales = False
        self._homes: list[tuple[nn.Parameter, int]] = []
        # The same memory, where a write stays on this replica; None: something else is there.
        self._apart: list[Tensor | None] = []
        self._still: dict[int, Still] = {}  # by id
        team.closing.append(partial(move_out, self._homes, self._apart))
        self._values: HostValues | None = None
        self.agreement = AddressAgreement(self._homes, self._still)

    @property
    def fraction(self) -> float:
        """As `Exchange.fraction`."""
        return 1 / self._team.num_replicas

    def check(self, optimizer: object, settings: Settings) -> None:
        """As `Exchange.check`."""
        self._scales = settings.precision == "fp16"

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Exchange.begin`: parameters move into the memory of all."""
        group = on_host(self._team.replicas)
        if not isinstance(group, SharedMemoryCollective):
            return
        given = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        new = homeless(given, self._homes)
        # On pages of their own: a write that stays here takes the whole page along.
        learns, still = ([p for p in new if p.requires_grad is wanted] for wanted in (True, False))
        offsets, size = line_offsets(nbytes_of(learns))
        if still:
            begin = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            others, size = line_offsets(nbytes_of(still))
            offsets, size = [*offsets, *(begin + each for each in others)], begin + size
        parameters = [*learns, *still]
        segment = group.segment(size, has_view=True)
        for parameter, offset in zip(parameters, offsets, strict=True):
            view = _view(segment, offset, parameter)
            if self._team.is_chief:
                view.copy_(parameter.detach())
            if not parameter.is_cpu:
                self._values = self._values or HostValues(group)
                self._values.add(parameter, view)
                continue
            apart = _view(segment, offset, parameter, segment.view)
            if not parameter.requires_grad:
                # A forward pass or a script writes into it on each replica, as into an average of
                # what learns. What nobody writes costs no memory.
                self._still[id(parameter)] = Still(parameter, view)
                view = apart
            parameter.data = view
            self._homes.append((parameter, view.data_ptr()))
            self._apart.append(apart)
        give_back_memory()
        group.barrier()
        if self._values is not None:
            self._values.show(parameters)

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Exchange.gradients`."""
        group = on_host(self._team.replicas)
        if isinstance(group, SharedMemoryCollective) and self._divides_elements(optimizer):
            homes = {} if self._values is None else self._values.by_id
            return model, DividedGradients(
                optimizer, group, homes, self._team.replicas, self._share
            )
        self._divide(optimizer)
        return self._whole.gradients(model, optimizer)

    def stepping(self, pair: Pair) -> AbstractContextManager[None]:
        """As `Exchange.stepping`."""
        return nullcontext()

    def optimize(self, pair: Pair) -> None:
        """As `Exchange.optimize`."""
        if self._team.num_replicas > 1 and fused_update.has_hooks(pair.optimizer):
            raise UserError(
                f"an {type(pair.optimizer).__name__} with hooks on its steps under central_storage",
                "A replica's step has only its part of the gradients and of the new values: "
                "choose mirrored, or do it before or after strategy.update.",
            )
        if self._values is not None:
            self._values.take_written()
        owners = None
        is_idle = False
        if not isinstance(pair.gradients, DividedGradients):
            owners, own = self._divide(pair.optimizer), self._team.cluster.rank
            self._share(pair.gradients.parameters)
            for parameter in owners.others(own):
                parameter.grad = None  # optimizers pass over it
            # One of the user's own may write without a gradient, as one that averages does.
            is_idle = not owners.of(own) and not _is_torchs_own(pair.optimizer)
        if is_idle:
            pair.gradients.update(lambda: _note_step(pair.optimizer))
        else:
            self._whole.optimize(pair)
        if self._values is not None and owners is not None:
            self._values.take_whole(owners.of(own))
        self._team.replicas.barrier()
        if self._values is not None:
            self._values.show(optimizer_parameters(pair.optimizer))

    def values(self, pair: Pair, column: JoinedGroups, whole: Callable[[], Values]) -> Values:
        """As `Exchange.values`."""
        return whole()

    # What is here

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        """As `Held.cuts`."""
        found: dict[str, Cut] = {}
        if section != "optimizer" or not isinstance(pair.gradients, DividedGradients):
            return found
        for name, parameter in unwrap(pair.model).named_parameters(remove_duplicate=False):
            spans, own = pair.gradients.spans.get(id(parameter), ()), self._team.cluster.rank
            if len(spans) > 1:
                mine = next((span for span in spans if span.rank == own), Span(own, 0, 0))
                shape, dims = tuple(parameter.shape), _slowest_first(parameter)
                found[name] = SpanCut(shape, mine.start, mine.stop, dims)
        return found

    def owned(self, pair: Pair) -> set[str] | None:
        """As `Held.owned`."""
        if self._team.num_replicas == 1:
            return None
        spans, own = self._spans(pair), self._team.cluster.rank
        return {
            name
            for name, parameter in unwrap(pair.model).named_parameters()
            if any(span.rank == own for span in spans.get(id(parameter), ()))
        }

    def showing(self) -> AbstractContextManager[None]:
        """As `Held.showing`."""
        return nullcontext()

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """As `Held.save`."""
        self._spans(pair)
        return state()

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """As `Held.load`."""
        self._spans(pair)
        self._team.replicas.barrier()  # nobody computes with the old values any more
        load(saved)
        parameters = [*optimizer_parameters(pair.optimizer), *unwrap(pair.model).parameters()]
        if self._values is not None and self._team.is_chief:
            self._values.take_whole(parameters)
        self._spans(pair)
        self._team.replicas.barrier()  # nobody still writes when the first one trains
        if self._values is not None:
            self._values.show(parameters)

    # Who updates what

    def _share(self, parameters: Sequence[nn.Parameter]) -> None:
        """What learns from now on has the chief's values, in the memory of all; all call it."""
        given = [self._still.pop(id(p)) for p in parameters if id(p) in self._still]
        group = on_host(self._team.replicas)
        if not given or not isinstance(group, SharedMemoryCollective):
            return
        for still in given if self._team.is_chief else ():
            still.home.copy_(still.parameter.detach())
        group.barrier()
        homes = {id(still.parameter): still.home for still in given}
        for number, (parameter, _) in enumerate(self._homes):
            if (home := homes.get(id(parameter))) is not None:
                parameter.data = home
                self._homes[number] = parameter, home.data_ptr()
                self._apart[number] = None

    def _divides_elements(self, optimizer: Optimizer) -> bool:
        """Whether an update of some elements of a parameter is the same part of its update."""
        return type(optimizer) in ELEMENTWISE and not self._scales

    def _spans(self, pair: Pair) -> dict[int, list[Span]]:
        """Who holds the state of what, once what is not this replica's is gone."""
        if isinstance(pair.gradients, DividedGradients):
            pair.gradients.refresh()
            pair.gradients.adopt()
            return pair.gradients.spans
        return self._divide(pair.optimizer).spans

    def _divide(self, optimizer: Optimizer) -> Owners:
        """Who updates what; parameters that are new are given out, the others stay."""
        parameters, before = optimizer_parameters(optimizer), self._owners.get(optimizer)
        if before is not None and same(parameters, before.parameters):
            return before
        known = (
            {}
            if before is None
            else dict(zip(map(id, before.parameters), before.owners, strict=True))
        )
        loads = [0] * (self._team.num_replicas if _is_torchs_own(optimizer) else 1)
        for parameter in parameters:
            if id(parameter) in known:
                loads[known[id(parameter)]] += parameter.numel()
        new = [parameter for parameter in parameters if id(parameter) not in known]
        owners = balanced([parameter.numel() for parameter in new], loads)
        known |= dict(zip(map(id, new), owners, strict=True))
        found = Owners(parameters, [known[id(parameter)] for parameter in parameters])
        for parameter in found.others(self._team.cluster.rank):
            optimizer.state.pop(parameter, None)  # some begin theirs when they are built
        self._owners[optimizer] = found
        return found


@dataclass(frozen=True, slots=True)
class Still:
    """A parameter that does not learn: what a replica writes into it stays there.

    Attributes:
        parameter: It.
        home: Where it lies in the memory of all, from when on it learns.
    """

    parameter: nn.Parameter
    home: Tensor


class AddressAgreement(Alike):
    """Parameters that lie in one memory are equal, unless a replica has moved its own away.

    Args:
        homes: What lies there, and at which address.
        still: What each replica may have written for itself, by id.
    """

    def __init__(self, homes: list[tuple[nn.Parameter, int]], still: Mapping[int, Still]) -> None:
        self._homes, self._still = homes, still

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int | None:
        """As `Agreement.checksum`: of where they lie now; on devices of the values."""
        if not self._homes:
            return super().checksum(parameters)
        moved = [parameter.data_ptr() - home for parameter, home in self._homes]
        written = checksum([still.parameter for still in self._still.values()])
        return crc32(repr((moved, written)).encode())


def homeless(
    parameters: Sequence[nn.Parameter], homes: Sequence[tuple[nn.Parameter, int]]
) -> list[nn.Parameter]:
    """The parameters that lie in no shared memory yet.

    Others came with an optimizer before, which goes on to write where they lie.

    Args:
        parameters: Those of a model.
        homes: What lies in shared memory, and at which address.

    Raises:
        UserError: If one of these has been moved out of there.
    """
    known = {id(parameter): home for parameter, home in homes}
    for parameter in parameters:
        if parameter.numel() and known.get(id(parameter), parameter.data_ptr()) != (
            parameter.data_ptr()
        ):
            raise UserError(
                f"a parameter of shape {tuple(parameter.shape)} has other memory than when it "
                "was prepared with an optimizer before",
                "Under central_storage move or convert a model before its first prepare: an "
                "optimizer writes into the memory that was there.",
            )
    return [parameter for parameter in parameters if id(parameter) not in known]


def balanced(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """An owner for each size, the largest first, always the one who has least so far.

    ``loads`` is what each has at first; from zeros no two sums differ by more than the largest.
    """
    loads = list(loads)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def nbytes_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Their bytes."""
    return [parameter.numel() * parameter.element_size() for parameter in parameters]


def line_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where blocks of ``sizes`` bytes begin, each on a cache line, and how long all are."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // LINE) * LINE
    return offsets, max(end, LINE)


def move_out(homes: list[tuple[nn.Parameter, int]], apart: list[Tensor | None]) -> None:
    """Leave the memory of all replicas: from now on each has its parameters to itself.

    It costs no memory before somebody writes: what is read is what all have left there.

    Args:
        homes: What lies there, and at which address; nothing afterwards. One that has been moved
            stays where it is.
        apart: The memory of each where a write stays on this replica; None: there is none.
    """
    for (parameter, address), own in zip(homes, apart, strict=True):
        if parameter.data_ptr() == address:
            parameter.data = parameter.detach().clone() if own is None else own
    homes.clear()
    apart.clear()


def _view(segment: Segment, offset: int, like: Tensor, map_: mmap.mmap | None = None) -> Tensor:
    """Memory of the segment, or of another mapping of it, shaped and laid out as ``like``."""
    dense = torch.empty_like(like, device="meta", memory_format=torch.preserve_format)
    flat = segment.tensor(offset, like.numel(), like.dtype, map_)
    return flat.as_strided(dense.shape, dense.stride())


def _slowest_first(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions in the order of the memory."""
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether it updates every parameter by itself, as all of torch's do (LBFGS is refused)."""
    return type(optimizer).__module__.partition(".")[0] == "torch"


def _note_step(optimizer: Optimizer) -> None:
    """The step of who updates no parameter: a schedule is to know that there was one."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


class HostValues:
    """The one copy, in memory of the host, of parameters that replicas have on devices.

    Args:
        group: The replicas, which share that memory.
    """

    def __init__(self, group: SharedMemoryCollective) -> None:
        self._group = group
        self._parameters: list[nn.Parameter] = []
        self._values: list[Tensor] = []
        self._seen: list[tuple[int, int]] = []

    def add(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Keep one more; ``values`` are there already."""
        self._parameters.append(parameter)
        self._values.append(values)
        self._seen.append(_mark(parameter))

    @property
    def by_id(self) -> dict[int, Tensor]:
        """The values, by the ids of the parameters."""
        return dict(zip(map(id, self._parameters), self._values, strict=True))

    def take_written(self) -> None:
        """Before an update: what the chief has written into its own becomes the values of all.

        Raises:
            UserError: On all, if others have written something and the chief has not.
        """
        written = [now != before for now, before in zip(self._marks(), self._seen, strict=True)]
        own = float(any(written))
        flags = torch.tensor([own, own if self._group.rank == 0 else 0.0])
        some, chief = self._group.all_reduce(flags).tolist()
        if some and not chief:
            raise UserError(
                "parameters were written on replicas that are not the chief, under "
                "central_storage: there is one copy of the values",
                "Write into them on the chief, or on all replicas alike.",
            )
        if chief:
            if self._group.rank == 0:
                for index, value in enumerate(self._values):
                    if written[index]:
                        value.copy_(self._parameters[index].detach())
            self._group.barrier()
            self.show(self._parameters)

    def take_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """These, of this replica alone, become the values of all."""
        values = self.by_id
        for parameter in parameters:
            if id(parameter) in values:
                values[id(parameter)].copy_(parameter.detach())

    def show(self, parameters: Sequence[nn.Parameter]) -> None:
        """Bring the values of these to this replica's device."""
        wanted = set(map(id, parameters))
        here = [n for n, parameter in enumerate(self._parameters) if id(parameter) in wanted]
        targets = [self._parameters[n].detach() for n in here]
        if here:
            torch._foreach_copy_(targets, [self._values[n] for n in here])
        for n in here:
            self._seen[n] = _mark(self._parameters[n])

    def _marks(self) -> list[tuple[int, int]]:
        return [_mark(parameter) for parameter in self._parameters]


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    """It changes when something is written into a parameter, or its memory is replaced."""
    return parameter._version, parameter.data_ptr()


def check_devices(parameters: torch.device | str) -> None:
    """Refuse to keep parameters elsewhere than in the host's memory.

    Args:
        parameters: Where they are asked for.

    Raises:
        UserError: It is no CPU.
    """
    if str(parameters) != "cpu":
        raise UserError(
            f"parameter_device={str(parameters)!r}: central_storage keeps parameters in the "
            "host's memory, 'cpu'",
            "Choose mirrored for parameters on the replicas' own devices.",
        )
