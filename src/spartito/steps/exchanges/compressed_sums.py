"""How an exchange sends the sums of gradients that leave a machine, and what a checkpoint keeps."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from spartito.checkpoint.saved_state import Saved, whole
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.staged import on_host
from spartito.engine.gradients import compression
from spartito.engine.gradients.compression import Compress, Compression, make_compression
from spartito.engine.gradients.gradient_sum import PackedGradients
from spartito.engine.updates.optimizers import optimizer_parameters, unwrap
from spartito.errors import UserError
from spartito.notes import warn
from spartito.steps.parts import Settings, State
from spartito.steps.prepared import Pair
from spartito.steps.team import Team
from spartito.storage.tensors import unpack_state

SECTION = "compression"
"""Of a checkpoint: what was left out so far, by the first rank of those who sum."""


class CompressedSums:
    """What a strategy's ``compress`` does.

    Args:
        team: The replicas.
        compress: As `spartito.engine.gradients.compression.choose` takes it.

    Raises:
        UserError: For a compression that cannot be.
    """

    def __init__(self, team: Team, compress: Compress) -> None:
        if compress is not None and team.recovery is not None:
            raise UserError(
                f"compress={compress!r} with recovery: what was left out of a lost task's "
                "gradients would be lost",
                "Leave one of them out.",
            )
        self._team, self._compress = team, compress
        self._way = compression.choose(compress)
        self._unread: dict[int, dict[str, Any]] = {}  # by the id of the optimizer

    @property
    def are_exact(self) -> bool:
        """Whether sums are sent as they are, as far as this task can tell before it has met any."""
        return self._way is None

    def check(self, settings: Settings) -> None:
        """Refuse settings under which nothing may be rounded, or left out.

        Args:
            settings: What was asked for.

        Raises:
            UserError: It says what, and what to do.
        """
        if self._way is None:
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

    def made(self, model: nn.Module, optimizer: Optimizer) -> Compression | None:
        """A new compression for those who have met; None where no sum of theirs leaves a machine.

        Then it is left out, and the chief says so.

        Args:
            model: With whatever wraps it.
            optimizer: Whose gradients are summed.
        """
        if self._way is None:
            return None
        group = self._team.replicas
        if group.world_size > 1 and not isinstance(on_host(group), SharedMemoryCollective):
            found, state = make_compression(self._way), self._unread.pop(id(optimizer), None)
            if state is not None:
                found.load_state_dict(state, learning(model, optimizer), group)
            return found
        if self._team.is_chief:
            warn(
                "compress=%r: no sum of gradients leaves this machine, so it is left out",
                self._compress,
            )
        return None

    def save(self, pair: Pair, found: State) -> State:
        """``found``, with what was left out so far.

        Args:
            pair: A prepared one; all tasks call it.
            found: What is saved of it beside.
        """
        gradients, group = pair.gradients, self._team.replicas
        if self._way is None or not isinstance(gradients, PackedGradients):
            return found
        kept = gradients.compression.state_dict(learning(pair.model, pair.optimizer), group)
        return {**found, SECTION: {str(group.ranks[0]): kept}} if kept else found

    def load(self, pair: Pair, saved: Saved) -> None:
        """Go on with what was left out when a state was saved, if it is that of a training.

        Args:
            pair: A prepared one; all tasks call it.
            saved: By any strategy.
        """
        gradients, group = pair.gradients, self._team.replicas
        if self._way is None or "optimizer" not in saved:
            return
        tree = saved.tree(SECTION) if SECTION in saved else {}
        own = tree.get(str(group.ranks[0]))
        state = {} if own is None else unpack_state(own, whole(saved.tensors(SECTION)))
        if isinstance(gradients, PackedGradients):
            named = learning(pair.model, pair.optimizer)
            gradients.compression.load_state_dict(state, named, group)
        else:  # of a pipeline, whose stages are divided when the first batch comes
            self._unread[id(pair.optimizer)] = state


def learning(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that learn here, by the user's names.

    Args:
        model: With whatever wraps it.
        optimizer: Which has them.
    """
    learn = {id(each) for each in optimizer_parameters(optimizer) if each.requires_grad}
    return {name: p for name, p in unwrap(model).named_parameters() if id(p) in learn}
