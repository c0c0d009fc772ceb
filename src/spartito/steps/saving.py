"""How replicas save and load model and optimizer: each its own part, whole ones or cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from spartito.checkpoint.boxes import Cut
from spartito.checkpoint.plan import Local
from spartito.checkpoint.saved import Saved
from spartito.checkpoint.saving import (
    Copies,
    Tasks,
    Unwritten,
    gather_together,
    save_together,
)
from spartito.engine.optimizers import NoOptimizer, load_named_state, named_state, unwrap
from spartito.errors import UserError
from spartito.steps.base import Step
from spartito.steps.pair import Pair
from spartito.steps.states import (
    load_model,
    names_here,
    saved_gradients,
    saved_optimizer,
    take_apart,
)


class SavingStep(Step):
    """A strategy whose tasks have model and optimizer in their own memory, or parts of them.

    Which parts, `_cuts` says; `spartito.checkpoint.parts` tells how.
    """

    def save(self, directory: Path, later: bool = False) -> Unwritten:
        pair = self._pairs.meant("save()")
        apart = partial(self._apart, pair, self._state(pair))
        return save_together(
            Path(directory), apart, self._tasks, self._kept_copies if later else None
        )

    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        self._pairs.meant("load()")
        if isinstance(source, str | Path):
            self._load(Saved.at(Path(source)))
            return
        if "model" not in source:
            raise UserError(
                f"a state with {', '.join(map(repr, [*source][:3])) or 'nothing'}, and no 'model'",
                'Give what state_dict() returned, or {"model": model.state_dict()}.',
            )
        self._load(Saved.of(source))

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer under the user's names, equal on all replicas; all call it."""
        pair = self._pairs.meant("state_dict()")
        state = self._state(pair)
        if not self._is_divided(pair):
            return state
        return gather_together(partial(self._apart, pair, state), self._tasks)

    def _apart(self, pair: Pair, state: dict[str, Any]) -> dict[str, Local]:
        return take_apart(state, partial(self._cuts, pair))

    @cached_property
    def _kept_copies(self) -> Copies:
        return Copies()

    @property
    def _tasks(self) -> Tasks:
        return Tasks(self.coordination.attempt, self.groups.world, self.is_chief)

    def _state(self, pair: Pair) -> dict[str, Any]:
        """This task's own part of model and optimizer, under the user's names."""
        self.synchronize()
        model = unwrap(pair.model)
        state = {
            "model": dict(model.state_dict()),
            "optimizer": named_state(model, pair.optimizer),
        }
        if scale := pair.loss_scale.state_dict():
            state["loss_scale"] = scale
        return {**state, "accumulated": pair.accumulated()} if pair.passes else state

    def _cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        """What this task has a part of only, by the user's names: see `spartito.checkpoint.parts`.

        ``section`` is "model", "optimizer" or "accumulated".
        """
        return {}

    def _is_divided(self, pair: Pair) -> bool:
        """Whether tasks have parts of the state, or some of its tensors; equal on all of them."""
        return any(self._cuts(pair, section) for section in ("model", "optimizer"))

    def _with_state(self, pair: Pair) -> set[str]:
        """The names of the parameters whose state of the optimizer this task keeps, or a part."""
        named = unwrap(pair.model).named_parameters()
        return {name for name, parameter in named if not parameter.is_meta}

    def _load(self, saved: Saved) -> None:
        """Take back one's own part of what any strategy has saved."""
        pair, attempt = self._pairs.only, self.coordination.attempt
        model = unwrap(pair.model)
        all_ = {name for names in attempt(lambda: names_here(model)) for name in json.loads(names)}

        def load() -> str:
            load_model(model, saved, self._cuts(pair, "model"), all_)
            pair.gradients.compared()
            if "optimizer" in saved:  # all of a training: what waits is of another one
                self._load_training(pair, saved, all_)
            return ""

        attempt(load)

    def _load_training(self, pair: Pair, saved: Saved, all_: set[str]) -> None:
        """What is beside the model; ``all_`` are the names of all tasks."""
        model = unwrap(pair.model)
        own = {name for name, each in model.named_parameters() if not each.is_meta}
        pair.gradients.clear()
        pair.passes, pair.saved = 0, None
        if "accumulated" in saved:
            pair.saved = saved_gradients(saved, own, self._cuts(pair, "accumulated"))
        if "loss_scale" in saved and (scale := saved.whole("loss_scale")):
            pair.loss_scale.load_state_dict(scale)
        if not isinstance(pair.optimizer, NoOptimizer):
            cuts = self._cuts(pair, "optimizer")
            found = saved_optimizer(saved, self._with_state(pair), all_, cuts)
            load_named_state(model, pair.optimizer, found)
