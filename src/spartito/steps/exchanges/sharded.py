"""The exchange of replicas that keep shards: each updates the elements that are its own (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spartito.checkpoint.cuts import Cut, SpanCut
from spartito.checkpoint.saved_state import Saved
from spartito.collectives.memory.pages import PAGE
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.engine.gradients.compression import Compress
from spartito.engine.gradients.gradient_sum import LocalGradients
from spartito.engine.meta.meta_models import told
from spartito.engine.meta.value_recipes import value_of
from spartito.engine.sharding.block_transport import Stage, make_stage
from spartito.engine.sharding.blocks import Members, divide, units
from spartito.engine.sharding.gathering import Shown, gather_around
from spartito.engine.sharding.hidden_parameters import asleep
from spartito.engine.sharding.homes import GatheredHome, Home, SharedHome, WholeHome, settle_all
from spartito.engine.sharding.shard_copies import check_group
from spartito.engine.sharding.sharded_gradients import ShardedGradients
from spartito.engine.updates import fused_update
from spartito.engine.updates.divided_update import is_elementwise, say_elementwise
from spartito.engine.updates.optimizers import optimizer_parameters, unwrap
from spartito.errors import TaskLostError, UserError
from spartito.fingerprints import checksum
from spartito.notes import note
from spartito.outer.group_values import Shards, Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.coordination import compare_values
from spartito.steps.exchanges.compressed_sums import CompressedSums
from spartito.steps.groups import ALIKE, COPIES, SHARDS
from spartito.steps.parts import Prepared, Settings, State
from spartito.steps.prepared import Pair
from spartito.steps.recovery import Standing, share_state
from spartito.steps.shard_copies import Kept, load_rest, rest_of
from spartito.steps.state_parts import parameters_here
from spartito.steps.team import Team
from spartito.system import give_back_memory

BLOCK = 4 << 20
"""Bytes from which on a module is a block."""


def check_shards(zero: int, block_bytes: int) -> None:
    """Refuse shards that cannot be.

    Args:
        zero: The stage.
        block_bytes: From which size on a module is a block.

    Raises:
        UserError: They are not 1, 2 or 3, and 1 or more.
    """
    if zero not in (1, 2, 3):
        raise UserError(
            f"zero={zero!r}",
            "1 shards the optimizer's state, 2 the gradients too, 3 the parameters too.",
        )
    if block_bytes < 1:
        raise UserError(f"block_bytes={block_bytes}", "A block has 1 byte at least.")


class Sharded:
    """What the tasks of the group `SHARDS` keep between them; those of `COPIES` have the same.

    Args:
        team: The replicas, each with its data shard.
        zero: What is kept in shards: 1 the optimizer's state, 2 gradients, 3 parameters too.
        block_bytes: From which size on a module is a block.
        owners: How many tasks have a model between them; None: all replicas.
        gathers: Whether modules have their parameters gathered where their replicas share no
            memory; else who computes with them does (`Gradients.gather`).
        compress: How gradients go from machine to machine.

    Raises:
        UserError: For shards that cannot be.
    """

    def __init__(
        self,
        team: Team,
        zero: int,
        block_bytes: int = BLOCK,
        owners: Callable[[], int] | None = None,
        gathers: bool = True,
        compress: Compress = None,
    ) -> None:
        check_shards(zero, block_bytes)
        self._gathers, self._sums = gathers, CompressedSums(team, compress)
        self._team, self.zero, self._block_bytes = team, zero, block_bytes
        self._owners = owners or (lambda: team.own_shard[1])
        self.members: list[Members] = []
        self.homes: dict[int, Home] = {}
        self.learned: list[nn.Parameter] = []
        self.agreement = ShardAgreement(team, self.homes, is_whole=zero < 3)
        self._stage: Stage | None = None
        self._shown: dict[nn.Module, Shown] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def brings(self) -> bool:
        """As `Exchange.brings`; who joins a training later gets all from the others."""
        return self.has_shards and not self._team.groups.joins

    @property
    def divides(self) -> bool:
        """As `Exchange.divides`."""
        return self._owners() > 1

    @property
    def fraction(self) -> float:
        """As `Exchange.fraction`."""
        return 1 / self._owners()

    @property
    def has_shards(self) -> bool:
        """Whether there may be more replicas than this one, perhaps after a loss."""
        return self._team.own_shard[1] > 1 or self._team.recovery is not None

    def check(self, optimizer: object, settings: Settings) -> None:
        """As `Exchange.check`."""
        self._sums.check(settings)
        if not self.has_shards:
            return
        if settings.precision == "fp16":
            raise UserError(
                f"precision='fp16' under {self._team.name}: its loss scale looks at whole "
                "gradients",
                "Choose bf16, or mirrored.",
            )
        if isinstance(optimizer, Optimizer):
            check_optimizer(optimizer)

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Exchange.begin`: find homes for parameters that have none, with the chief's values.

        Who joins a training later gets all from the others, when all meet again.
        """
        if not self.has_shards:
            return
        joins = self._team.groups.joins
        if self._team.recovery is not None and not joins:
            check_group(self._team.groups.world)
        known = [id(parameter) for each in self.members for parameter in each.parameters]
        if self._team.model.world_size > 1:
            known += [id(p) for p in model.parameters() if p.is_meta]
        if joins:
            self.members += divide(model, self._block_bytes, known)
            return
        if self._stage is None:
            self._stage = make_stage(self._team.groups[SHARDS], self._team.device)
        if not known and self._by_torch(unwrap(model), self._stage):
            return
        members = divide(model, self._block_bytes, known)
        self.members += members
        homes = list(self._make_homes(members, self._stage))
        for home in homes:
            self.fill_with_chiefs(home)
        self.move_in(model, homes)

    def _by_torch(self, model: nn.Module, stage: Stage) -> bool:
        """Give a model that is new to torch's FSDP2, where that was asked for and can have it."""
        team, group = self._team, stage.group
        wanted = team.communication == "fsdp"
        plain = self._gathers and self._sums.are_exact and not (team.recovery or team.outer.name)
        if not (wanted and plain and self.zero == 3 and group.world_size > 1):
            return False
        if not isinstance(group, ProcessGroupCollective) or group.device_type != team.device.type:
            return False
        from spartito.engine.sharding import fully_sharded  # torch's FSDP2 takes a second to come

        blocks = units(model, self._block_bytes)
        if reason := fully_sharded.why_not(model, blocks):
            if team.is_chief:
                note("shards by our own engine, and not by FSDP2: %s", reason)
            return False
        mesh = fully_sharded.make_mesh(group, team.device)
        homes = [
            fully_sharded.FullyShardedHome(each, stage, mesh) for each in blocks if each.parameters
        ]
        for home in homes:
            self.fill_with_chiefs(home)
        enclosed = fully_sharded.Enclosed(model, homes, mesh)
        team.closing.append(partial(fully_sharded.let_go, enclosed.group_holders))
        self.members += [home.members for home in homes]
        self.move_in(model, homes)
        return True

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Exchange.gradients`."""
        if not self.brings:
            return model, LocalGradients(optimizer)
        check_optimizer(optimizer)
        groups = self._team.groups
        made = ShardedGradients(
            optimizer, self._team.replicas, self.homes, groups[SHARDS], groups[COPIES],
            self.learned, self._sums.made(model, optimizer),
        )  # fmt: skip
        return model, made

    def stepping(self, pair: Pair) -> AbstractContextManager[None]:
        """As `Exchange.stepping`: a block is reduced as soon as backward has its gradients.

        On a mesh some gradients of a task are not whole before the backward pass ends.
        """
        late = self.zero < 2 or pair.synchronized or self._team.model.world_size > 1
        if late or not isinstance(pair.gradients, ShardedGradients):
            return nullcontext()
        return pair.gradients.early()

    def optimize(self, pair: Pair) -> None:
        """As `Exchange.optimize`."""
        if self.has_shards:
            check_optimizer(pair.optimizer)
        pair.gradients.update(lambda: pair.loss_scale.step(pair.optimizer))

    def values(self, pair: Pair, column: JoinedGroups, whole: Callable[[], Values]) -> Values:
        """As `Exchange.values`."""
        if ALIKE in self._team.groups:
            groups = self._team.groups
            copies = groups[COPIES].world_size
            return Shards(pair.model, column, groups[ALIKE], self.homes, copies)
        if self.has_shards and self.zero == 3:
            raise UserError(
                f"{self._team.name} with zero=3 inside {self._team.called}",
                "Take zero=2: then each task has the values that groups merge.",
            )
        return whole()

    # What is here

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        """As `Held.cuts`."""
        if section == "accumulated" or (section == "model" and self.zero < 3):
            return {}
        found: dict[str, Cut] = {}
        for name, parameter in unwrap(pair.model).named_parameters(remove_duplicate=False):
            home = self.homes.get(id(parameter))
            if home is not None:
                span = home.span_of(parameter)
                whole = span.stop - span.start == parameter.numel()
                if section == "model" or not whole:
                    found[name] = SpanCut(tuple(parameter.shape), span.start, span.stop)
        return found

    def owned(self, pair: Pair) -> set[str] | None:
        """As `Held.owned`: perhaps no element of a parameter, which its cut tells."""
        if not isinstance(pair.gradients, ShardedGradients):
            return None
        return parameters_here(pair.model)

    @contextmanager
    def showing(self) -> Generator[None]:
        """As `Held.showing`: the elements that are this replica's."""
        for shown in self._shown.values():
            shown.as_shards = True
        try:
            with asleep():
                yield
        finally:
            for shown in self._shown.values():
                shown.as_shards = False

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """As `Held.save`."""
        if isinstance(pair.gradients, ShardedGradients):
            pair.gradients.refresh()
            pair.gradients.adopt()
        return self._sums.save(pair, state())

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """As `Held.load`."""
        load(saved)
        self._sums.load(pair, saved)
        if self.zero == 3 or self._team.outer.has(pair):
            for home in dict.fromkeys(self.homes.values()):
                home.loaded()

    # Homes

    def fill_with_chiefs(self, home: Home) -> None:
        """Bring the chief's values of a block to those who keep them; all tasks call it."""
        data = self._team.groups.data  # all that have these parameters
        whole: Callable[[Tensor], Tensor] = partial(told, data)
        if home.is_shared and self._team.groups[SHARDS].world_size == data.world_size:
            whole = value_of if data.rank == 0 else Tensor.detach  # the first one's are all's
        with self._team.coordination.during("prepare"):
            home.fill(map(whole, home.parameters))

    def move_in(self, model: nn.Module, homes: Sequence[Home]) -> None:
        """All shards have values: from now on a model has its parameters there.

        Args:
            model: With whatever wraps it.
            homes: Of its parameters, those that are new.
        """
        for home in homes:
            home.watches = self._team.recovery is not None
            self.homes.update({id(parameter): home for parameter in home.parameters})
        self._team.groups.world.barrier()
        give_back_memory()
        if self._gathers:
            self._hooks += gather_around([home for home in homes if isinstance(home, GatheredHome)])
        if self.zero == 3:
            own = unwrap(model)  # of a compiled one
            found = (self.homes.get(id(parameter)) for parameter in own.parameters())
            of_model = [home for home in dict.fromkeys(found) if home is not None]
            self._shown.setdefault(own, Shown()).watch(own, of_model)

    def move_out(self) -> list[Home]:
        """Leave all homes, and find others among those who have met again; all tasks call it.

        Returns:
            The new ones, which are empty.
        """
        for home in dict.fromkeys(self.homes.values()):
            home.leave()
        for hook in self._hooks:
            hook.remove()
        for shown in self._shown.values():
            shown.homes = []
        self._hooks, self.learned = [], []
        self.homes.clear()
        self._stage = make_stage(self._team.groups[SHARDS], self._team.device)
        return list(self._make_homes(self.members, self._stage))

    def _make_homes(self, members: Sequence[Members], stage: Stage) -> Iterator[Home]:
        """A home for the values of each block; all replicas call this."""
        if self.zero < 3 or stage.group.world_size == 1:
            yield from (WholeHome(each, stage) for each in members)
        elif not isinstance(stage.group, SharedMemoryCollective):
            yield from (GatheredHome(each, stage) for each in members)
        else:
            sizes = [SharedHome.bytes_of(each, stage) for each in members]
            segment = stage.group.segment(max(PAGE, sum(sizes)), has_view=True)
            for number, each in enumerate(members):
                yield SharedHome(each, stage, segment, sum(sizes[:number]))


class ShardAgreement:
    """Replicas that do not each have all values; what they wrote into these is settled first.

    Args:
        team: The replicas.
        homes: Of all parameters, by their ids; none where nothing is in shards.
        is_whole: Whether each replica has all values of the parameters nevertheless.
    """

    def __init__(self, team: Team, homes: Mapping[int, Home], is_whole: bool) -> None:
        self._team, self._homes, self._is_whole = team, homes, is_whole

    def settle(self) -> None:
        """As `Agreement.settle`."""
        settle_all(dict.fromkeys(self._homes.values()), self._team.groups.replicas)

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int | None:
        """As `Agreement.checksum`: of what lies in shards there is one value."""
        if self._is_whole:
            return None
        homes = [(each, self._homes.get(id(each))) for each in parameters]
        return checksum([p for p, home in homes if home is None or isinstance(home, WholeHome)])

    def compare(self, order: int) -> None:
        """As `Agreement.compare`: shards with the same ones of other groups."""
        groups = self._team.groups
        if not (self._is_whole or self._team.outer.is_apart) and ALIKE in groups:
            own = [home.own for home in dict.fromkeys(self._homes.values())]
            compare_values(groups[ALIKE], own)

    def settle_buffers(self) -> None:
        """As `Agreement.settle_buffers`: each replica has its own."""


class InShards:
    """Copies of all shards, each kept by another task too, for a training that outlives a loss.

    Args:
        team: Whose training it is.
        sharded: What is kept.
    """

    def __init__(self, team: Team, sharded: Sharded) -> None:
        self._team, self._sharded, self._kept = team, sharded, Kept()

    def keep(self) -> None:
        """As `Copies.keep`."""
        self._sharded.agreement.settle()
        self._kept.join(self._team.groups.world, self._team.cluster.local_rank)
        self._kept.keep(self._sharded.homes, self._team.pairs.all)

    @contextmanager
    def updating(self, pair: Pair, aboard: bool) -> Generator[None]:
        """As `Copies.updating`."""
        if isinstance(pair.gradients, ShardedGradients):
            pair.gradients.are_met = aboard
        if aboard:
            self._kept.look(self._sharded.homes, self._team.pairs.all, is_settled=True)
        yield
        if aboard:
            self._kept.keep(self._sharded.homes, self._team.pairs.all)

    @contextmanager
    def loading(self, aboard: bool) -> Generator[None]:
        """As `Copies.loading`."""
        self._look()
        yield
        if aboard:
            self.keep()

    def leaving(self, cause: TaskLostError | None) -> TaskLostError | None:
        """As `Copies.leaving`: what is there is kept once more for somebody who comes."""
        comes = cause is None and self._kept.is_current  # somebody, and nobody was lost
        self._look()
        if comes:
            try:
                self.keep()
            except TaskLostError as error:
                cause = error
        self._kept.is_current = False
        return cause

    def share(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """As `Copies.share`: shards are cut anew, of what all have between them."""
        team, sharded, kept = self._team, self._sharded, self._kept
        if own.is_new:
            kept.forget()
        pairs = team.pairs.all
        with sharded.showing():
            found = share_state(team.replicas, pairs, own, training, rest_of, load_rest)
        healing = kept.heal(team.groups.world, team.cluster.local_rank, sharded.members, pairs)
        homes = sharded.move_out()
        for home in homes:
            if healing is None:
                sharded.fill_with_chiefs(home)
            else:
                sharded.learned += healing.fill(home)
        for pair in pairs:
            own_ones = {id(p) for p in unwrap(pair.model).parameters()}
            new = [home for home in homes if id(home.parameters[0]) not in sharded.homes]
            own_homes = [home for home in new if id(home.parameters[0]) in own_ones]
            sharded.move_in(pair.model, own_homes)
        return found

    def _look(self) -> None:
        """Look for what something else has written since the last update."""
        self._kept.look(self._sharded.homes, self._team.pairs.all, is_settled=False)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse one whose step on a shard is not a part of its step.

    Args:
        optimizer: The user's.

    Raises:
        UserError: It may look at whole parameters, or has hooks.
    """
    name = type(optimizer).__name__
    if not is_elementwise(optimizer) and optimizer_parameters(optimizer):
        raise UserError(
            f"{name} of shards: it may look at whole parameters, and a replica has parts",
            f"{say_elementwise(optimizer)} Or train with mirrored.",
        )
    if fused_update.has_hooks(optimizer):
        raise UserError(
            f"an {name} with hooks on its steps, of shards",
            "A replica's step has only its shard of the gradients and of the new values: "
            "choose mirrored, or do it before or after strategy.update.",
        )
