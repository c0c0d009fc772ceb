"""A user's model in a pipeline: where its stages begin, and what this task keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from spartito.engine.gradients.gradient_sum import same
from spartito.engine.logged import listening
from spartito.engine.modules.absent_values import RefusingAbsent
from spartito.engine.updates.optimizers import DIVIDED
from spartito.errors import UserError
from spartito.mesh.showing_modules import is_inside, is_saving, saving
from spartito.notes import warn
from spartito.pipeline.branches import goes
from spartito.pipeline.cut import Cut
from spartito.pipeline.kept_state import settings_of
from spartito.pipeline.program import record
from spartito.pipeline.split import Start, balanced, named

Owners = dict[str, list[int]]
"""The stages that use each parameter and buffer, by its name."""
MOST_CUTS = 64
"""Shapes of microbatches whose operations are kept, and ways that the model takes with each."""


class PipedModel:
    """The model of one task, of which it keeps the parameters of its own stages.

    Args:
        model: The user's.
        stages: How many the model is cut into.
        own: Those of this task.
        device: Where this computes.
    """

    def __init__(
        self, model: nn.Module, stages: int, own: Collection[int], device: torch.device
    ) -> None:
        self.model, self.stages, self.own, self.device = model, stages, own, device
        self.starts: list[Start] | None = None
        self.owners: Owners = {}
        self.names: list[list[str]] = []
        """Those of the optimizer's parameters, group by group, as the user gave them."""
        self._cuts: dict[Any, list[Cut]] = {}
        self._settings: dict[tuple[Any, ...], int] = {}
        self._is_told = False
        self._buffers: set[str] = set()
        self._here: dict[str, nn.Parameter] = {}
        self._given: list[list[nn.Parameter]] = []  # what the optimizer has here, by group
        self.order: list[str] = []
        """The names in the model's ``state_dict()``, those of all tasks."""

    def plan(
        self, call: Callable[[], Any], split: str | Sequence[str]
    ) -> tuple[list[Start], Owners]:
        """Decide where the stages begin.

        Args:
            call: Makes a forward pass.
            split: "auto", or the modules with which stages begin.

        Returns:
            The starts, and which stages use each parameter and buffer.

        Raises:
            UserError: The model cannot be split so.
        """
        if self.stages == 1:
            return [], {}
        program = record(self.model, call, self.device)
        if isinstance(split, str):
            there = not any(parameter.is_meta for parameter in self.model.parameters())
            with listening(None):  # of trials
                starts = balanced(program, self.model, self.stages, call if there else None)
        else:
            starts = named(program, self.model, split, self.stages)
        cut = Cut(program, tuple(start.index(program) for start in starts))
        return starts, cut.owners({**program.parameters, **program.buffers})

    def divide(self, starts: list[Start], owners: Owners, optimizer: Optimizer) -> None:
        """Let go of what other tasks keep.

        Args:
            starts: Where stages begin.
            owners: What `plan` returned.
            optimizer: It loses the parameters that are not here any more.
        """
        self.starts, self.owners = starts, owners
        with saving():
            self.order = list(self.model.state_dict())
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in optimizer.param_groups:
            self.names.append([names[id(parameter)] for parameter in group["params"]])
            kept = [p for p in group["params"] if self.keeps(names[id(p)])]
            group["params"] = kept
        for parameter in [p for p in optimizer.state if not self.keeps(names[id(p)])]:
            del optimizer.state[parameter]
        empty: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for key, own in list(module._parameters.items()):
                if own is None or self.keeps(names[id(own)]):
                    continue
                if id(own) not in empty:
                    made = torch.empty_like(own, device="meta")
                    empty[id(own)] = nn.Parameter(made, own.requires_grad)
                    if not own.is_meta:  # who has it still is not to go on with old values
                        own.data = own.data.new_empty(0)
                module._parameters[key] = empty[id(own)]
            if isinstance(module, nn.RNNBase):  # it has a list of them too
                module._init_flat_weights()
        for module in self.model.modules() if len(self.own) < self.stages else ():
            vars(module)[DIVIDED] = id(optimizer)
        if len(self.own) < self.stages:
            self.model.register_forward_pre_hook(_refuse_alone)
        self._buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self.model._register_state_dict_hook(self._leave_out)
        self._here = dict(self.model.named_parameters())
        self._given = [list(group["params"]) for group in optimizer.param_groups]

    def forget_cuts(self) -> None:
        """Record operations anew: what stages know of each other's tensors is forgotten too."""
        self._cuts.clear()
        self._settings.clear()

    def check_unchanged(self, optimizer: Optimizer) -> None:
        """Refuse other parameters than those that were divided; one may freeze and unfreeze them.

        Args:
            optimizer: That of `divide`.

        Raises:
            UserError: Model or optimizer have others.
        """
        if self.starts is None:
            return
        groups, here = [group["params"] for group in optimizer.param_groups], self._here
        if not same(list(self.model.parameters()), [*here.values()]):
            what, before, now = "model", [*here.values()], [*self.model.parameters()]
        elif len(groups) != len(self._given) or not all(map(same, groups, self._given)):
            what, before, now = "optimizer", [*chain(*self._given)], [*chain(*groups)]
        else:
            return
        differ = {id(p) for p in before} ^ {id(p) for p in now}
        named = [*here.items(), *self.model.named_parameters()]
        names = sorted({name for name, parameter in named if id(parameter) in differ})
        raise UserError(
            f"other parameters in the {what} than those that the pipeline has divided: "
            + (", ".join(names) or "the same in other groups"),
            "Change them before the first batch, or choose mirrored. They may be frozen and "
            "unfrozen (requires_grad) between two batches.",
        )

    def _leave_out(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """From the model's ``state_dict()`` what other tasks keep."""
        if RefusingAbsent.active and not is_saving() and len(self.own) < self.stages:
            raise UserError(
                f"state_dict() of a {type(self.model).__name__} in a callback under pipeline, "
                "where each task has a part of it",
                "Take strategy.state_dict()['model'] or trainer.save_weights(path), which all "
                "tasks call; an average of the model needs mirrored or sharded.",
            )
        for key in [key for key in state if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            value = state[key]
            if self.is_foreign(name) or (isinstance(value, Tensor) and value.is_meta):
                del state[key]

    def is_foreign(self, name: str) -> bool:
        """Whether a buffer here is not the one that counts."""
        return name in self._buffers and name in self.owners and not self.keeps(name)

    def keeps(self, name: str) -> bool:
        """Whether this task has a parameter, or the buffer that counts."""
        return not self.starts or any(stage in self.own for stage in self.stages_of(name))

    def stages_of(self, name: str) -> list[int]:
        """The stages that use a parameter; one that nobody uses is kept by the first."""
        return self.owners.get(name, [0])

    def tied(self) -> dict[str, list[int]]:
        """Parameters that several stages use: their gradients are summed."""
        return {
            name: self.owners[name]
            for name, _ in self.model.named_parameters()
            if len(self.owners.get(name, ())) > 1
        }

    def cut(self, call: Callable[[], Any], data: Any, *about: object) -> Cut:
        """The operations of a forward pass with ``data``, and where its stages begin.

        Args:
            call: Makes the pass.
            data: What the model gets.
            *about: More on which the operations depend.

        Returns:
            It is recorded once for all data of the same shapes, and anew where the model looks at
            its input and goes another way.

        Raises:
            UserError: A stage would use parameters that another task keeps.
        """
        leaves, form = tree_flatten(data)
        shapes = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        )
        key = (str(form), str(shapes), torch.is_grad_enabled(), about)
        for cut in self._cuts.get(key, ()):
            if goes(cut.program, self.model, call):
                return cut
        if sum(map(len, self._cuts.values())) >= MOST_CUTS:
            self._cuts.clear()
        cut = self._recorded(call)
        self._cuts.setdefault(key, []).append(cut)
        return cut

    def settings(self) -> int:
        """A number of what the model is like, the same where it is like that again."""
        found = settings_of(self.model)
        number = self._settings.get(found)
        if number is not None:
            return number
        if len(self._settings) >= MOST_CUTS:
            self.forget_cuts()
            if not self._is_told:
                self._is_told = True
                warn(
                    "the modules of the model have held other numbers %d times: each time its "
                    "operations are recorded anew, which takes as long as some steps. One that "
                    "changes often costs nothing as a buffer: register_buffer, buffer.fill_(value)",
                    MOST_CUTS,
                )
        return self._settings.setdefault(found, len(self._settings))

    def _recorded(self, call: Callable[[], Any]) -> Cut:
        program = record(self.model, call, self.device)
        starts = self.starts or []
        cut = Cut(program, tuple(start.index(program) for start in starts))
        cut.check_buffers()
        if program.set and len(self.own) > 1:
            raise UserError(
                f"the forward pass sets the buffer {program.set[0]!r}, once for each of the "
                f"{len(self.own)} stages of a task",
                "Change its elements in place, or take another schedule than interleaved.",
            )
        for name, stages in cut.owners(program.buffers).items():
            if name in program.changed:
                self.owners.setdefault(name, stages)
        for name, stages in cut.owners(program.parameters).items():
            strange = [stage for stage in stages if starts and stage not in self.stages_of(name)]
            if strange:
                raise UserError(
                    f"stage {strange[0]} uses {name!r}, which it did not in the first batch",
                    "Let the first batch go the way of all others, or split elsewhere by "
                    "split=[...].",
                )
        return cut


def _refuse_alone(model: nn.Module, _: Any) -> None:
    """A call of a script's own would compute with what other tasks have."""
    if not is_inside():
        raise UserError(
            f"{type(model).__name__} was called by itself under pipeline, where each task has a "
            "part of it",
            "Call trainer.predict(data) on all tasks; or trainer.save_weights(path) on all, and "
            "sp.load_model(path, model) in a script of one task.",
        )
