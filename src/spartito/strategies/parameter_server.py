"""Asynchronous training: workers compute on their own, parameter servers hold the values."""

from __future__ import annotations

import atexit
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spartito.cluster.limits import time_limit
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Traffic
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, as_dataset
from spartito.data.loader import Loader
from spartito.engine.batchnorm import has_batchnorm
from spartito.engine.context import enter
from spartito.engine.gradients import Gradients
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike, named_state, unwrap
from spartito.errors import UserError
from spartito.names import nearest
from spartito.ps.chief import JOB, Chief
from spartito.ps.job import Job, Options, workers_of
from spartito.ps.protocol.codec import check_wire_dtype
from spartito.ps.protocol.messages import Values, furthest
from spartito.ps.protocol.options import set_options
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.timetable import Row, Timetable, decode_timetable
from spartito.ps.protocol.work import WorkSource
from spartito.ps.scheduler.plan import Plan
from spartito.ps.scheduler.planner import Planner
from spartito.strategies.base import Distributed, StepResult, Strategy
from spartito.strategies.ending import serve_and_end, told, uncaught
from spartito.strategies.leases import Leased
from spartito.strategies.pair import Pair
from spartito.strategies.pusher import Pusher, ServedGradients
from spartito.strategies.replica import ReplicaStrategy
from spartito.strategies.sharing import Placed

T = TypeVar("T")

START_SECONDS = 60.0  # that a chief waits for workers which start more slowly


class ParameterServerStrategy(ReplicaStrategy):
    """Workers push gradients to parameter servers and pull values, each at its own pace.

    The batch size is global: one push is a worker's share of it. ``max_staleness`` None lets
    nobody wait for anybody; s >= 1 grants a pull only while no push can get staler than s
    updates; 0 averages one push per worker, which equals `MirroredStrategy`. ``on_stale`` says
    what becomes of a push beyond the bound: "wait" lets it not happen, "reject" has it computed
    again, "compensate" applies it with a learning rate that shrinks with its staleness.
    ``aggregate`` pushes make one update. Tensors are cut over the servers where each part keeps
    ``min_shard_bytes``. ``wire_dtype`` "bf16" halves what goes over a network.

    ``lease_seconds``: a worker that is silent so long is given up, and its work goes to others.
    ``snapshot_seconds``: how often a server writes what it goes on from when it is started
    again, into ``snapshot_dir`` (``SPARTITO_SNAPSHOT_DIR``). After more than ``nan_limit``
    pushes that were not finite, which are dropped, training ends. ``push_log``: a directory
    where every server records all its updates. ``shared_memory`` False sends everything by
    sockets, on one machine too. A worker that is alone on a machine with several GPUs uses all
    of them (not run on GPUs yet).
    """

    name = "parameter_server"

    def __init__(
        self,
        *,
        cluster: ClusterSpec | None = None,
        max_staleness: int | None = None,
        on_stale: str = "wait",
        aggregate: int = 1,
        min_shard_bytes: int = 256 << 10,
        wire_dtype: str | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        lease_seconds: float = 10.0,
        snapshot_seconds: float = 10.0,
        snapshot_dir: str | None = None,
        nan_limit: int = 100,
        push_log: str | None = None,
        shared_memory: bool = True,
    ) -> None:
        rules = Rules(0, max_staleness, on_stale, aggregate)
        self._options = Options(
            min_shard_bytes=min_shard_bytes,
            wire_dtype=check_wire_dtype(wire_dtype),
            timeout=time_limit(timeout),
            lease_seconds=lease_seconds,
            snapshot_seconds=snapshot_seconds,
            snapshot_dir=snapshot_dir,
            nan_limit=nan_limit,
            push_log=push_log,
            shared_memory=shared_memory,
        )
        super().__init__(cluster, device, False)
        if self.task.type == "ps":
            self.device = torch.device("cpu")
        self._rules = dataclasses.replace(rules, workers=len(workers_of(self.cluster)))
        self._job: Job | None = None
        self.pusher: Pusher | None = None
        self.chief: Chief | None = None
        self.work: WorkSource | None = None
        self._streams = self._leads = 0
        self._loss: LossFunction | None = None
        self._told, self._timetable = b"", Timetable()
        self._seen = Values(0, 0, 0, 0)
        self._planner: Planner | None = None
        self._stopped = self._deterministic = False
        atexit.register(self.close)

    @property
    def num_replicas_in_sync(self) -> int:
        """One: no worker waits for another to make an update."""
        return 1

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self.pusher is None else self.pusher.servers.traffic

    def describe(self) -> dict[str, Any]:
        """Which server holds what, and how stale pushes were so far."""
        if self._job is None or self.chief is None:
            return {}
        return {"servers": self._job.table(), "staleness": self.chief.staleness()}

    @property
    def leads(self) -> bool:
        """Only the chief evaluates and has callbacks."""
        return self.is_chief

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
        """As `Strategy.prepare`; a ps serves here until the job ends, and then exits with 0."""
        if self._pairs:
            raise UserError(
                "a second model under parameter_server",
                "It serves one model with one optimizer; a synchronous strategy takes several.",
            )
        means = self._rules.together or self._rules.aggregate > 1
        self._deterministic = deterministic
        if deterministic:
            self._rules.check_deterministic(has_batchnorm(model))
        if clip_norm is not None and means:
            servers = len(self.cluster.addresses.get("ps", ()))
            self._rules = self._rules.clipping_means(clip_norm, servers)
        found = super().prepare(
            model,
            optimizer,
            accumulate=accumulate,
            clip_norm=None if means else clip_norm,
            precision=precision,
            deterministic=deterministic,
            seed=seed,
        )
        # Its steps are made on the servers: torch need not warn of schedules before the first.
        found[1]._opt_called = True  # type: ignore[attr-defined]
        self._join(self._pairs[0])
        return found

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        chain = as_dataset(dataset)
        order = self._seed if seed is None else seed
        if training and (self.work is not None or self.chief is not None):
            slices = self._rules.workers
            return Leased(self, self._divisible(chain, slices), slices, order)
        return Placed(Loader(chain, (0, 1), order), self.device, self.enter, self._collective)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        self.agree_to_stop(stop)
        self.tell()
        if not batch.global_size:  # a tick of a chief that computes nothing
            return self._progress(None, 0.0, 0.0)
        self._in_job().repeats, self._loss = True, loss
        return super().step(batch, loss)

    def flush(self) -> StepResult | None:
        return self._progress(None, 0.0, 0.0)  # all is pushed: what others did comes in

    def backward(self, losses: Any, batch: Batch) -> None:
        self._in_job().repeats = False
        if self._pairs[0].accumulate > 1:
            self._pairs[0].gradients.backward_calls = 0  # the batches of one update are one mean
        super().backward(losses, batch)
        self._pairs[0].passes += 1

    def update(self, optimizer: Optimizer) -> None:
        pair = self._pairs[0]
        if optimizer is not pair.optimizer:
            return super().update(optimizer)
        if self._is_due(pair):
            self.tell()
            self._update(pair, None, 0, False)
        return None

    def reduce(self, op: str, value: Tensor) -> Tensor:
        """``value`` itself (the mean of its elements): workers do not meet."""
        if op not in ("sum", "mean", "max", "min"):
            raise UserError(f"reduce({op!r})", nearest(op, ("sum", "mean", "max", "min")))
        return value.detach().double().mean().to(value.dtype) if op == "mean" else value.detach()

    def gather(self, rows: Tensor) -> Tensor:
        """``rows`` themselves: workers do not meet."""
        return rows

    def synchronize(self) -> None:
        """The newest values into the model."""
        if self.pusher is not None:
            self.pusher.look()
            self._show(furthest(self._seen, self._far()))

    def lead(self, work: Callable[[], T]) -> T:
        if self.chief is not None:
            found = work()
            self.chief.publish(found)
            return found
        if self.work is None:  # an evaluator
            return work()
        self._leads += 1
        answer: T = json.loads(self.work.published(JOB + self._leads))
        return answer

    def agree_to_stop(self, asked: bool) -> bool:
        if asked and self.chief is not None and not self._stopped:
            self.chief.stop()
        self._stopped = self._stopped or asked
        return self._stopped

    def share_rates(self, optimizer: Optimizer) -> None:
        self.tell()

    def failed(self, error: BaseException | None) -> None:
        if self.pusher and self.work and (what := told(error)):
            self.work.fail(what)

    def follow(self, schedule: LRScheduler | None) -> None:
        if self._planner is not None:
            self._planner.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        pair = self._only_pair()
        served: Row | None = None
        if self.chief is not None and self._job is not None:
            self._in_job().arrive()
            served = self._job.fetch(self.chief)
        model = unwrap(pair.model)
        optimizer = named_state(model, pair.optimizer)
        if served is not None and self._planner is not None:
            set_options(optimizer["groups"], self._planner.counters(served))
        pair.optimizer.state.clear()  # it lives on the servers
        return {"model": dict(model.state_dict()), "optimizer": optimizer}

    def go_on_accumulating(self, saved: dict[str, Any]) -> None:
        """Refuses: what is not pushed is computed again, by whichever worker."""
        Strategy.go_on_accumulating(self, saved)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.chief is not None and "optimizer" not in state:
            state = {**self.state_dict(), **state}  # the servers keep their optimizer's state
        super().load_state_dict(state)
        pair = self._only_pair()
        if self._planner is not None:
            self._planner.begin()
        if self.chief is not None and self._job is not None:
            self._job.give(self.chief)
        pair.optimizer.state.clear()

    def close(self) -> None:
        """Leave the job; the chief ends it once the workers have left."""
        enter(None)
        self.failed(uncaught())
        atexit.unregister(self.close)
        pusher, work, chief = self.pusher, self.work, self.chief
        self.pusher = self.work = self.chief = None
        if pusher is not None:
            pusher.servers.close()
        if work is not None:
            work.close()
        if chief is not None:
            chief.close()

    # What the leases ask for

    def plan(self, chain: Dataset, count: int, steps: int | None) -> Plan:
        """How a stream is divided into pieces."""
        return Plan(
            slices=self._rules.workers,
            steps_per_pass=chain.steps_per_pass,
            passes_per_epoch=chain.repeats,
            epoch_steps=steps,
            epochs=count,
            gated=self._rules.max_staleness is not None,
            together=self._rules.together,
            multiple=self._pairs[0].accumulate,
            steady=self._deterministic,
        )

    def next_stream(self) -> int:
        """The number of a new stream, equal on all tasks."""
        self._streams += 1
        self._stopped = False
        return self._streams

    def tell(self) -> None:
        """As the chief: have the servers know which options of the optimizer hold when."""
        self._pairs[0].gradients.refresh()  # other parameters are refused first
        if self.chief is not None and self._planner is not None:
            self.chief.schedule(self._seen.pushes // self._rules.workers)

    def heed(self, timetable: bytes) -> None:
        """From now on show the options of the chief's timetable."""
        if self.chief is None and timetable != self._told:
            self._told = timetable
            self._timetable = decode_timetable(timetable) if timetable else Timetable()

    def _show(self, far: Values) -> None:
        """Give our own optimizer the options of the global step, as the servers have them."""
        options = self._timetable.at(far.pushes // self._rules.workers)
        if options is not None:
            set_options(self._pairs[0].optimizer.param_groups, options)

    # Inside: one step

    def _loss_divisor(self, batch: Batch) -> float:
        return float(batch.size or 1)  # a push is the mean over its own examples

    def _is_due(self, pair: Pair) -> bool:
        place = self.pusher.place if self.pusher else None
        return super()._is_due(pair) or (place is not None and place.is_last)

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        loss, weight = self._in_job().push()
        return self._progress(output, loss, weight)

    def _again(self, batch: Batch) -> Any:
        return self._compute(self._pairs[0], batch, self._loss)

    def _progress(self, output: Any, loss: float, weight: float) -> StepResult:
        """How far the whole training has come since the last result."""
        seen, slices = self._seen, self._rules.workers
        far = self._seen = furthest(seen, self._far())  # a restarted server counts again
        self._show(far)
        return StepResult(
            output,
            examples=max(0, far.examples - seen.examples),
            batches=max(0, far.pieces // slices - seen.pieces // slices),
            updates=max(0, far.pushes // slices - seen.pushes // slices),
            loss=loss,
            weight=weight,
            stop=self._stopped,
        )

    def _far(self) -> Values:
        if self.work is None and self.chief is not None:
            return self.chief.far()
        return self._in_job().servers.progress

    def _in_job(self) -> Pusher:
        if self.pusher is None:
            raise UserError(
                f"training on {self.task}, which has left the job or was never in it",
                "Train before strategy.close(), on a chief or worker.",
            )
        return self.pusher

    # Inside: the job

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """The chief's values come by the servers."""

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        whole = model
        alone = self.cluster.local_size == 1  # among the workers of this machine
        if self.device.type == "cuda" and alone and torch.cuda.device_count() > 1:
            whole = nn.DataParallel(model)  # divides the local batch over all its devices
        return whole, ServedGradients(optimizer)

    def _join(self, pair: Pair) -> None:
        """Take our place in the job: a ps serves, all others come back with links."""
        if self.is_evaluator:
            return
        job = self._job = Job(
            self.cluster, self._rules, self._options, unwrap(pair.model), pair.optimizer
        )
        if self.task.type == "ps":
            serve_and_end(job, self.record_to)
        self.chief = job.begin() if self.is_chief else None
        self.work, name = job.work(self.chief)
        self.pusher = Pusher(pair, job.connect(name, self.work), self._rules, self._again)
        if self.chief is not None:
            self._planner = self.chief.planner = Planner(pair.optimizer)
            self.chief.gather(min(START_SECONDS, self._options.timeout))
