"""The exchange of equal copies: gradients are summed over all replicas, each makes the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.saved_state import Saved
from spartito.collectives.hierarchical import HierarchicalCollective
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.sockets.tcp import SocketCollective
from spartito.engine.gradients.compression import Compress, Compression
from spartito.engine.gradients.ddp_gradients import Overlapped, OverlappedGradients
from spartito.engine.gradients.gradient_sum import LocalGradients, PackedGradients
from spartito.engine.gradients.overlap_trial import OverlapTrial
from spartito.engine.gradients.streamed_gradients import OVERLAPPED, StreamedGradients
from spartito.engine.updates.optimizers import optimizer_parameters
from spartito.engine.updates.sliced_update import SlicedGradients
from spartito.errors import UserError
from spartito.outer.group_values import Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.coordination import Alike
from spartito.steps.exchanges.compressed_sums import CompressedSums
from spartito.steps.parts import Prepared, Settings, State, Whole
from spartito.steps.prepared import Pair
from spartito.steps.team import Team


class AllReduce(Whole):
    """How that is done fastest depends on what joins the replicas.

    ========================= ============================================================
    one replica               nothing is summed
    shared memory             each replica adds up a part, and updates it for all
    sockets between machines  parts leave while backward still runs, with ``bucket_bytes``
    a process group of torch  packed after backward; on GPUs DDP reduces while it runs
    ========================= ============================================================

    Args:
        team: The replicas.
        find_unused: With DDP: whether to search for parameters that get no gradient.
        compress: How gradients go from machine to machine.
        bucket_bytes: In parts of at least so many bytes; None: all at once, after backward.
        tries: Whether parts leave beside backward only where updates are found faster so.
        slices: Whether replicas that share memory may make an update between them.
        overlaps: Whether DDP may have the model, as on GPUs.

    Raises:
        UserError: For a compression or size that cannot be.
    """

    agreement = Alike()
    brings = divides = False
    fraction = 1.0

    def __init__(
        self,
        team: Team,
        *,
        find_unused: bool | None = None,
        compress: Compress = None,
        bucket_bytes: int | None = None,
        tries: bool = False,
        slices: bool = True,
        overlaps: bool = True,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes < 1:
            raise UserError(f"bucket_bytes={bucket_bytes}", "At least 1; 1 MB hides most.")
        self._tries = tries
        self._sums = CompressedSums(team, compress)
        self._team, self._slices, self._may_overlap = team, slices, overlaps
        self._find_unused, self._bucket_bytes = find_unused, bucket_bytes

    @property
    def _overlaps(self) -> bool:
        """Whether DDP reduces while backward runs."""
        asked = self._team.communication
        by_ddp = asked == "ddp" or (asked == "auto" and self._team.device.type != "cpu")
        return self._may_overlap and by_ddp and self._team.own_shard[1] > 1

    def check(self, optimizer: object, settings: Settings) -> None:
        """As `Exchange.check`: what rounds has not the numbers of one device."""
        self._sums.check(settings)

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Exchange.begin`: they stay where they lie."""

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Exchange.gradients`."""
        group, compression = self._team.replicas, self._sums.made(model, optimizer)
        if group.world_size == 1:
            return model, LocalGradients(optimizer)
        if isinstance(group, ProcessGroupCollective) and self._overlaps:
            return self._by_ddp(model, optimizer, group, compression)
        if self._bucket_bytes and isinstance(group, SocketCollective | HierarchicalCollective):
            return model, self._in_parts(optimizer, group, compression, self._bucket_bytes)
        may_slice = self._slices and self._team.recovery is None
        if may_slice and isinstance(group, SharedMemoryCollective):
            return model, SlicedGradients(optimizer, group)
        return model, PackedGradients(optimizer, group, compression=compression)

    def stepping(self, pair: Pair) -> AbstractContextManager[None]:
        """As `Exchange.stepping`."""
        return nullcontext()

    def optimize(self, pair: Pair) -> None:
        """As `Exchange.optimize`."""
        pair.gradients.update(lambda: pair.loss_scale.step(pair.optimizer))

    def values(self, pair: Pair, column: JoinedGroups, whole: Callable[[], Values]) -> Values:
        """As `Exchange.values`."""
        return whole()

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """As `Held.save`, with what a compression has left out so far."""
        return self._sums.save(pair, state())

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """As `Held.load`."""
        load(saved)
        self._sums.load(pair, saved)

    def _by_ddp(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: ProcessGroupCollective,
        compression: Compression | None,
    ) -> Prepared:
        sharing = self._team.pairs.sharing(optimizer)
        for pair in sharing:
            if isinstance(pair.gradients, OverlappedGradients):
                pair.gradients.give_up_overlap()
        whole = Overlapped(model, group)
        self._team.closing.append(whole.unwrap)
        overlapped = OverlappedGradients(optimizer, group, whole, self._find_unused, compression)
        overlapped.shares = bool(sharing)
        return whole, overlapped

    def _in_parts(
        self,
        optimizer: Optimizer,
        group: SocketCollective | HierarchicalCollective,
        compression: Compression | None,
        size: int,
    ) -> PackedGradients:
        """What leaves beside backward, where there is so much of it, or it is compressed anyway."""
        nbytes = sum(p.numel() * p.itemsize for p in optimizer_parameters(optimizer))
        if compression is None and nbytes < OVERLAPPED * size:
            return PackedGradients(optimizer, group)
        pairs, lane = self._team.pairs, self._team.groups.lane
        return StreamedGradients(
            optimizer,
            group,
            lane,
            lambda: len(pairs.all) == 1,
            compression,
            size,
            OverlapTrial() if self._tries else None,
        )
