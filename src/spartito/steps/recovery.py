"""What of a training is kept elsewhere, so that it outlives the loss of a task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import Tensor

from spartito.accelerators import seed_generators
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, Piggybacked
from spartito.collectives.membership.placement import PROCESS_GROUP
from spartito.collectives.staged import to_host
from spartito.data.batch import Batch
from spartito.engine.gradients.gradient_sum import Gradients
from spartito.engine.modules.step_undo import Undo
from spartito.engine.step_context import enter
from spartito.engine.updates.optimizers import load_named_state, named_state, unwrap
from spartito.errors import TaskLostError, UserError
from spartito.steps.groups import send
from spartito.steps.prepared import Pair
from spartito.storage.tensors import pack_state, unpack_state

if TYPE_CHECKING:
    from spartito.steps.team import Team


class Recovering(Protocol):
    """What is kept of a training elsewhere, while it runs."""

    def begin(self, pair: Pair, batch: Batch) -> None:
        """Before the forward pass of a batch."""
        ...

    def saw(self, output: Any, batch: Batch) -> None:
        """After the forward pass of a batch; None where this task has no rows of it."""
        ...

    def brings(self) -> Piggybacked:
        """Before an update: what is summed over the tasks along with it; all call it."""
        ...

    def updating(self, pair: Pair) -> AbstractContextManager[None]:
        """A block in which the optimizer makes an update, behind which it is kept elsewhere too."""
        ...

    def brought(self, pair: Pair, total: Sequence[float]) -> None:
        """The sums of what was brought; the update is certain now."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """A block in which a checkpoint is read."""
        ...


class EndsWithLoss:
    """A training that ends when a task is lost."""

    def begin(self, pair: Pair, batch: Batch) -> None:
        """Nothing is repeated."""

    def saw(self, output: Any, batch: Batch) -> None:
        """Nobody else needs to know."""

    def brings(self) -> Piggybacked:
        """Nothing."""
        return ()

    def updating(self, pair: Pair) -> AbstractContextManager[None]:
        """As it is."""
        return nullcontext()

    def brought(self, pair: Pair, total: Sequence[float]) -> None:
        """Nothing was."""

    def loading(self) -> AbstractContextManager[None]:
        """As it is."""
        return nullcontext()


class Copies(Protocol):
    """Where the state of a lost task is found."""

    def keep(self) -> None:
        """Before a training that recovers: keep what one task alone has; all tasks call it."""
        ...

    def updating(self, pair: Pair, aboard: bool) -> AbstractContextManager[None]:
        """As `Recovering.updating`; ``aboard``: a training that recovers runs."""
        ...

    def loading(self, aboard: bool) -> AbstractContextManager[None]:
        """As `Recovering.loading`."""
        ...

    def leaving(self, cause: TaskLostError | None) -> TaskLostError | None:
        """The groups are left because of a loss, or for somebody new; what the cause is now."""
        ...

    def share(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """Bring all tasks to one state; as `share_state`."""
        ...


class InReplicas:
    """Each replica has all of the state.

    Args:
        team: Whose training it is.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def keep(self) -> None:
        """They do."""

    def updating(self, pair: Pair, aboard: bool) -> AbstractContextManager[None]:
        """As it is."""
        return nullcontext()

    def loading(self, aboard: bool) -> AbstractContextManager[None]:
        """Nothing else is to know."""
        return nullcontext()

    def leaving(self, cause: TaskLostError | None) -> TaskLostError | None:
        """As it is."""
        return cause

    def share(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """As `Copies.share`: from the first replica of those that are furthest."""
        return share_state(self._team.replicas, self._team.pairs.all, own, training)


OF_GROUP = "of_group"
"""What of a training's state is of one's own group alone, where groups train apart."""


class Divides(Protocol):
    """What is to be known of an exchange."""

    @property
    def divides(self) -> bool:
        """Whether tasks have gradients of different parameters."""
        ...


class Regrouping:
    """The tasks that live, and those that are new, meet again, and go on from one state.

    Args:
        team: Who they are.
        copies: Where the state of a lost one is found.
        gradients: Makes those of a pair anew, once all have met.
        exchange: Tells whether tasks have gradients of different parameters.
        stage: Of a pipeline: each draws for itself.
    """

    def __init__(
        self,
        team: Team,
        copies: Copies,
        gradients: Callable[[Any, Any], tuple[Any, Gradients]],
        exchange: Divides,
        stage: int = 0,
    ) -> None:
        self.team, self._copies = team, copies
        self._gradients, self._exchange = gradients, exchange
        self._repeating = Repeating(team.device, stage)
        self._taken: tuple[Standing, dict[str, Any]] | None = None  # in a meeting that failed then
        self.aboard: Aboard | None = None
        """What rides along with each update, while a training that recovers runs."""
        self.fits = 0
        """Trainings that recover, of all trainers of this strategy, the present one included."""

    def begin(self, pair: Pair, batch: Batch) -> None:
        """As `Recovering.begin`; in a loop of the user's own nothing is repeated."""
        if self.aboard is not None:
            self._repeating.begin(pair, batch, self.team.data_shard[0])

    def saw(self, output: Any, batch: Batch) -> None:
        """As `Recovering.saw`."""
        if self.aboard is not None and (output is not None or not batch.size):
            self.aboard.saw(output, batch)

    def brings(self) -> Piggybacked:
        """As `Recovering.brings`."""
        return () if self.aboard is None else self.aboard.brings()

    def updating(self, pair: Pair) -> AbstractContextManager[None]:
        """As `Recovering.updating`."""
        return self._copies.updating(pair, self.aboard is not None)

    def brought(self, pair: Pair, total: Sequence[float]) -> None:
        """As `Recovering.brought`; last, since an update of shards may be undone before."""
        self._repeating.end(pair)
        if self.aboard is not None:
            self.aboard.brought(total)

    def loading(self) -> AbstractContextManager[None]:
        """As `Recovering.loading`."""
        return self._copies.loading(self.aboard is not None)

    def keep_copies(self) -> None:
        """Before a training that recovers, on all tasks: what one of them alone has, is kept."""
        self._copies.keep()

    def regroup(self, cause: TaskLostError | None) -> bool:
        """Leave all groups, and meet those who live, and those who are new; all of them call it.

        The batches since the last update are forgotten.

        Args:
            cause: The loss; None where nobody was lost.

        Returns:
            Whether this task was there when the others met last: what it has is of no use if they
            went on without it.

        Raises:
            TaskLostError: Too few are left, or none of them is this one.
        """
        cause = self._copies.leaving(cause)
        enter(None)
        for pair in self.team.pairs.all:
            self._repeating.undo(pair)
            pair.gradients.leave()
        return self.team.regroup(cause)

    def meet_again(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """After `regroup`: connect the groups, and have all go on from one state.

        Args:
            own: How far this task is.
            training: What it has beside models and optimizers.

        Returns:
            How far all are now, and where this task took over a state what ``training`` returned
            elsewhere.

        Raises:
            TaskLostError: Another one is lost; then all `regroup` once more.
        """
        team, taken = self.team, None if own.is_new else self._taken
        if taken is not None:  # a meeting failed once this task had taken over a state
            own, training = taken[0], partial(dict, taken[1])
        team.meet()
        with team.coordination.during("prepare"):
            best, state = self._copies.share(own, training)
            state = taken[1] if state is None and taken is not None else state
            self._taken = None if state is None else (best, state)
            for pair in team.pairs.all:
                pair.gradients = self._gradients(pair.model, pair.optimizer)[1]
        team.watch_clipping(self._exchange.divides)
        self._copies.keep()
        self._taken = None
        return best, state


class Aboard(Protocol):
    """What rides along with the updates of a training, so that no task is the only one to know."""

    def saw(self, output: Any, batch: Batch) -> None:
        """After the forward pass of a batch that this task has rows of."""
        ...

    def brings(self) -> Piggybacked:
        """Before an update: what is summed over the tasks; all call it."""
        ...

    def brought(self, total: Sequence[float]) -> None:
        """The sums; the update is certain now."""
        ...


class Standing(msgspec.Struct, frozen=True):
    """How far a task is, and whether it has the state of the training at all."""

    progress: tuple[int, ...]
    is_new: bool
    fit: int
    pairs: int


def chosen_recovery(
    given: Recovery | None, cluster: ClusterSpec, communication: str
) -> Recovery | None:
    """What a strategy does when a task is lost: as ``given``, else as the environment says.

    Raises `UserError` where no group can be left and made anew.
    """
    recovery = Recovery.from_environment() if given is None else given
    if recovery is None or cluster.world_size == 1:
        return None
    if communication in PROCESS_GROUP:
        raise UserError(
            f"recovery with communication={communication!r}",
            "torch's process groups end with a task: take 'auto' or 'sockets'.",
        )
    if recovery.min_workers is not None and recovery.min_workers > cluster.world_size:
        raise UserError(f"min_workers={recovery.min_workers} of {cluster.world_size} tasks")
    return recovery


class ElsewhereError(TaskLostError):
    """A task that came back is elsewhere in its script: nobody can go on with it."""


class ShardsLostError(TaskLostError):
    """A part of the newest state is nowhere any more."""


class Repeating:
    """Steps that can be made again, with the same numbers, by whoever has the data shard.

    What a forward pass draws depends on the seed, the batch, the data shard and the stage alone,
    and not on what this process drew before. What it changes in buffers can be put back.
    """

    def __init__(self, device: torch.device, stage: int = 0) -> None:
        self._undo: dict[int, Undo] = {}
        self._device, self._stage = device, stage

    def begin(self, pair: Pair, batch: Batch, shard: int) -> None:
        """Before a forward pass."""
        undo = self._undo.get(id(pair))
        if undo is None:
            undo = self._undo[id(pair)] = Undo(unwrap(pair.model))
        undo.begin(looks=batch.step == 0)
        if pair.randomness is None:
            text = b"%d %d %d %d %d" % (pair.seed, batch.epoch, batch.step, shard, self._stage)
            number = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
            seed_generators(self._device, number)

    def end(self, pair: Pair) -> None:
        """After an update."""
        if (undo := self._undo.get(id(pair))) is not None:
            undo.end()

    def undo(self, pair: Pair) -> None:
        """Forget the batches since the last update."""
        if (undo := self._undo.get(id(pair))) is not None:
            undo.undo()
        pair.gradients.clear()
        pair.passes, pair.saved = 0, None
        if pair.randomness is not None:
            pair.randomness.forget()


def share_state(
    group: Collective,
    pairs: Sequence[Pair],
    own: Standing,
    training: Callable[[], dict[str, Any]],
    has: Callable[[Pair], dict[str, Any]] | None = None,
    take: Callable[[Pair, dict[str, Any]], None] | None = None,
) -> tuple[Standing, dict[str, Any] | None]:
    """Give those who are new, or behind, the state of the first of those who are furthest.

    Args:
        group: All tasks, which call this together.
        pairs: The prepared models and optimizers.
        own: How far this task is.
        training: The state of everything else, of this task.
        has: What every task has of a pair; None: all of it.
        take: Takes what ``has`` returned elsewhere.

    Returns:
        How far all are now, and the state of everything else where this task took it over.

    Raises:
        TaskLostError: Another one is lost, or a new one cannot take part.
    """
    has, take = has or state_of, take or load_state
    texts = group.all_gather_bytes(msgspec.json.encode(own))
    all_ = [msgspec.json.decode(text, type=Standing) for text in texts]
    able = [rank for rank, each in enumerate(all_) if not each.is_new] or [0]
    source = max(able, key=lambda rank: (all_[rank].progress, -rank))
    best = all_[source]
    behind = [r for r, each in enumerate(all_) if each.is_new or each.progress < best.progress]
    _check(group, all_, best)
    if not behind:
        return best, None
    tree: Any = None
    tensors: dict[str, Tensor] = {}
    if group.rank == source or group.rank not in behind:
        tree, tensors = pack_state({"pairs": [has(pair) for pair in pairs], **training()})
        tensors = {name: to_host(tensor) for name, tensor in tensors.items()}
    kinds = {name: (list(t.shape), _name(t.dtype)) for name, t in tensors.items()}
    said = json.dumps([tree, kinds]).encode() if group.rank == source else b""
    tree, kinds = json.loads(group.all_gather_bytes(said)[source])
    into = [
        tensors[name]
        if group.rank == source or _is_equal(name, tensors, shape, dtype)
        else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in kinds.items()
    ]
    send(group, into, source)
    if group.rank not in behind:
        return best, None
    state = unpack_state(tree, dict(zip(kinds, into, strict=True)))
    for pair, saved in zip(pairs, state.pop("pairs"), strict=True):
        take(pair, saved)
    return best, state


def _check(group: Collective, all_: Sequence[Standing], best: Standing) -> None:
    """Raise `ElsewhereError` for tasks that are elsewhere in their script."""
    for name, each in zip(group.names, all_, strict=False):
        if (each.fit, each.pairs) != (best.fit, best.pairs):
            raise ElsewhereError(
                f"{name} came back in its fit number {each.fit} with {each.pairs} prepared models, "
                f"and the others are in number {best.fit} with {best.pairs}",
                "A task that is started again takes part where the first fit() runs.",
            )


def state_of(pair: Pair) -> dict[str, Any]:
    """All that a task needs to go on with a pair."""
    model = unwrap(pair.model)
    saved = dict(model.state_dict())
    return {
        "model": saved,
        "buffers": {name: each for name, each in model.named_buffers() if name not in saved},
        "learns": [name for name, each in model.named_parameters() if each.requires_grad],
        "in_eval": [name for name, each in model.named_modules() if not each.training],
        "optimizer": named_state(model, pair.optimizer),
        "loss_scale": pair.loss_scale.state_dict(),
    }


def _is_equal(name: str, own: Mapping[str, Tensor], shape: list[int], dtype: str) -> bool:
    """Whether our own tensor has the values that come, by which it then may be overwritten."""
    found = own.get(name)
    part = name.split(".")[2] if name.startswith("pairs.") else ""
    is_alike = found is not None and list(found.shape) == shape and _name(found.dtype) == dtype
    return is_alike and part == "optimizer"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_state(pair: Pair, saved: dict[str, Any], strict: bool = True) -> None:
    """Take what `state_of` returned elsewhere; not ``strict``: it may be of a part of the model."""
    model, learns = unwrap(pair.model), set(saved["learns"])
    model.load_state_dict(saved["model"], strict=strict)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in saved["buffers"].items():
            buffers[name].copy_(value)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (name in learns):
            parameter.requires_grad_(name in learns)
    for name, module in model.named_modules():
        module.training = name not in saved["in_eval"]
    load_named_state(model, pair.optimizer, saved["optimizer"])
    if scale := saved["loss_scale"]:
        pair.loss_scale.load_state_dict(scale)
