"""How replicas that keep shards go on after the loss of a task: the shards are cut anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from spartito.collectives.collective import Collective
from spartito.engine.sharding.blocks import Layout, Members
from spartito.engine.sharding.homes import Home
from spartito.engine.sharding.shard_copies import NONE, VALUES, Entry, Shard, ShardCopies
from spartito.engine.sharding.sharded_gradients import ShardedGradients
from spartito.engine.updates.optimizers import move_state, optimizer_parameters, unwrap
from spartito.steps.groups import send
from spartito.steps.prepared import Pair
from spartito.steps.recovery import ElsewhereError, ShardsLostError, load_state, state_of


class _Stands(msgspec.Struct, array_like=True):
    """What a task has, as it tells the others."""

    committed: int
    is_older: bool
    blocks: str


class _Has(msgspec.Struct, array_like=True):
    """Whose shards a task has, and what all consist of."""

    ranks: list[int]
    names: list[str]
    entries: list[list[Entry]]


_stands = msgspec.msgpack.Decoder(_Stands)
_has = msgspec.msgpack.Decoder(_Has)
_encode = msgspec.msgpack.encode


class Kept:
    """The copies of all shards, as a strategy uses them.

    ``is_current``: they are of the last update, and no other is under way.
    """

    def __init__(self) -> None:
        self._copies: ShardCopies | None = None
        self._group: Collective | None = None
        self._blocks: list[Home] = []
        self._where: dict[int, tuple[int, int]] = {}
        self.is_current = False

    def join(self, group: Collective, local_rank: int) -> None:
        """Keep copies among these tasks from now on."""
        if self._copies is None:
            self._copies = ShardCopies(group, local_rank)
        elif group is not self._group:
            self._copies.regroup(group, local_rank)
        self._group = group

    def look(self, homes: Mapping[int, Home], pairs: Sequence[Pair], is_settled: bool) -> None:
        """Before an update, or a loss: look for what something else has written since the last.

        ``is_settled``: the homes have taken it.
        """
        if self._copies is not None and self.is_current:
            self._copies.look(self._shard(homes, pairs))
            for home in self._blocks if not is_settled else ():
                home.was_written |= home.is_written
                home.release()
            if self._is_unlike(self._copies, is_settled) or any(
                home.was_written for home in self._blocks
            ):
                self._copies.is_older = True
        self.is_current = False

    def _is_unlike(self, copies: ShardCopies, is_settled: bool) -> bool:
        """Whether values that every replica has are not those of the copies.

        All write the same; so before an update each looks at two shards, and somebody who lives
        has seen it, unless two are lost.
        """
        blocks = [n for n, home in enumerate(self._blocks) if home.seen(0) is not None]
        group = self._group
        assert group is not None, "joined"
        few = {group.rank, (group.rank - 1) % group.world_size}
        for rank in (few if is_settled else range(group.world_size)) if blocks else ():
            kept = copies.snapshots[copies.committed].values(rank)
            for number in blocks if kept else ():
                seen = self._blocks[number].seen(rank)
                assert seen is not None, "as of the first"
                if not torch.equal(seen.view(torch.uint8), kept[number].view(torch.uint8)):
                    return True
        return False

    def keep(self, homes: Mapping[int, Home], pairs: Sequence[Pair]) -> None:
        """After an update: keep this task's shards, and meet; all call it."""
        assert self._copies is not None, "joined"
        self.is_current = False
        self._copies.keep(self._shard(homes, pairs))
        for home in self._blocks:
            home.was_written = False
        self.is_current = True

    def _shard(self, homes: Mapping[int, Home], pairs: Sequence[Pair]) -> Shard:
        blocks = list(dict.fromkeys(homes.values()))
        if blocks != self._blocks:
            self._blocks = blocks
            self._where = {
                id(parameter): (block, number)
                for block, home in enumerate(blocks)
                for number, parameter in enumerate(home.parameters)
            }
        found: list[tuple[int, int, Mapping[str, Any]]] = [
            (block, VALUES, {"": home.own}) for block, home in enumerate(blocks)
        ]
        for pair in pairs:
            assert isinstance(pair.gradients, ShardedGradients), "with recovery all are"
            found += [(*self._where[id(p)], state) for p, state in pair.gradients.own_state()]
        return found

    def forget(self) -> None:
        """What is here is of no use to anybody."""
        if self._copies is not None:
            self._copies.forget()

    def heal(
        self,
        group: Collective,
        local_rank: int,
        members: Sequence[Members],
        pairs: Sequence[Pair],
    ) -> Healing | None:
        """What brings all shards back; None where nobody has any. All call it.

        Raises:
            ShardsLostError: Nobody has all of the state.
            ElsewhereError: A task has another model.
        """
        self.join(group, local_rank)
        assert self._copies is not None, "joined"
        healing = Healing(group, self._copies, _text(members, pairs), pairs)
        for pair in pairs:
            pair.optimizer.state.clear()
        if healing.version == NONE:
            return None
        self._copies.committed, self._copies.is_older = healing.version, False
        return healing


def _text(members: Sequence[Members], pairs: Sequence[Pair]) -> str:
    """What blocks consist of, in short."""
    names = {
        id(parameter): f"{number}.{name}"
        for number, pair in enumerate(pairs)
        for name, parameter in unwrap(pair.model).named_parameters()
    }
    said = [
        [(names.get(id(p)), tuple(p.shape), str(p.dtype)) for p in block.parameters]
        for block in members
    ]
    return blake2b(repr(said).encode(), digest_size=16).hexdigest()


class Healing:
    """The newest state that is complete, put together block by block of who has parts of it.

    Args:
        group: All tasks, which call everything here together.
        copies: What this one has.
        blocks: What all blocks consist of, the same on all tasks.
        pairs: Of whose optimizers the state is.

    Raises:
        ShardsLostError: Nobody has all of the state.
        ElsewhereError: A task has another model.
    """

    def __init__(
        self, group: Collective, copies: ShardCopies, blocks: str, pairs: Sequence[Pair]
    ) -> None:
        self._group, self._next = group, 0
        self._optimizers = {
            id(each): pair.optimizer
            for pair in pairs
            for each in optimizer_parameters(pair.optimizer)
        }
        own = _encode(_Stands(copies.committed, copies.is_older, blocks))
        all_ = [_stands.decode(each) for each in group.all_gather_bytes(own)]
        self.version = max(each.committed for each in all_)
        if len({each.blocks for each in all_}) > 1:
            raise ElsewhereError(
                "the tasks have different models, or blocks of them that learn",
                "A task that is started again builds the model that the others train.",
            )
        if self.version == NONE:
            return
        if any(each.is_older for each in all_ if each.committed == self.version):
            raise ShardsLostError(
                "parameters, or the optimizer's state, were written into after the last update, "
                "and a lost task had a part of what was written",
                "In shards change them by the optimizer alone, or take mirrored.",
            )
        self._snapshot = snapshot = copies.snapshots.get(self.version)
        told = _Has([], [], [])
        if snapshot is not None:
            ranks = range(len(snapshot.entries))
            there = [
                rank for rank in ranks if snapshot.memory.of(rank, self.version % 2) is not None
            ]
            told = _Has(there, list(snapshot.names), [list(each) for each in snapshot.entries])
        has = [_has.decode(each) for each in group.all_gather_bytes(_encode(told))]
        knows = next(each for each in has if each.ranks)
        self._entries = knows.entries
        self._holders = [
            next((task for task, each in enumerate(has) if rank in each.ranks), NONE)
            for rank in range(len(knows.entries))
        ]
        if NONE in self._holders:
            lost = [n for n, at in zip(knows.names, self._holders, strict=True) if at == NONE]
            raise ShardsLostError(
                f"{' and '.join(lost)} and the task that kept a copy of its shard were lost "
                "together: a part of the state is nowhere",
                "Start the job again: it goes on from the newest backup of BackupAndRestore, or "
                "checkpoint, if there is one.",
            )
        self._own: dict[int, dict[tuple[int, int, str], Tensor]] = {}
        for rank, at in enumerate(self._holders):
            if at == group.rank and snapshot is not None:
                wanted = [entry for entry in knows.entries[rank] if entry.is_tensor]
                found = snapshot.tensors(rank) or ()
                self._own[rank] = {
                    (entry.block, entry.parameter, entry.key): tensor
                    for entry, tensor in zip(wanted, found, strict=True)
                }

    def fill(self, home: Home) -> list[nn.Parameter]:
        """Fill the next block, and the optimizer's state of this replica's elements of it.

        Returns:
            The parameters of which there is state.
        """
        values: list[Tensor] = []
        parts: dict[tuple[int, str], list[tuple[int, Any]]] = {}
        for rank, entries in enumerate(self._entries):
            mine = [entry for entry in entries if entry.block == self._next]
            wanted = [entry for entry in mine if entry.is_tensor]
            own = self._own.get(rank)
            tensors = [
                entry.empty() if own is None else own[self._next, entry.parameter, entry.key]
                for entry in wanted
            ]
            send(self._group, tensors, self._holders[rank])
            come = iter(tensors)
            for entry in mine:
                if entry.parameter == VALUES:
                    values.append(next(come))
                    continue
                value = next(come) if entry.is_tensor else entry.number
                parts.setdefault((entry.parameter, entry.key), []).append((rank, value))
        self._next += 1
        home.fill(home.views(torch.cat(values)))
        before = Layout(home.layout.sizes, len(self._entries))
        state: dict[int, dict[str, Any]] = {}
        for (number, key), found in parts.items():
            whole = _joined(before, number, home.parameters[number], found)
            state.setdefault(number, {})[key] = whole
        for number, values_by_key in state.items():
            parameter = home.parameters[number]
            own_values = own_part(home, number, values_by_key)
            if own_values and id(parameter) in self._optimizers:
                self._optimizers[id(parameter)].state[parameter] = own_values
                move_state(self._optimizers[id(parameter)])
        return [home.parameters[number] for number in state]


def _joined(before: Layout, parameter: int, like: Tensor, found: Sequence[tuple[int, Any]]) -> Any:
    """A value of an optimizer's state, of the parts of all shards."""
    flat = []
    for rank, value in found:
        section = next(s for s in before.shard(rank) if s.parameter == parameter)
        count = section.stop - section.start
        shape = like.shape if count == like.numel() else (count,)
        if not isinstance(value, Tensor) or value.shape != shape:
            return value.clone() if isinstance(value, Tensor) else value  # a step counter
        flat.append(value.reshape(-1))
    return torch.cat(flat).view(like.shape)


def own_part(home: Home, number: int, state: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter's whole state what belongs to this replica's elements; perhaps nothing."""
    span, like = home.spans[number], home.parameters[number]
    if span.stop == span.start and like.numel():
        return {}
    is_all = span.stop - span.start == like.numel()
    return {
        key: value.reshape(-1)[span.start : span.stop].clone()
        if isinstance(value, Tensor) and value.dim() and value.shape == like.shape and not is_all
        else value
        for key, value in state.items()
    }


def rest_of(pair: Pair) -> dict[str, Any]:
    """What each replica has whole: all but the parameters, and the optimizer's state of them."""
    state = state_of(pair)
    names = dict(unwrap(pair.model).named_parameters(remove_duplicate=False))
    state["model"] = {key: value for key, value in state["model"].items() if key not in names}
    state["optimizer"] = {**state["optimizer"], "state": {}}
    return state


def load_rest(pair: Pair, saved: dict[str, Any]) -> None:
    """Take what `rest_of` returned elsewhere."""
    load_state(pair, saved, strict=False)
