"""Pipelines: each task computes some layers, and microbatches pass from one to the next."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.saved import Saved
from spartito.cluster.spec import ClusterSpec
from spartito.data.batch import Batch
from spartito.data.collate import rows
from spartito.engine.batchnorm import has_batchnorm
from spartito.engine.gradients import Gradients, LocalGradients
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike, unwrap
from spartito.errors import UserError
from spartito.log import note
from spartito.pipeline import schedules
from spartito.pipeline.gathering import gathered
from spartito.pipeline.messages import Messages
from spartito.pipeline.model import PipedModel
from spartito.pipeline.schedules import Shape
from spartito.pipeline.split import Start
from spartito.strategies.coordination import SynchronousCoordination
from spartito.strategies.distributed import StepResult
from spartito.strategies.links import Links
from spartito.strategies.pair import Pair
from spartito.strategies.pipe import Pipe, check_options, draws, outside, told, told_bytes
from spartito.strategies.replica import _of_spare_rows, _tensors
from spartito.strategies.sharing import Placed
from spartito.strategies.synchronous import SynchronousStrategy


class PipelineStrategy(SynchronousStrategy):
    """The layers of a model are divided among tasks; batches pass them in microbatches.

    The model stays as it is, and each task keeps the parameters and the optimizer's state of its
    own stages. Several pipelines of as many tasks each take a data shard of the batch. The chief
    has the last stage, and with it the loss and the output.
    """

    name = "pipeline"
    _divides_updates = True

    def __init__(
        self,
        *,
        stages: int | None = None,
        microbatches: int = 8,
        schedule: str = "1f1b",
        split: str | Sequence[str] = "auto",
        stages_per_task: int | None = None,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        communication: str = "auto",
        flush_denormals: bool = True,
    ) -> None:
        """Connects to nobody: that is done in `prepare`.

        Args:
            stages: Parts of the model; None: as many as there are tasks.
            microbatches: Parts of each data shard's batch; of a batch with fewer rows, one of each
                row. BatchNorm sees one at a time, as if so many small batches were accumulated.
            schedule: "gpipe", "1f1b", "interleaved" (several stages for each task), "zero_bubble"
                (gradients of weights are put off to fill gaps).
            split: "auto" balances the stages by the time of each part in the first batch. Or paths
                of modules, as ``["blocks.2"]``: with each a new stage begins.
            stages_per_task: None: 2 if interleaved, else 1.
            cluster: The tasks of the job; None asks the environment.
            device: Where this process computes: the CPU.
            timeout: Seconds that a wait for another task may take; None is ``SPARTITO_TIMEOUT``.
            communication: As of `SynchronousStrategy`, but for "ddp".
            flush_denormals: Whether denormal numbers are 0 where tasks compute, which is faster.

        Raises:
            UserError: Stages, tasks and schedule that do not go together.
        """
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
        self._links = Links(stages, self._per_task)
        self.connect = self._links.connect  # type: ignore[method-assign]
        super().__init__(
            cluster=cluster,
            device=device,
            sync_batchnorm=False,
            timeout=timeout,
            communication=communication,
            flush_denormals=flush_denormals,
        )
        if self.device.type != "cpu":
            raise UserError(
                f"a pipeline on {self.device}: its messages are for CPUs so far",
                "Take device='cpu', or mirrored on GPUs.",
            )
        tasks = self._length
        self._position = tasks - 1 - self.cluster.rank % tasks
        self._shape = Shape(tasks, self._stages_of(self.cluster) // tasks, microbatches)
        self._own = range(self._position, self._shape.stages, tasks)
        self._pipes: dict[int, Pipe] = {}
        weakref.finalize(self, Links.close, self._links)
        self._shown: list[dict[str, Any]] = []  # what the first pipeline's tasks did when
        self.coordination = _Coordination(self)

    # Who is where

    def check(self, cluster: ClusterSpec) -> None:
        super().check(cluster)
        stages, world = self._stages_of(cluster), cluster.world_size
        if stages % self._per_task:
            raise UserError(
                f"{stages} stages with {self._per_task} for each task",
                "Take a multiple.",
            )
        tasks = stages // self._per_task
        if world % tasks:
            raise UserError(
                f"{world} tasks for pipelines of {tasks} (stages={stages}"
                + (f", {self._per_task} for each task)" if self._per_task > 1 else ")"),
                f"Take a multiple of {tasks} tasks, or stages={world * self._per_task}.",
            )

    def _stages_of(self, cluster: ClusterSpec) -> int:
        if self._stages is None or self.is_evaluator:
            return cluster.world_size * self._per_task
        return self._stages

    @property
    def _length(self) -> int:
        """Those of one pipeline."""
        return self._stages_of(self.cluster) // self._per_task

    @property
    def data_shard(self) -> tuple[int, int]:
        return self.cluster.rank // self._length, self.cluster.world_size // self._length

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

    @property
    def _state_fraction(self) -> float:
        return 1.0 / self._length

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        return model, LocalGradients(optimizer)  # until it is known which parameters stay here

    def _ready(self, pair: Pair, batch: Batch, has_loss: bool) -> Pipe:
        """Divide the model when the first batch comes: the chief decides, all tasks call it."""
        pipe = self._pipes[id(pair.optimizer)]
        piped, model = pipe.piped, pair.model
        if piped.starts is not None:
            return pipe
        text = b""
        with self.coordination.during("prepare"):
            if self.is_chief:
                text = self._planned(pipe, batch, has_loss)
            plan = json.loads(self.groups.world.all_gather_bytes(text)[0])
            if "error" in plan:
                raise UserError(*plan["error"])
            starts = [Start(path, call) for path, call in plan["starts"]]
            waiting = [(p, p.grad) for p in pair.model.parameters()]
            piped.divide(starts, plan["owners"], pair.optimizer)
            pair.shared = _tensors(piped.model)  # those of others are let go of
            before, pair.gradients = pair.gradients, super()._gradients(model, pair.optimizer)[1]
            pair.gradients.go_on(before)
            for parameter, grad in waiting:  # of a checkpoint between the batches of an update
                parameter.grad = grad
        if self.is_chief and starts:
            begins = ", ".join(start.path for start in starts)
            note("%d stages, which begin with the input, %s", piped.stages, begins)
        return pipe

    def _planned(self, pipe: Pipe, batch: Batch, has_loss: bool) -> bytes:
        """What the chief decides, or why it cannot, as JSON."""
        try:
            with outside():
                part = pipe.cut_up(_of_spare_rows(batch))[0]
                starts, owners = pipe.piped.plan(pipe.call(part, has_loss), self._split)
        except UserError as error:
            what, _, do = str(error).partition("\n  ")
            return json.dumps({"error": [what, do]}).encode()
        found = [(start.path, start.call) for start in starts]
        return json.dumps({"starts": found, "owners": owners}).encode()

    # A batch

    def enter(self, batch: Batch) -> None:
        """As of all strategies; what has been divided is to stay the same.

        Args:
            batch: The batch that is computed next.

        Raises:
            UserError: Parameters came to the model or the optimizer, or went.
        """
        for pair in self._pairs.all:
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
            output, total, weight = pipe.train(batch, loss, divisor, self._mail)
        elif pair.randomness is not None:
            pair.randomness.abstain()
        found = torch.tensor([total, weight], dtype=torch.float64)  # the last stage has them
        pair.gradients.add(*self.groups.model.all_reduce(found).tolist())
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
        output, sums, like = pipe.look(batch, loss, True, self._mail)
        total, weight = self.groups.model.all_reduce(sums).tolist()
        return total, weight, told(self.groups.model, output, like, self._last)

    def predict(self, batch: Batch, has_loss: bool) -> Any:
        shown = _of_spare_rows(batch)
        pipe = self._ready(self._pairs.only, shown, has_loss)
        loss = _nothing if has_loss else None  # it tells how the model is called
        output, _, like = pipe.look(shown, loss, False, self._mail)
        output = told(self.groups.model, output, like, self._last)
        if not batch.size:
            output = rows(output, lambda tensor: tensor[:0] if tensor.dim() else tensor)
        if not has_loss and isinstance(output, Mapping):
            return {k: v for k, v in output.items() if k not in ("loss", "num_items")}
        return output

    # An update

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        if pair.passes:
            pipe = self._pipes[id(pair.optimizer)]
            parameters = dict(pipe.piped.model.named_parameters())
            grads = {name: parameters[name].grad for name in pipe.piped.tied()}
            for name, total in pipe.tied_sums(grads, self._mail):  # the copies stay equal
                parameters[name].grad = torch.empty_like(parameters[name]).copy_(total)
        return super()._update(pair, output, examples, stop)

    def global_norm(self, pair: Pair) -> Tensor:
        square = self._pipes[id(pair.optimizer)].square()
        return self.groups.model.all_reduce(square).sqrt().reshape(())

    def _of_last_stage(self, parts: list[bytes]) -> list[bytes]:
        """What the task with the last stage has of ``parts``; all of a pipeline call it."""
        return told_bytes(self.groups.model, parts, self._last)

    def flush(self) -> StepResult | None:
        """As of all strategies; it ends an epoch, whose last step is shown in the report."""
        found = super().flush()
        actions = [action for pipe in self._pipes.values() for action in pipe.timeline()]
        own = {"name": str(self.task), "shard": self.data_shard[0], "actions": actions}
        texts = self.coordination.tell_all(json.dumps(own))
        self._shown = [json.loads(text) for text in texts][: self._length][::-1]
        return found

    def _described(self) -> dict[str, Any]:
        """What a run's settings tell: of the first pipeline also what its tasks did when."""
        shape = self._shape
        bound = schedules.bubble(self._schedule, shape)
        return {
            "schedule": self._schedule,
            "stages": shape.stages,
            "microbatches": shape.microbatches,
            "data_shards": self.num_replicas_in_sync,
            "bound": bound,
            "tasks": self._shown,
        }

    def _placed(self, *args: Any) -> Placed:
        return _Collected(self, *args)

    def backward(self, losses: Any, batch: Batch) -> None:
        raise self._owns_the_step("backward")

    def update(self, optimizer: Optimizer) -> None:
        raise self._owns_the_step("update")

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer under the user's names, whole on all tasks; all call it."""
        pair = self._pairs.only
        piped, state = self._pipes[id(pair.optimizer)].piped, super().state_dict()
        if not piped.starts:
            return state
        return gathered(self.groups.model, state, piped.names, piped.order)

    def _state(self, pair: Pair) -> dict[str, Any]:
        state = super()._state(pair)
        pipe = self._pipes[id(pair.optimizer)]
        if "optimizer" in state and pipe.piped.starts:  # in the user's order, not the tasks'
            groups = zip(state["optimizer"]["groups"], pipe.piped.names, strict=True)
            for group, names in groups:
                group["params"] = list(names)
        if "accumulated" in state and pipe.piped.starts:
            found = state["accumulated"]["gradients"]
            found |= dict(pipe.tied_sums(found, self._mail))
        return state

    def _load_training(self, pair: Pair, saved: Saved, all_: set[str]) -> None:
        super()._load_training(pair, saved, all_)
        if pair.saved is not None:
            for name, stages in self._pipes[id(pair.optimizer)].piped.tied().items():
                if stages[0] not in self._own:  # the sum counts once
                    pair.saved["gradients"].pop(name, None)


class _Collected(Placed):
    """Batches of a pipeline, whose last stage alone has seen the outputs in training."""

    def __init__(self, strategy: PipelineStrategy, *args: Any) -> None:
        super().__init__(*args)
        self._strategy = strategy

    def collect(self, own: bytes) -> list[bytes]:
        parts = super().collect(own)
        return self._strategy._of_last_stage(parts)


class _Coordination(SynchronousCoordination):
    """As of all replicas; what is recorded tells how the last step went."""

    def __init__(self, strategy: PipelineStrategy) -> None:
        super().__init__(
            strategy.name, strategy.job, strategy.cluster, strategy._pairs, strategy.groups
        )
        self._strategy = weakref.proxy(strategy)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pipeline": self._strategy._described()}


def _nothing(output: Any, target: Any) -> Any:
    """Stands for a loss that nobody computes."""
