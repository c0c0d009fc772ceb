"""A strategy: what a user says of how a job trains, and the calls by which he has it done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.saving import Unwritten
from spartito.cluster.limits import time_limit
from spartito.cluster.recovery import Recovery
from spartito.cluster.resolver import resolve
from spartito.cluster.spec import ClusterSpec, Task
from spartito.data.batch import Batch
from spartito.declared import Declared, described, parse
from spartito.engine.devices.device import choose_device
from spartito.engine.losses.loss import LossFunction
from spartito.engine.updates.optimizers import OptimizerLike
from spartito.errors import UserError
from spartito.registry import OF_THE_JOB, other_option, strategy_info
from spartito.steps.coordination import Coordination
from spartito.steps.distributed import Distributed, StepResult
from spartito.steps.outer_loops.outer_loop import OuterLoop
from spartito.steps.parts import Parts, Settings
from spartito.steps.recovery import chosen_recovery
from spartito.steps.step import Step
from spartito.steps.team import Team


class _Present:
    """A field that was given as who is in the job, and tells who trains at present."""

    def __get__(self, strategy: Strategy | None, _: type[Strategy]) -> ClusterSpec:
        if strategy is None:
            return None  # type: ignore[return-value]  # the default of the field
        engine: Step | None = strategy.__dict__.get("engine")
        return strategy._tasks if engine is None else engine.cluster

    def __set__(self, strategy: Strategy, given: ClusterSpec | None) -> None:
        job = resolve() if given is None else given
        strategy.__dict__.update(job=job, _tasks=job.apart() if job.is_evaluator else job)


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategy:
    """How the tasks of a job train together: a declaration, which several strategies may nest.

    Making one connects to nobody and checks nothing but its own options. The first call that needs
    the job asks whether its tasks can train so; `prepare` meets the others.

    The trainer calls `prepare`, `distribute`, `step`, `flush`, `evaluate`, `predict`, `save` and
    `load`; all else that it wants to know or agree on is in `coordination`. Loops of one's own use
    the parts of a step: `distribute`, `backward`, `update`, `reduce`.

    Args:
        cluster: All tasks of the job; None asks the environment.
        device: Where this process computes; None is its own accelerator, else the CPU.
        sync_batchnorm: Whether BatchNorm is one over the global batch; None: where training is
            deterministic, and where the model has torch's SyncBatchNorm.
        timeout: Seconds that a wait for another task may take; None is ``SPARTITO_TIMEOUT``.
        communication: "auto" is the fastest way that all tasks share: on CPUs shared memory inside
            a machine and sockets between machines, on GPUs NCCL. "sockets" leaves shared memory
            out. "process_group" is torch's process group for the device in any case (gloo, NCCL);
            "ddp" too, and reduces while backward runs, as on GPUs; "fsdp", under sharded, has
            torch's FSDP2 gather and reduce, as on GPUs. Devices that tasks share go through the
            host's memory.
        flush_denormals: Whether denormal numbers are 0 where tasks compute, which is faster.
        recovery: How a training goes on when a task is lost; None asks ``SPARTITO_RECOVERY``,
            without which a loss ends it.

    Raises:
        UserError: For options that exclude each other.
    """

    name: ClassVar[str]
    """What people call it, as in ``--strategy``."""
    nests: ClassVar[bool] = True
    """Whether groups of another strategy may train so."""
    recovers: ClassVar[bool] = False
    """Whether a training may outlive the loss of a task."""
    by_fsdp: ClassVar[bool] = False
    """Whether torch's FSDP2 may be its engine."""
    without: ClassVar[tuple[str, ...]] = ()
    """The options of a job that it has no use for."""

    if TYPE_CHECKING:
        cluster: ClusterSpec = field(default=None)  # type: ignore[assignment]  # given by the job
    else:
        cluster: ClusterSpec = _Present()
    device: torch.device | str | None = None
    sync_batchnorm: bool | None = None
    timeout: float | None = None
    communication: str = "auto"
    flush_denormals: bool = True
    recovery: Recovery | None = None

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Refuse what is no option by a message, before anything is set."""
        form = signature(cls.__init__)
        try:
            form.bind(None, *given, **options)
        except TypeError as why:
            known = [name for name in form.parameters if name != "self"]
            unknown = next((name for name in options if name not in known), "")
            hint = (
                other_option(cls.name, unknown, known) if unknown else f"Known: {', '.join(known)}."
            )
            raise UserError(f"{cls.__name__}(): {why}", hint) from None
        return super().__new__(cls)

    def __post_init__(self) -> None:
        choose_device(self.device, self.cluster)
        time_limit(self.timeout)

    if TYPE_CHECKING:
        job: ClassVar[ClusterSpec]
        """All tasks of the job, those that do not train included."""
        _tasks: ClassVar[ClusterSpec]

    @cached_property
    def engine(self) -> Step:
        """What this task does of a step, once the job is known to be able to train so.

        Raises:
            UserError: If it cannot; the hint names a strategy that can.
        """
        return self.step_of(self)

    def step_of(self, whole: Strategy, outer: OuterLoop | None = None) -> Step:
        """The steps of this strategy as a part of another.

        Args:
            whole: Which has it inside, or itself: what holds for a whole job is said there.
            outer: What stands around the steps.

        Returns:
            What this task does of them.

        Raises:
            UserError: If the job's tasks cannot train so.
        """
        self._refuse_inside(whole, outer)
        job = whole.job
        device = choose_device(whole.device, whole._tasks)
        team = Team(self.name, job, device, outer, whole.timeout, whole.communication)
        if not team.job.is_evaluator:
            team.check(team.cluster)
        team.recovery = self._recovery_of(whole, team)
        return Step(
            team,
            self.parts(team),
            sync_batchnorm=False if "sync_batchnorm" in self.without else whole.sync_batchnorm,
            flush_denormals=whole.flush_denormals,
        )

    @abstractmethod
    def parts(self, team: Team) -> Parts:
        """What its steps are made of, on this task.

        Args:
            team: The tasks that make them: those of a job, or of a group that another one has.

        Returns:
            The parts, which share the team.

        Raises:
            UserError: If these cannot train so.
        """

    def _refuse_inside(self, whole: Strategy, outer: OuterLoop | None) -> None:
        """Refuse to be inside of others, and options of the job that are said there, or not had."""
        for each in fields(self):
            if each.name not in OF_THE_JOB:
                continue
            own, value = getattr(self, each.name), getattr(whole, each.name)
            if whole is not self and own != each.default:
                raise UserError(
                    f"{each.name}={own!r} of {self.name} inside {whole.name}",
                    f"It holds for the whole job: say it of {whole.name}.",
                )
            if each.name in self.without and value != each.default:
                raise UserError(f"{each.name}={value!r} under {self.name}", "Leave it out.")
        if whole.communication == "fsdp" and not whole.by_fsdp:
            raise UserError(
                f"communication='fsdp' under {whole.name}: FSDP2 keeps models in shards",
                "Choose strategy sharded, or leave it out.",
            )
        if outer is not None and not self.nests:
            raise UserError(
                f"{whole.name} with {self.name} inside",
                "Choose mirrored, multi_worker_mirrored, sharded, mesh or pipeline there.",
            )

    def _recovery_of(self, whole: Strategy, team: Team) -> Recovery | None:
        """How its training goes on after a loss."""
        if not self.recovers:
            if whole.recovery is not None:
                raise UserError(
                    f"recovery under {team.called}",
                    "Choose mirrored, multi_worker_mirrored, sharded, mesh or pipeline.",
                )
            return None
        found = chosen_recovery(whole.recovery, team.cluster, whole.communication)
        if found is not None and team.outer.name and strategy_info(self.name).divides_model:
            raise UserError(
                f"recovery under {team.outer.name} with {self.name} inside",
                "Groups that recover hold mirrored; or leave recovery out.",
            )
        return found

    @property
    def declared(self) -> Declared:
        """What was said of it, and is not so anyway."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        defaults = {each.name: each.default for each in fields(self)}
        kept = {name: value for name, value in said.items() if value != defaults[name]}
        return described(self.name, {n: v for n, v in kept.items() if n != "cluster"})

    def __str__(self) -> str:
        """Its text form, as ``local_sgd(every=20)``."""
        return str(self.declared)

    @property
    def coordination(self) -> Coordination:
        """What the tasks agree on beside the computation."""
        return self.engine.coordination

    @property
    def task(self) -> Task:
        """Which task of the cluster this process is."""
        return self.job.task

    @property
    def is_chief(self) -> bool:
        """Whether this task writes files and prints."""
        return self.cluster.is_chief

    @property
    def is_evaluator(self) -> bool:
        """Whether this task stands outside the training and evaluates its checkpoints."""
        return self.job.is_evaluator

    @property
    def data_shard(self) -> tuple[int, int]:
        """Which part of every global batch this task reads, as (index, count).

        Tasks that compute one part of the batch together have the same.
        """
        return self.engine.data_shard

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of data shards of a global batch."""
        return self.engine.num_replicas_in_sync

    @property
    def num_replicas(self) -> int:
        """The copies of the model that compute; one may lie on several tasks."""
        return self.engine.num_replicas

    def check(self, cluster: ClusterSpec) -> None:
        """Refuse a cluster on which this strategy cannot run. Pure.

        Args:
            cluster: The tasks that would train.

        Raises:
            UserError: If it is refused; its hint names a strategy that can.
        """
        self.engine.team.check(cluster)

    def scope(self) -> AbstractContextManager[None]:
        """Where the model and its optimizer are built.

        Returns:
            A context manager, in which a strategy may decide where parameters are made.
        """
        return nullcontext()

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
        """Take charge of a model and its optimizer; all tasks call it once per pair.

        The tasks meet here at the latest. Replicas start with the chief's values. A parameter
        server serves here until the job ends, and then exits with 0.

        Args:
            model: Any module; it is changed in place and moved to this task's device.
            optimizer: A fresh one, or a function of the parameters.
            accumulate: How many batches make one update of `step`.
            clip_norm: The largest global norm (L2) of an update's gradients; None: any.
            precision: "fp32" (the model's own dtype), "bf16" or "fp16" (autocast, the latter with
                a loss scale), "bf16-true" (a model in bf16), or Lightning's names of these.
            deterministic: Whether numbers are to be those of one device.
            seed: Orders the examples, and draws random numbers where ``deterministic``.

        Returns:
            The module to call, train and evaluate, and its optimizer.

        Raises:
            UserError: For a model, optimizer or setting that cannot be distributed.
            TaskLostError: If a task does not come within the time limit.
        """
        if not isinstance(model, nn.Module):
            raise UserError(f"model={model!r} is no module", "Write prepare(model, optimizer).")
        settings = Settings(accumulate, clip_norm, precision, deterministic, seed)
        return self.engine.prepare(model, optimizer, settings)

    def using(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A block in which `step`, `evaluate` and their like are about the pair of ``optimizer``.

        It is needed where one strategy has prepared several.

        Args:
            optimizer: The one that `prepare` returned.

        Returns:
            A context manager.
        """
        return self.engine.using(optimizer)

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        """This task's data shard of ``dataset``, on its device.

        Args:
            dataset: Anything that `spartito.data.as_dataset` takes.
            seed: Shuffles where the data set has no seed of its own; None: that of `prepare`.
            training: False for evaluations, which not all tasks of a strategy may do.

        Returns:
            Batches to iterate over, epoch after epoch.
        """
        return self.engine.distribute(dataset, seed=seed, training=training)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        """Forward, backward and update of the prepared pair.

        Args:
            batch: One of those that `distribute` gave.
            loss: A function of output and target; None for a model that computes its own.
            stop: Asks all tasks to end; the result's ``stop`` tells whether anyone asked.

        Returns:
            What the step did.
        """
        return self.engine.step(batch, loss, stop=stop)

    def flush(self) -> StepResult | None:
        """Update with what was accumulated so far.

        Returns:
            What the update did; None where nothing was accumulated.
        """
        return self.engine.flush()

    def evaluate(
        self, batch: Batch, loss: LossFunction | None
    ) -> tuple[float | Tensor, float | Tensor, Any]:
        """The loss of one batch, without a gradient; all tasks call it, also those without rows.

        Args:
            batch: One of those that `distribute` gave.
            loss: A function of output and target; None for a model that computes its own.

        Returns:
            This task's sum of losses, its weight, and the output (None where it had no rows). What
            only the device knows of the two is a scalar there, which nobody has waited for.
        """
        return self.engine.evaluate(batch, loss)

    def predict(self, batch: Batch, has_loss: bool) -> Any:
        """The model's output for this task's rows, without a gradient.

        Args:
            batch: One of those that `distribute` gave.
            has_loss: Whether there is a loss function. A model that computes its own returns it
                beside the output in a dict: it is left out.

        Returns:
            Tensors ``(rows, ...)``, in a tuple or dict where the model returns one.
        """
        return self.engine.predict(batch, has_loss)

    def save(self, directory: Path, later: bool = False) -> Unwritten:
        """Write model and optimizer, under the user's names, into a checkpoint; all tasks call it.

        No task needs more than its own part of them.

        Args:
            directory: A new directory on the chief's machine, which nobody reads before all is
                written. The chief has made it; where others write too they share it.
            later: Whether only a copy is taken now. What is returned writes it.

        Returns:
            What is still to be written: without ``later`` nothing.

        Raises:
            UserError: On all tasks, if it cannot be written, or replicas have drifted apart.
        """
        return self.engine.save(directory, later)

    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        """Take back what `save` or a Trainer wrote, under any strategy and number of tasks.

        All tasks call it, after `prepare`.

        Args:
            source: The directory of one checkpoint, or sections of a state as
                ``{"model": model.state_dict()}``; what is not there stays as it is.

        Raises:
            UserError: If the model or the optimizer is another one.
        """
        self.engine.load(source)

    def keep(self) -> Callable[[], None]:
        """Copy the values of the model, to go back to them in this process; all tasks call it.

        Returns:
            A function that all tasks call to put them back. Each keeps its own part of them.
        """
        return self.engine.keep()

    def state_dict(self) -> dict[str, Any]:
        """All of model and optimizer in memory, for scripts that write their own files.

        Returns:
            The sections "model" and "optimizer" under the user's names; all tasks call it.

        Raises:
            UserError: If the strategy keeps no whole state on any task.
        """
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, under any strategy and number of tasks.

        Args:
            state: What `state_dict` returned.

        Raises:
            UserError: If the model or the optimizer is another one.
        """
        self.engine.load(state)

    def backward(self, losses: Any, batch: Batch | None = None) -> None:
        """Compute gradients; for loops of one's own.

        Several calls before an update add up, as in torch: each is a mean over its own batch.

        Args:
            losses: One loss per example, their mean, or (sum, weight).
            batch: The batch that they are of, which tells what they weigh.

        Raises:
            UserError: The batch is missing, or the losses have no gradient.
        """
        if batch is None:
            raise UserError(
                "backward(loss) without the batch that tells what the loss weighs",
                "Write strategy.backward(loss, batch).",
            )
        self.engine.backward(losses, batch)

    def update(self, optimizer: Optimizer | None = None) -> None:
        """Reduce the gradients, let the optimizer step, and clear them; for loops of one's own.

        ``optimizer.step()`` after `backward` does the same.

        Args:
            optimizer: One that `prepare` returned.

        Raises:
            UserError: If `prepare` was told to accumulate, where tasks update together, or the
                gradients are not those of `backward`.
        """
        if optimizer is None:
            raise UserError(
                "update() without an optimizer",
                "Write strategy.update(optimizer): what prepare gave.",
            )
        self.engine.update(optimizer)

    def reduce(self, op: str, value: Tensor | float) -> Tensor:
        """Combine a tensor or a number of every data shard; all tasks call it.

        Args:
            op: "sum", "mean" (over all elements), "max" or "min".
            value: A tensor of the same shape and dtype on all tasks; for "mean" of any shape. Or a
                number, which is taken in fp64.

        Returns:
            The same tensor on all tasks, without a gradient; for "mean" a scalar.

        Raises:
            UserError: For another ``op``.
        """
        return self.engine.reduce(op, value)

    def gather(self, rows: Tensor) -> Tensor:
        """Put together the rows of all data shards; all tasks call it.

        Args:
            rows: ``(n, ...)``; n may differ.

        Returns:
            ``(sum of n, ...)`` in the order of the data shards, on all tasks, without a gradient.
        """
        return self.engine.gather(rows)

    def synchronize(self) -> None:
        """Make equal what may differ between replicas: the running statistics of BatchNorm."""
        self.engine.synchronize()

    def close(self) -> None:
        """Leave all groups; calling it again changes nothing.

        After a loop of one's own, replicas that are to be equal are compared first.

        Raises:
            UserError: If they have drifted apart.
        """
        if "engine" in self.__dict__:  # else nothing was begun
            self.engine.close()

    def __enter__(self) -> Self:
        self.engine  # noqa: B018 - which refuses what the job cannot have
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def nested(inside: Strategy | Declared | str, job: ClusterSpec) -> Strategy:
    """A strategy that another one has inside.

    Args:
        inside: It, or its text form.
        job: All tasks.

    Raises:
        UserError: It is no strategy.
    """
    if isinstance(inside, Strategy):
        return inside
    if not isinstance(inside, Declared | str):
        raise UserError(f"inside={inside!r}", "Give a strategy: inside=ShardedStrategy(zero=2).")
    asked = parse(inside, "inside") if isinstance(inside, str) else inside
    found: Strategy = strategy_info(asked.name).load()(cluster=job, **asked.options)
    return found
