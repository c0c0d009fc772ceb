"""One model in a pipeline: what this task does with a batch of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spartito.collectives.collective import Collective
from spartito.data.batch import Batch
from spartito.data.reading.collate import rows
from spartito.engine.devices.host_reads import Number, added
from spartito.engine.devices.precision import autocast
from spartito.engine.gradients.backward import first_gradient
from spartito.engine.logged import of_rows
from spartito.engine.losses.loss import (
    LossFunction,
    WeightedLoss,
    evaluate_loss,
    forward,
    in_dtype,
    look,
    mapped,
    weigh,
    weigh_own,
)
from spartito.engine.losses.loss_graph import BeginAtLosses
from spartito.engine.modules.batchnorm import local_batchnorms
from spartito.engine.modules.batchnorm import takes_statistics as takes
from spartito.engine.modules.buffers import in_words, kept_buffers
from spartito.engine.modules.row_independence import check_rows
from spartito.engine.modules.trial_passes import untouched
from spartito.engine.randomness.global_randomness import RandomnessForbidden
from spartito.engine.randomness.keyed_draws import Draws
from spartito.engine.step_context import StepContext, current, within
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import UserError
from spartito.numeric import is_whole
from spartito.pipeline import schedules
from spartito.pipeline.messages import Messages
from spartito.pipeline.microbatches import divided, each_tensor, joined
from spartito.pipeline.model import PipedModel
from spartito.pipeline.program import Program, record
from spartito.pipeline.runtime import Microbatch, Root, pass_through
from spartito.pipeline.schedules import Order, Shape, Span
from spartito.pipeline.stage import Keys
from spartito.steps.placements.computation import no_gradient
from spartito.steps.prepared import Pair
from spartito.steps.task_end import told as cause


class _Looked(Exception):
    """A forward pass has shown what its model is called with."""


@dataclass
class StagePasses:
    """A prepared model, and the pipeline that computes it.

    Attributes:
        pair: The model with its optimizer.
        piped: Where its stages begin, and what is here.
        shape: Of the pipeline.
        position: Which of its tasks this is.
        schedule: The name of the order of a step.
        couple: Is called once it is known what this task has.
        device: Where it computes.
        unread: Read what was loaded before the model got its values.
        plan: Where stages begin and who keeps what, once a first batch has come.
        spans: When this task computed what in the last step.
    """

    pair: Pair
    piped: PipedModel
    shape: Shape
    position: int
    schedule: str
    couple: Callable[[Pair], None]
    device: torch.device
    unread: list[Callable[[], None]] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    spans: list[Span] = field(default_factory=list)
    _exact: Program | None = None  # what was looked at last, and not refused

    def read(self) -> None:
        """Read what was loaded before, if anything was."""
        unread, self.unread = self.unread, []
        for each in unread:
            each()

    def cut_up(self, batch: Batch) -> list[Batch]:
        """The microbatches of a batch; BatchNorm gets two rows where there are some."""
        count = self.shape.microbatches
        norms = local_batchnorms(self.pair.model) if count > 1 else ()
        least = 2 if any(norm.training for norm in norms) else 1
        return divided(in_dtype(batch, self.pair.dtype), count, least)

    def call(self, part: Batch, has_loss: bool, looks: bool = False) -> Callable[[], Any]:
        """What makes the forward pass of a microbatch; ``looks`` at a loss in it, if need be."""
        pair = self.pair

        def call() -> Any:
            begins = BeginAtLosses(part.size) if looks else nullcontext()
            reports = of_rows(part.size)
            with _uncompiled(), autocast(pair.precision, self.device), begins, reports:
                return forward(pair.model, part.data, has_loss)

        return call

    def planned(
        self, batch: Batch, has_loss: bool, split: str | Sequence[str], divides: bool
    ) -> bytes:
        """Where stages begin and who keeps what, or why that cannot be, as JSON.

        ``divides``: a pass has a part of a global batch, as of several microbatches.
        """
        try:
            with within(None):  # nothing in it draws for a batch
                if divides and self.pair.randomness is not None:
                    self._check_rows(in_dtype(batch, self.pair.dtype), has_loss)
                part = self.cut_up(batch)[0]
                starts, owners = self.piped.plan(self.call(part, has_loss), split)
        except UserError as error:
            what, _, do = str(error).partition("\n  ")
            return json.dumps({"error": [what, do]}).encode()
        found = [(start.path, start.call) for start in starts]
        return json.dumps({"starts": found, "owners": owners}).encode()

    def _check_rows(self, batch: Batch, has_loss: bool) -> None:
        """Refuse a model whose rows see each other, if it has values and is in train mode."""
        model = unwrap(self.pair.model)
        if not model.training or any(parameter.is_meta for parameter in model.parameters()):
            return

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hook.remove()
            check_rows(module, args, kwargs, batch.size)
            raise _Looked

        with untouched(model), suppress(_Looked):  # without the hook afterwards
            hook = model.register_forward_pre_hook(look, prepend=True, with_kwargs=True)
            self.call(batch, has_loss)()

    def train(
        self, batch: Batch, loss: LossFunction | None, divisor: float, messages: Messages
    ) -> tuple[Any, Number, Number]:
        """Forward and backward passes of a batch.

        Returns:
            Output, sum of losses and weight; those of the last stage, nothing in others.
        """
        parts, outputs, sums = self.cut_up(batch), [], Sums()
        randomness = self.pair.randomness
        drawn = randomness.made if randomness is not None else 0
        before = self._kept_of(loss)

        def finish(number: int, output: Any) -> Root:
            found = self._loss(loss, output, parts[number])
            self._check_loss(loss, before)
            if not found.value.requires_grad:
                raise no_gradient()
            self._tell(found)
            sums.add(found)
            outputs.append(rows(output, Tensor.detach))
            if not found.counts:
                return Root(found.value, None)
            return Root(found.value, first_gradient(found.value, found.scale / divisor))

        microbatches = self._microbatches(parts, loss is not None)
        if randomness is not None and self._exact is not microbatches[0].cut.program:
            self._check_exact(microbatches[0].cut.program)
        order = self._order(len(parts))
        self.spans = pass_through(order, microbatches, messages, finish)
        if randomness is not None:  # as of one forward pass
            randomness.made = drawn + sum(microbatches[0].cut.program.draws)
        return _whole(outputs, parts), sums.loss, sums.weight

    def look(
        self, batch: Batch, loss: LossFunction | None, has_loss: bool, messages: Messages
    ) -> tuple[Any, Sums, Any]:
        """Forward passes of a batch, and its loss where there is a function or the model's own.

        With the graphs of all layers where `Pair.looks_from_first` says so: all tasks go one way.

        Returns:
            Output (None but in the last stage), losses there, and what the output is like.
        """
        parts, outputs = self.cut_up(batch), []
        sums, is_own = Sums(), has_loss and loss is None
        from_first = is_own and bool(self.pair.looks_from_first)

        def finish(number: int, output: Any) -> None:
            outputs.append(mapped(output, Tensor.detach) if from_first else output)
            if has_loss:
                found = self._loss(loss, output, parts[number])
                sums.add(found)
                if not (found.is_guess and is_own and self.pair.looks_from_first is None):
                    self._tell(found)

        with torch.set_grad_enabled(from_first):
            microbatches = self._microbatches(parts, loss is not None, looks=is_own)
            shape = replace(self.shape, microbatches=len(parts))
            order = schedules.passing(shape, self.position)
            pass_through(order, microbatches, messages, finish)
        return _whole(outputs, parts), sums, microbatches[0].cut.program.output

    def tied_sums(
        self, grads: Mapping[str, Tensor | None], messages: Messages
    ) -> Iterator[tuple[str, Tensor]]:
        """The sums of gradients of parameters that several tasks have, by the parameter's name."""
        parameters = dict(self.piped.model.named_parameters())
        for number, (name, stages) in enumerate(self.piped.tied().items()):
            parameter, grad = parameters[name], grads.get(name)
            if parameter.is_meta or len({stage % self.shape.tasks for stage in stages}) == 1:
                continue
            # Whether there is one anywhere is told by the host, which does not wait for a device.
            has, own = torch.tensor([int(grad is not None)]), parameter.new_zeros(parameter.shape)
            some, total = messages.add(
                [has, own if grad is None else own.copy_(grad)], number, stages
            )
            if some[0]:
                yield name, total

    def counts(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Whether each counts here; what several stages use counts in the first."""
        if self.piped.starts is None:
            return [True] * len(parameters)
        names = {id(p): name for name, p in self.piped.model.named_parameters()}
        return [self.piped.stages_of(names[id(p)])[0] in self.piped.own for p in parameters]

    def timeline(self) -> list[list[Any]]:
        """The last step: kind, stage, microbatch, begin and end of each action, in seconds."""
        found = [(span.action, span.start, span.end) for span in self.spans]
        return [[a.kind, a.stage, a.microbatch, start, end] for a, start, end in found]

    def _check_exact(self, program: Program) -> None:
        """Refuse what looks at a whole batch, or follows it: parts make other numbers."""
        model, count, context = self.piped.model, self.shape.microbatches, current()
        shards = 1 if context is None else context.collective.world_size
        norms = (name for name, each in model.named_modules() if each.training and takes(each))
        name = next(norms, None)
        what = "" if name is None else f"the norm {name!r}"
        if not what and count > 1:
            changed = program.changed | kept_buffers(model).intersection(program.set)
            what = f"{in_words(changed)} that the forward pass changes" if changed else ""
        if what and max(count, shards) > 1:
            part = f"{count} microbatches at a time" if count > 1 else f"{shards} data shards"
            first = "Leave" if shards > 1 else "Set microbatches=1, leave"
            raise UserError(
                f"deterministic training under pipeline with {what}: it sees one of {part}",
                f"{first} deterministic out, or choose mirrored or mesh.",
            )
        self._exact = program

    def _kept_of(self, loss: LossFunction | None) -> dict[str, Tensor]:
        """What is in the buffers of a loss that sees a part of a batch, where that counts."""
        is_exact = self.pair.randomness is not None and self.shape.microbatches > 1
        if not is_exact or not isinstance(loss, nn.Module):
            return {}
        kept = kept_buffers(loss)
        return {name: each.clone() for name, each in loss.named_buffers() if name in kept}

    def _check_loss(self, loss: LossFunction | None, before: dict[str, Tensor]) -> None:
        """Refuse a loss that gathers what it sees; others wait for what comes of it."""
        now = dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {}
        changed = [name for name, each in before.items() if not torch.equal(each, now[name])]
        if changed:
            raise UserError(
                f"deterministic training under pipeline with {in_words(changed)} of the loss "
                f"{type(loss).__name__}, which it changes: it sees one of "
                f"{self.shape.microbatches} microbatches at a time",
                "Set microbatches=1, leave deterministic out, or choose mirrored or mesh.",
            )

    def _order(self, count: int) -> Order:
        shape = replace(self.shape, microbatches=count)
        return schedules.orders(self.schedule, shape)[self.position]

    def _loss(self, loss: LossFunction | None, output: Any, part: Batch) -> WeightedLoss:
        is_exact = self.pair.randomness is not None
        trains = torch.is_grad_enabled()
        with autocast(self.pair.precision, self.device), of_rows(part.size):
            if loss is None:
                found = weigh_own(output, part)
            elif not trains:
                found = look(loss, output, part)
            else:
                with RandomnessForbidden() if is_exact and trains else nullcontext():
                    given = evaluate_loss(loss, output, part)
                found = weigh(given, part)
            return self.pair.comparisons.look(loss, output, part, found)

    def _tell(self, found: WeightedLoss) -> None:
        if found.doubt:
            self.pair.comparisons.tell(found.doubt, self.pair.randomness is not None)

    def _microbatches(
        self, parts: Sequence[Batch], has_loss: bool, looks: bool = False
    ) -> list[Microbatch]:
        settings, randomness, context = self.piped.settings(), self.pair.randomness, current()
        made = []
        for part in parts:
            call = self.call(part, has_loss, looks)
            with within(None):  # nothing in it draws for a batch
                cut = self.piped.cut(call, part.data, settings, has_loss, looks)
            keys = None
            if context is not None and randomness is not None:
                keys = Keys(partial(_context_of, part, context), randomness.skip)
            made.append(Microbatch(cut, call, keys))
        return made


def told(group: Collective, output: Any, like: Any, source: int, device: torch.device) -> Any:
    """The output of one task of a group, on all of them.

    Args:
        group: The tasks.
        output: That of task ``source``, None on others.
        like: The same without values.
        source: Who has it.
        device: Where it is to be.
    """
    if group.world_size == 1:
        return output

    def tell(tensor: Tensor) -> Tensor:
        mine = (
            torch.empty(0, device=device)
            if output is None
            else tensor.reshape(tensor.shape or (1,)).to(device)
        )
        found = group.all_gather_rows(mine)[source]
        return found if tensor.dim() else found[0]

    return each_tensor(like if output is None else output, tell)


def told_bytes(group: Collective, parts: list[bytes], source: int) -> list[bytes]:
    """What task ``source`` has of ``parts``, on all tasks of a group."""
    own = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    whole, found, at = group.all_gather_bytes(own)[source], [], 0
    while at < len(whole):
        size = int.from_bytes(whole[at : at + 8], "big")
        found.append(whole[at + 8 : at + 8 + size])
        at += 8 + size
    return found


@contextmanager
def telling(messages: Messages, task: object) -> Iterator[None]:
    """A block of ``task`` whose error is told to those who wait for its messages."""
    try:
        yield
    except Exception as error:
        if what := cause(error):
            messages.leave(str(task), what)
        raise


def check_options(stages: object, microbatches: object, split: object) -> None:
    """Refuse what is no number above 0: options come from JSON, where anything may stand."""
    given = {"stages": stages, "microbatches": microbatches}
    for name, value in given.items():
        number = is_whole(value) and value > 0
        if not (number or (name == "stages" and value is None)):
            raise UserError(f"{name}={value!r}", "It is a whole number above 0.")
    if isinstance(split, str):
        if split != "auto":
            raise UserError(f"split={split!r}", "Give 'auto', or a list of modules: ['blocks.2'].")
    elif not (isinstance(split, Sequence) and all(isinstance(path, str) for path in split)):
        raise UserError(f"split={split!r}", "Give 'auto', or a list of modules: ['blocks.2'].")


def draws(model: nn.Module, *args: Any, device: torch.device, **kwargs: Any) -> Draws:
    """What a forward pass draws at random; nothing is computed."""
    return record(model, lambda: model(*args, **kwargs), device).drawn


def _uncompiled() -> AbstractContextManager[None]:
    """A block in which compiled functions run as written; nothing where torch has no compiler."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # to ask it would import it
        return nullcontext()
    made: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return made


class Sums:
    """Losses and weights of microbatches, and whether one is a guess (`WeightedLoss`)."""

    def __init__(self) -> None:
        self.loss: Number = 0.0
        self.weight: Number = 0.0
        self.is_guess = False

    @torch.no_grad()
    def add(self, found: WeightedLoss) -> None:
        """Those of one more."""
        self.loss = added(self.loss, found.total)
        self.weight = added(self.weight, found.weight)
        self.is_guess |= found.is_guess


def _whole(outputs: Sequence[Any], parts: Sequence[Batch]) -> Any:
    return joined(outputs, [part.size for part in parts]) if outputs else None


def _context_of(part: Batch, context: StepContext) -> StepContext:
    """That of a pass with the rows of ``part`` of the global batch."""
    return replace(context, offsets=part.offsets, calls=0, drawn={})


def nothing(output: Any, target: Any) -> Any:
    """Stands for a loss that nobody computes."""
