"""Pipelines: each task computes some layers, and microbatches pass from one to the next."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spartito.checkpoint.boxes import Cut
from spartito.checkpoint.saved import Saved
from spartito.checkpoint.saving import gather_together
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.shared_memory import SharedMemoryCollective
from spartito.data.batch import Batch
from spartito.data.collate import rows
from spartito.engine.batchnorm import has_batchnorm
from spartito.engine.gradients import Gradients, LocalGradients
from spartito.engine.loss import LossFunction
from spartito.engine.memory import give_back_memory
from spartito.engine.optimizers import OptimizerLike, unwrap
from spartito.engine.unmade import is_unmade, make_buffers, make_parameters
from spartito.errors import UserError
from spartito.log import note
from spartito.mesh.axes import PIPELINE, Mesh
from spartito.mesh.layout import DEFAULT, Layout
from spartito.pipeline import schedules
from spartito.pipeline.messages import Messages
from spartito.pipeline.model import PipedModel
from spartito.pipeline.schedules import Shape
from spartito.pipeline.split import Start
from spartito.steps.distributed import StepResult
from spartito.steps.links import Links, axes_of
from spartito.steps.mesh import AXIS, LAYERS, MeshStep
from spartito.steps.outer import Outer
from spartito.steps.pair import Pair
from spartito.steps.pipe import (
    Pipe,
    check_options,
    draws,
    nothing,
    telling,
    told,
    told_bytes,
)
from spartito.steps.piping import CollectedByPipeline, PipelineCoordination
from spartito.steps.replica import _of_spare_rows, _tensors
from spartito.steps.sharding import BLOCK
from spartito.steps.shards import SHARDS
from spartito.steps.sharing import Placed


class PipelineStep(MeshStep):
    """What a task does of each step under `PipelineStrategy`."""

    name = "pipeline"

    def __init__(
        self,
        *,
        stages: int | None = None,
        microbatches: int = 8,
        schedule: str = "1f1b",
        split: str | Sequence[str] = "auto",
        stages_per_task: int | None = None,
        mesh: Mapping[str, int] | None = None,
        layout: Any = DEFAULT,
        names: Mapping[str, Sequence[str | None]] | None = None,
        strict: bool = False,
        zero: int = 0,
        block_bytes: int = BLOCK,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        communication: str = "auto",
        flush_denormals: bool = True,
        outer: Outer | None = None,
    ) -> None:
        interleaves = schedule == "interleaved"
        self._per_task = (2 if interleaves else 1) if stages_per_task is None else stages_per_task
        self._stages, self._schedule, self._split = stages, schedule, split
        self._microbatches = microbatches
        check_options(stages, microbatches, self._per_task, split)
        schedules.check(schedule, self._per_task)
        if communication == "ddp":
            raise UserError(
                "communication='ddp' in a pipeline", "DDP wraps whole models: take 'auto'."
            )
        super().__init__(
            mesh,
            layout,
            names,
            strict,
            zero=zero,
            block_bytes=block_bytes,
            cluster=cluster,
            device=device,
            sync_batchnorm=False,
            timeout=timeout,
            communication=communication,
            flush_denormals=flush_denormals,
            outer=outer,
        )
        if self.device.type != "cpu":
            raise UserError(
                f"a pipeline on {self.device}: its messages are for CPUs so far",
                "Take device='cpu', or mirrored on GPUs.",
            )
        tasks = self.mesh.axes[PIPELINE]
        self._position = tasks - 1 - self.mesh.coordinates(self.tasks.rank)[PIPELINE]
        self._shape = Shape(tasks, self._per_task, microbatches)
        self._own = range(self._position, self._shape.stages, tasks)
        self._pipes: dict[int, Pipe] = {}
        weakref.finalize(self, Links.close, self._links)
        self._timelines: list[dict[str, Any]] = []  # what the first pipeline's tasks did when
        self.coordination = PipelineCoordination(self)

    # Who is where

    def _layout_for(self, tasks: int) -> tuple[Mesh, Layout]:
        given, _, rules = self._asked
        mesh = axes_of(given, self._stages, self._per_task, tasks)
        if self.is_evaluator:  # alone: it has the whole model
            mesh = Mesh(dict.fromkeys(mesh.axes, 1))
        kept = [rule for rule in rules if rules != DEFAULT or rule[1] in mesh.axes]
        return mesh, Layout(tuple(kept), {a: n for a, n in mesh.axes.items() if a != PIPELINE})

    @cached_property
    def _links(self) -> Links:
        return Links(self.mesh, self.layout.batch_axis, self._per_task)

    @property
    def connect(self) -> Callable[..., Mapping[str, Collective]]:  # type: ignore[override]
        return self._sharing(self._links.connect)

    @property
    def _line(self) -> Collective:
        """The tasks of this one's pipeline."""
        return self.groups[AXIS + PIPELINE]

    def close(self) -> None:
        self._links.close()
        super().close()

    # Preparation

    def prepare(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        deterministic: bool = False,
        seed: int = 0,
    ) -> tuple[nn.Module, Optimizer]:
        if precision.startswith(("fp16", "16")):
            raise UserError(
                "precision='fp16' in a pipeline: a stage would not hear of another's overflow",
                "Take 'bf16', which needs no loss scale.",
            )
        found = super().prepare(
            unwrap(model),
            optimizer,
            accumulate=accumulate,
            clip_norm=clip_norm,
            precision=precision,
            deterministic=deterministic,
            seed=seed,
        )
        pair = self._pairs.all[-1]
        piped = PipedModel(found[0], self._shape.stages, self._own)
        pipe = Pipe(pair, piped, self._shape, self._position, self._schedule)
        self._pipes[id(found[1])] = pipe
        if pair.randomness is not None:
            pair.randomness.look = partial(draws, piped.model)
        if self.is_chief and has_batchnorm(found[0]) and self._microbatches > 1:
            note(
                "BatchNorm sees one microbatch at a time: numbers are those of %d small batches "
                "that are accumulated, not of the whole batch",
                self._microbatches * self.num_replicas_in_sync,
            )
        return found

    def _settle(self, model: nn.Module) -> None:
        """That is done when it is known what this task has."""

    def _lay_out(self, model: nn.Module) -> None:
        if self.groups[LAYERS].world_size > 1:
            super()._lay_out(model)  # shards of all stages, until the first batch
        else:
            make_buffers(model)

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        self._cut_state(unwrap(model), optimizer)
        return model, LocalGradients(optimizer)  # until it is known which parameters stay here

    def _ready(self, pair: Pair, batch: Batch, has_loss: bool) -> Pipe:
        """Divide the model when the first batch comes: the chief decides, all tasks call it."""
        pipe = self._pipes[id(pair.optimizer)]
        if pipe.piped.starts is None:
            with self.coordination.during("prepare"):
                self._divide(pipe, batch, has_loss)
                super()._couple(pair)
            give_back_memory()  # there was all of the model, and gradients of all of it
            if pipe.unread is not None:
                saved, pipe.unread = pipe.unread, None
                with self._pairs.using(pair.optimizer):
                    super()._load(saved)
            elif pipe.of_groups is not None:
                super()._load_outer(pair, pipe.of_groups)
            pipe.of_groups = None
        return pipe

    def _couple(self, pair: Pair) -> None:
        """That is done when it is known what this task has."""

    def _divide(self, pipe: Pipe, batch: Batch, has_loss: bool) -> None:
        """Keep what is this task's."""
        text, piped, pair = b"", pipe.piped, pipe.pair
        if self.is_chief or 0 in self.groups[LAYERS].ranks:
            text = pipe.planned(_of_spare_rows(batch), has_loss, self._split)
        plan = json.loads(self.groups.world.all_gather_bytes(text)[0])
        if "error" in plan:
            raise UserError(*plan["error"])
        starts = [Start(path, call) for path, call in plan["starts"]]
        parameters = dict(pair.model.named_parameters())
        waiting = {name: parameter.grad for name, parameter in parameters.items()}
        piped.divide(starts, plan["owners"], pair.optimizer)
        make_parameters(pair.model, parameters.items(), self.groups.world, piped.keeps)
        pair.shared = _tensors(piped.model)  # those of others are let go of
        if self._has_shards:
            if self._zero == 3 and not isinstance(self.groups[SHARDS], SharedMemoryCollective):
                raise UserError(
                    "zero=3 in a pipeline whose data shards share no memory",
                    "Take zero=2, or zero=1: a stage has its parameters at hand.",
                )
            super()._settle(pair.model)
        before, made = pair.gradients, super()._gradients(pair.model, pair.optimizer)
        pair.gradients = made[1]
        pair.gradients.go_on(before)
        for name, grad in waiting.items():  # of a checkpoint between the batches of an update
            first = piped.stages_of(name)[0] in self._own  # what is tied counts once
            parameters[name].grad = grad if first else None
        if self.is_chief and starts:
            begins = ", ".join(start.path for start in starts)
            note("%d stages, which begin with the input, %s", piped.stages, begins)

    def _make_all(self, pair: Pair) -> None:
        """What is asked for before the first batch, all tasks have."""
        model, pipe = unwrap(pair.model), self._pipes[id(pair.optimizer)]
        if pipe.piped.starts is None and is_unmade(model):
            make_parameters(model, model.named_parameters(), self.groups.world)
            pair.gradients = self._gradients(model, pair.optimizer)[1]
            if pipe.unread is not None:
                saved, pipe.unread = pipe.unread, None
                super()._load(saved)

    # A batch

    def enter(self, batch: Batch) -> None:
        """As of all strategies; what has been divided is to stay the same.

        Args:
            batch: The batch that is computed next.

        Raises:
            UserError: Parameters came to the model or the optimizer, or went.
        """
        for pair in self._pairs.in_use:
            self._pipes[id(pair.optimizer)].piped.check_unchanged(pair.optimizer)
        super().enter(batch)

    def _compute(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        if self._entered is not batch:
            self.enter(batch)
        self._entered = None
        pipe = self._ready(pair, batch, loss is not None)
        divisor = pair.gradients.begin(self._loss_divisor(batch))
        output, total, weight = None, 0.0, 0.0
        if batch.size:
            with telling(self._mail, self.task):
                output, total, weight = pipe.train(batch, loss, divisor, self._mail)
        elif pair.randomness is not None:
            pair.randomness.abstain()
        found = torch.tensor([total, weight], dtype=torch.float64)  # the last stage has them
        pair.gradients.add(*self._line.all_reduce(found).tolist())
        pair.passes += 1
        return output

    @property
    def _mail(self) -> Messages:
        self.groups.meet()
        return self._links.messages

    @property
    def _last(self) -> int:
        """The rank in a pipeline of the task with the last stage."""
        return self._mail.rank_of(self._shape.stages - 1)

    def evaluate(self, batch: Batch, loss: LossFunction | None) -> tuple[float, float, Any]:
        pipe = self._ready(self._pairs.only, batch, loss is not None)
        if not batch.size:
            return 0.0, 0.0, None
        with telling(self._mail, self.task):
            output, sums, like = pipe.look(batch, loss, True, self._mail)
        total, weight = self._line.all_reduce(sums).tolist()
        return total, weight, told(self._line, output, like, self._last)

    def predict(self, batch: Batch, has_loss: bool) -> Any:
        shown = _of_spare_rows(batch)
        pipe = self._ready(self._pairs.only, shown, has_loss)
        loss = nothing if has_loss else None  # it tells how the model is called
        with telling(self._mail, self.task):
            output, _, like = pipe.look(shown, loss, False, self._mail)
        output = told(self._line, output, like, self._last)
        if not batch.size:
            output = rows(output, lambda tensor: tensor[:0] if tensor.dim() else tensor)
        if not has_loss and isinstance(output, Mapping):
            return {k: v for k, v in output.items() if k not in ("loss", "num_items")}
        return output

    # An update

    def _update_group(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        if pair.passes:
            pipe = self._pipes[id(pair.optimizer)]
            parameters = dict(pipe.piped.model.named_parameters())
            grads = {name: parameters[name].grad for name in pipe.piped.tied()}
            for name, total in pipe.tied_sums(grads, self._mail):  # the copies stay equal
                parameters[name].grad = torch.empty_like(parameters[name]).copy_(total)
        return super()._update_group(pair, output, examples, stop)

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        counted = self._pipes[id(pair.optimizer)].counts(parameters)
        found = super().fractions(pair, parameters)
        return [fraction * counts for fraction, counts in zip(found, counted, strict=True)]

    def _of_last_stage(self, parts: list[bytes]) -> list[bytes]:
        """What the task with the last stage has of ``parts``; all of a pipeline call it."""
        return told_bytes(self._line, parts, self._last)

    def flush(self) -> StepResult | None:
        """As of all strategies; it ends an epoch, whose last step is shown in the report."""
        found = super().flush()
        actions = [action for pipe in self._pipes.values() for action in pipe.timeline()]
        own = {"name": str(self.task), "shard": self.data_shard[0], "actions": actions}
        own["line"] = list(self._line.ranks)
        told = [json.loads(text) for text in self.coordination.tell_all(json.dumps(own))]
        self._timelines = [told[rank] for rank in told[0].pop("line")][::-1]
        return found

    def _placed(self, *args: Any) -> Placed:
        made = partial(CollectedByPipeline, self)
        return self.outer.placed(made, *args)

    def backward(self, losses: Any, batch: Batch) -> None:
        raise self._owns_the_step("backward")

    def update(self, optimizer: Optimizer) -> None:
        raise self._owns_the_step("update")

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer under the user's names, whole on all tasks; all call it."""
        pair = self._pairs.meant("state_dict()")
        with self._as_shards():
            state = self._state(pair)
        if self._is_divided(pair) or self._parts.world_size > 1:
            state = gather_together(partial(self._apart, pair, state), self._tasks)
            order = self._pipes[id(pair.optimizer)].piped.order or state["model"]
            state["model"] = {name: state["model"][name] for name in order}
        return state

    def keep(self) -> Callable[[], None]:
        self._make_all(self._pairs.only)
        return super().keep()

    def _load(self, saved: Saved) -> None:
        pair = self._pairs.only
        if "accumulated" in saved:
            self._make_all(pair)
        if is_unmade(pair.model) and self._pipes[id(pair.optimizer)].piped.starts is None:
            self._pipes[id(pair.optimizer)].unread = saved  # until it is known who keeps what
        else:
            super()._load(saved)

    def _load_outer(self, pair: Pair, saved: Saved) -> None:
        pipe = self._pipes[id(pair.optimizer)]
        if pipe.piped.starts is not None:
            super()._load_outer(pair, saved)
            return
        if self.outer.name and "accumulated" in saved:
            raise UserError(
                "a checkpoint between the batches of an update, of pipelines in groups",
                "Go on from one at the end of an update, as callbacks write it.",
            )
        pipe.of_groups = saved

    def _state(self, pair: Pair) -> dict[str, Any]:
        self._make_all(pair)
        state, pipe = super()._state(pair), self._pipes[id(pair.optimizer)]
        if "optimizer" in state and pipe.piped.starts:  # in the user's order, not the tasks'
            groups = zip(state["optimizer"]["groups"], pipe.piped.names, strict=True)
            for group, names in groups:
                group["params"] = list(names)
        if "accumulated" in state and pipe.piped.starts:
            found = state["accumulated"]["gradients"]
            found |= dict(pipe.tied_sums(found, self._mail))
        return state

    def _cuts(self, pair: Pair, section: str) -> dict[str, Cut]:
        piped = self._pipes[id(pair.optimizer)].piped
        found = super()._cuts(pair, section).items()
        return {name: cut for name, cut in found if not piped.is_foreign(name)}

    def _load_training(self, pair: Pair, saved: Saved, all_: set[str]) -> None:
        super()._load_training(pair, saved, all_)
        if pair.saved is not None:
            for name, stages in self._pipes[id(pair.optimizer)].piped.tied().items():
                if stages[0] not in self._own:  # the sum counts once
                    pair.saved["gradients"].pop(name, None)
