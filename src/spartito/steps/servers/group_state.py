"""A checkpoint of groups that train apart over servers: what is merged, and what each has alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.optim import Optimizer

from spartito.checkpoint.saved_state import Saved
from spartito.engine.updates.optimizers import named_state, unwrap
from spartito.errors import UserError
from spartito.notes import warn
from spartito.outer.optimizer import load_outer_state, outer_state
from spartito.ps.protocol.work import NOWHERE, At
from spartito.steps.prepared import Pair
from spartito.steps.servers.group_model import GroupModel
from spartito.storage.tensors import pack_state, unpack_state

if TYPE_CHECKING:
    from spartito.steps.servers.coordination import LeasedCoordination

OUTER, OWN = "outer", "own"
"""Sections of a checkpoint: the state of the servers' optimizer; how many groups there were, and
the optimizers of all but the first, whose is where that of any strategy is.
"""

State = dict[str, Any]
"""What `named_state` returned."""


def encode(state: State) -> bytes:
    """``state`` as bytes, which go from task to task."""
    tree, tensors = pack_state(state, "optimizer")
    rows = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    head = json.dumps([tree, list(rows)]).encode()  # names may be any
    body = save({str(number): tensor for number, tensor in enumerate(rows.values())})
    return len(head).to_bytes(8, "little") + head + body


def decode(data: bytes) -> State:
    """What `encode` was given."""
    try:
        size = int.from_bytes(data[:8], "little")
        tree, names = json.loads(data[8 : 8 + size])
        body = load(data[8 + size :])
        found: State = unpack_state(tree, {name: body[str(n)] for n, name in enumerate(names)})
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"the state of a group that came is damaged: {error!r}") from error
    return found


class OwnOptimizer:
    """What a group keeps to itself: its optimizer's state, as of its last merge.

    Where members have it between them the first one has it whole since then, because it may be
    asked for while the others compute.

    Args:
        model: What the group has of the model.
        forget: Has the group begin anew from the servers' values.
        in_step: Whether it may be asked for: groups wait for each other.
    """

    def __init__(self, model: GroupModel, forget: Callable[[], None], in_step: bool) -> None:
        self._model, self._forget, self._in_step = model, forget, in_step
        self.at: At = NOWHERE
        """Where that was."""
        self._given: bytes = b""  # what the first member got to go on from, and no other has
        self._kept: State | None = None  # a copy of it, while the group trains on
        self._is_new = True  # not what the last batches have left
        self._is_stale = False  # the copy, of what members have between them
        self.merged()

    @property
    def state(self) -> State:
        """It, under the user's names."""
        if self._given:
            return decode(self._given)
        return self._model.optimizer() if self._kept is None else self._kept

    def show(self) -> tuple[At, bytes]:
        """As `OwnState.show`."""
        return self.at, encode(self.state)

    def load(self, state: bytes) -> None:
        """As `OwnState.load`."""
        self._given = state

    def begin(self, state: State | None) -> None:
        """Another one was loaded; all members call it.

        Args:
            state: That of one's own group; None: what the optimizer has.
        """
        self._forget()
        self.at, self._is_new = NOWHERE, True
        if state is not None:
            self._model.load_optimizer(state)
        self.merged()

    @property
    def news(self) -> bytes:
        """On the first member: what all members are to go on from; b"" for what they have."""
        is_all = self._is_new and not self._model.wholes
        return self._given or (encode(self.state) if is_all else b"")

    def take(self, news: bytes) -> None:
        """Go on from what the first member has told; all members call it.

        Args:
            news: As `news`.
        """
        self._given, self._is_new = b"", False
        if news:
            self._model.load_optimizer(decode(news))
            self._is_stale = True

    def leased(self) -> None:
        """The group trains on from here; all members call it."""
        if self._in_step and not self._model.wholes:
            self._kept = copy.deepcopy(self.state)
        elif self._is_stale:
            self.merged()

    def merged(self) -> None:
        """What the group has is merged; all members call it."""
        self._is_stale = False
        if self._in_step and self._model.wholes:
            self._kept = self._model.optimizer()

    def forget(self) -> None:
        """What the optimizer has is as of the last merge."""
        if not self._model.wholes:
            self._kept = None


@contextmanager
def together(coordination: LeasedCoordination, own: OwnOptimizer) -> Iterator[list[State]]:
    """On the chief: the states of all groups, which stand still meanwhile.

    An empty list, and a warning, where they are not all at the same: then training from there is
    another one than the one that went on.
    """
    chief = coordination.chief
    assert chief is not None
    coordinator, coordination.met = chief.coordinator, NOWHERE
    seconds = coordinator.timeout if coordinator.is_open else coordinator.lease_seconds
    check: Callable[[], None] = coordinator.check
    if coordinator.given_up is not None:  # they come to no meeting any more
        seconds, check = 0.0, lambda: None
    with coordinator.meetings.states.collected(seconds, check) as given:
        found = {worker: (one.at, one.state) for worker, one in given.items()}
        where = {at for at, _ in found.values()}
        here: dict[int, State] = {}
        if coordination.work is not None:
            here[0] = own.state
            where.add(own.at)
        count = coordination.shards
        if len(where) == 1 and found.keys() | here.keys() == {*range(count)}:
            (coordination.met,) = where
            here |= {worker: decode(state) for worker, (_, state) in found.items()}
            yield [here[group] for group in range(count)]
            return
        absent = {*range(count)} - found.keys() - here.keys()
        warn(
            "a checkpoint without the groups' own states: %s. Training that goes on from it "
            "is not exactly the one that was interrupted",
            f"nothing came of group {min(absent)}" if absent else "they are not all equally far",
        )
        yield []


def merged(coordination: LeasedCoordination, pair: Pair, served: Optimizer) -> State:
    """The servers' values and the state of their optimizer, and this task's own optimizer.

    Args:
        coordination: That of this task; where it is not the chief's, the model is as it is.
        pair: What was prepared.
        served: The optimizer that the servers run, which is empty here.
    """
    if coordination.chief is not None:
        coordination.synchronize()  # a group's own values go aside
    coordination.fetch()
    model = unwrap(pair.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    outer = outer_state(served, names)
    served.state.clear()
    optimizer = named_state(model, pair.optimizer)
    return {"model": dict(model.state_dict()), "optimizer": optimizer, OUTER: outer}


def saved(coordination: LeasedCoordination, pair: Pair, served: Optimizer, in_step: bool) -> State:
    """What a checkpoint has: as `merged`, and what each group keeps to itself.

    The latter where groups are ``in_step``: they wait for each other. All tasks call it, or the
    chief alone while it trains.
    """
    own = None if coordination.pusher is None else coordination.pusher.own
    if coordination.chief is None or own is None or not in_step:
        if in_step and coordination.chief is None and coordination.work is not None:
            coordination.work.give()  # the chief may save now
        return merged(coordination, pair, served)
    with together(coordination, own) as states:
        found = merged(coordination, pair, served)
    if not states:
        return found
    rest = {str(group): state for group, state in enumerate(states) if group}
    return {**found, "optimizer": states[0], OWN: {"count": len(states), "of_group": rest}}


def loaded(
    coordination: LeasedCoordination,
    pair: Pair,
    served: Optimizer,
    found: Saved,
    whole: bool,
    index: int,
) -> None:
    """Have the servers' optimizer, and every group, go on from what a checkpoint has of them.

    Args:
        coordination: The chief's gives the groups' states to the others.
        pair: What was prepared, with what the checkpoint has for any strategy.
        served: The optimizer that the servers are to run.
        found: The checkpoint.
        whole: Whether it is one of a training, and not of a model alone.
        index: Of this task among the workers.
    """
    pusher = coordination.pusher
    if pusher is None:
        return
    if OUTER in found:
        named = dict(unwrap(pair.model).named_parameters())
        load_outer_state(served, named, found.whole(OUTER))
    theirs = _give(coordination, found) if whole else {}
    if pusher.own is not None:
        pusher.own.begin(theirs.get(str(index)))


def _give(coordination: LeasedCoordination, found: Saved) -> Mapping[str, State]:
    """Have the chief give each group what it keeps to itself, which is returned."""
    count, chief = coordination.shards, coordination.chief
    theirs: Mapping[str, State] = {}
    if OWN in found:
        tree = found.tree(OWN)
        if tree["count"] == count:
            theirs = found.whole(OWN)["of_group"]
        elif chief is not None:
            warn(
                "the checkpoint is of %d groups, and here are %d: all go on from the merged "
                "model, with the first group's optimizer",
                tree["count"],
                count,
            )
    if chief is None or coordination.kept:
        return theirs
    first = encode(found.whole("optimizer"))
    others = range(1 if coordination.work is not None else 0, count)
    states = {
        group: encode(theirs[g]) if (g := str(group)) in theirs else first for group in others
    }
    chief.coordinator.meetings.states.keep(states)
    return theirs
