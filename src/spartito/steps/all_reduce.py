"""The exchange of equal copies: gradients are summed over all replicas, each makes the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.saved_state import Saved
from spartito.collectives.collective import Collective
from spartito.collectives.hierarchical import HierarchicalCollective
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.shared_memory import SharedMemoryCollective
from spartito.collectives.tcp import SocketCollective
from spartito.engine.compression import (
    Compress,
    Compression,
    choose,
    make_compression,
)
from spartito.engine.ddp_gradients import Overlapped, OverlappedGradients
from spartito.engine.gradients import LocalGradients, PackedGradients
from spartito.engine.optimizers import optimizer_parameters, unwrap
from spartito.engine.sliced_update import SlicedGradients
from spartito.engine.streamed_gradients import BUCKET, OVERLAPPED, StreamedGradients
from spartito.errors import UserError
from spartito.log import warn
from spartito.outer.group_values import Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.coordination import Alike
from spartito.steps.parts import Prepared, Settings, State, Whole
from spartito.steps.prepared import Pair
from spartito.steps.team import Team


class AllReduce(Whole):
    """How that is done fastest depends on what joins the replicas.

    ========================= ============================================================
    one replica               nothing is summed
    shared memory             each replica adds up a part, and updates it for all
    sockets between machines  parts leave while backward still runs
    a process group of torch  packed after backward; on GPUs DDP reduces while it runs
    ========================= ============================================================

    Args:
        team: The replicas.
        find_unused: With DDP: whether to search for parameters that get no gradient.
        compress: How gradients go from machine to machine.
        bucket_bytes: In parts of at least so many bytes; None: all at once, after backward.
        slices: Whether replicas that share memory may make an update between them.

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
        slices: bool = True,
    ) -> None:
        if compress is not None and team.recovery is not None:
            raise UserError(
                f"compress={compress!r} with recovery: what was left out of a lost task's "
                "gradients would be lost",
                "Leave one of them out.",
            )
        if bucket_bytes is not None and bucket_bytes < 1:
            raise UserError(f"bucket_bytes={bucket_bytes}", "At least 1; 1 MB hides most.")
        self._team, self._slices = team, slices
        self._find_unused, self._bucket_bytes = find_unused, bucket_bytes
        self._compress = choose(compress)
        if compress is not None and bucket_bytes is None:
            self._bucket_bytes = BUCKET

    @property
    def _overlaps(self) -> bool:
        """Whether DDP reduces while backward runs."""
        asked = self._team.communication
        by_ddp = asked == "ddp" or (asked == "auto" and self._team.device.type == "cuda")
        return by_ddp and self._team.own_shard[1] > 1

    def check(self, optimizer: object, settings: Settings) -> None:
        """As `Exchange.check`: what rounds has not the numbers of one device."""
        if self._compress is None:
            return
        if settings.deterministic:
            raise UserError(
                f"compress={self._compress!r} with deterministic=True, whose numbers are those of "
                "one device",
                "Leave one of them out: compressed gradients are rounded.",
            )
        if settings.precision == "fp16" and self._compress != "bf16":
            raise UserError(
                f"compress={self._compress!r} with precision='fp16', whose loss scale changes",
                "What was left out has the scale of its step: choose precision='bf16'.",
            )

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Exchange.begin`: they stay where they lie."""

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Exchange.gradients`."""
        group = self._team.replicas
        if group.world_size == 1:
            return model, LocalGradients(optimizer)
        if isinstance(group, ProcessGroupCollective):
            return self._by_process_group(model, optimizer, group)
        if isinstance(group, SocketCollective | HierarchicalCollective):
            return model, self._between_machines(optimizer, group)
        if self._compress is not None and self._team.is_chief:
            warn("compress=%r is for several machines: left out on one", self._compress)
        may_slice = self._slices and self._team.recovery is None
        if may_slice and isinstance(group, SharedMemoryCollective):
            return model, SlicedGradients(optimizer, group)
        return model, PackedGradients(optimizer, group)

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
        found, compression = state(), compression_of(pair)
        left_out = {} if compression is None else compression.state_dict(*self.senders(pair))
        return {**found, "compression": left_out} if left_out else found

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """As `Held.load`."""
        load(saved)
        compression = compression_of(pair)
        if "optimizer" in saved and compression is not None:
            state = saved.whole("compression") if "compression" in saved else {}
            compression.load_state_dict(state, *self.senders(pair))

    def senders(self, pair: Pair) -> tuple[dict[str, nn.Parameter], Collective, bool]:
        """What a compression needs to save and load what it keeps.

        Args:
            pair: A prepared one.

        Returns:
            Its parameters by name, those that sum them, and whether this task sends some.
        """
        team, named = self._team, dict(unwrap(pair.model).named_parameters())
        is_sender = isinstance(team.replicas, ProcessGroupCollective) or team.groups.lane.is_leader
        return named, team.replicas, is_sender

    def _by_process_group(
        self, model: nn.Module, optimizer: Optimizer, group: ProcessGroupCollective
    ) -> Prepared:
        if not self._overlaps:
            if self._compress is not None:
                raise UserError(
                    f"compress={self._compress!r}: a process group sends gradients as they are",
                    "communication='auto' compresses, and 'ddp' does.",
                )
            return model, PackedGradients(optimizer, group)
        sharing = self._team.pairs.sharing(optimizer)
        for pair in sharing:
            if isinstance(pair.gradients, OverlappedGradients):
                pair.gradients.give_up_overlap()
        whole = Overlapped(model, group)
        self._team.closing.append(whole.unwrap)
        compression = make_compression(self._compress)
        overlapped = OverlappedGradients(optimizer, group, whole, self._find_unused, compression)
        overlapped.shares = bool(sharing)
        return whole, overlapped

    def _between_machines(
        self, optimizer: Optimizer, group: SocketCollective | HierarchicalCollective
    ) -> PackedGradients:
        nbytes = sum(p.numel() * p.itemsize for p in optimizer_parameters(optimizer))
        size = self._bucket_bytes
        if size is None or (self._compress is None and nbytes < OVERLAPPED * size):
            return PackedGradients(optimizer, group)
        pairs = self._team.pairs
        return StreamedGradients(
            optimizer, group, self._team.groups.lane, lambda: len(pairs.all) == 1,
            make_compression(self._compress), size,
        )  # fmt: skip


def compression_of(pair: Pair) -> Compression | None:
    """How the gradients of a pair are sent, if they leave in parts.

    Args:
        pair: A prepared one.
    """
    if isinstance(pair.gradients, StreamedGradients | OverlappedGradients):
        return pair.gradients.compression
    return None
