"""One `fit` call for every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from spartito import status
from spartito.checkpoint.in_store import StoredCheckpoint
from spartito.checkpoint.manager import read_sections
from spartito.data.dataset import Dataset, as_dataset
from spartito.engine.devices.device import move
from spartito.engine.losses.loss import LossFunction, make_loss
from spartito.engine.modules.recompute import Recompute, recompute
from spartito.engine.updates.optimizers import (
    NoOptimizer,
    OptimizerLike,
    check_computes_once,
    unwrap,
)
from spartito.errors import PreemptedError, UnwritableError, UserError
from spartito.folders import check_free
from spartito.notes import note, warn
from spartito.storage.tensors import check_storable
from spartito.strategies import Strategy
from spartito.training.arguments import (
    asked_epochs,
    asked_strategy,
    check_steps,
    has_epochs,
    known_names,
)
from spartito.training.backups.identity import options_of
from spartito.training.callback import Callback, Where, check_given
from spartito.training.callbacks.backup_and_restore import BackupAndRestore
from spartito.training.evaluation.eval_prediction import ComputeMetrics
from spartito.training.evaluation.evaluate import Evaluation
from spartito.training.evaluation.evaluation_figures import Figures
from spartito.training.evaluation.evaluator import (
    check_callbacks,
    first_checkpoint,
    follow,
    own_checkpoint,
)
from spartito.training.evaluation.predictions import predicted
from spartito.training.files.loss_buffers import LossBuffers
from spartito.training.files.output_folders import held_outputs
from spartito.training.files.resume import find_together, into_epoch, restore, trained_on
from spartito.training.files.run_folder import RunFolder, check_task
from spartito.training.files.saving import Saves
from spartito.training.files.weights import Loaded, load_weights, save_weights
from spartito.training.files.write_refusals import what_is_lost
from spartito.training.fitting.custom_step import StepFunction, custom_step
from spartito.training.fitting.fit_data import (
    BATCH,
    Weights,
    check_weights,
    split,
    training_data,
    with_class_weights,
)
from spartito.training.fitting.gradient_norm import report_norm
from spartito.training.fitting.lightning_module import Position, is_lightning, parts_of
from spartito.training.fitting.nonfinite import Skips, checked, have_skipped
from spartito.training.fitting.own_callbacks import with_own
from spartito.training.fitting.packed_documents import check_documents
from spartito.training.fitting.preemption import Notice
from spartito.training.fitting.schedule import Schedule, SchedulerLike, make_scheduler
from spartito.training.fitting.shared_strategies import with_its_pair
from spartito.training.fitting.train_modes import Modes, evaluating
from spartito.training.history import History
from spartito.training.loops.choice import make_loop
from spartito.training.loops.training_loop import TrainingLoop
from spartito.training.metrics.names import MetricLike, make_metrics
from spartito.training.trials.batch_size_finder import BatchSizes, find_batch_size
from spartito.training.trials.rate_finder import LearningRates, find_learning_rate
from spartito.training.trials.step_profile import is_wanted, profile_and_end
from spartito.urls import is_remote, local_path


class Trainer:
    """Trains, evaluates and applies one model under any strategy.

    Args:
        model: The module; it is trained in place.
        optimizer: A fresh one, or a function of the parameters; None for evaluation alone.
        loss: A torch loss that is a mean over examples, or a function ``(output, target)`` to
            one loss per example, their mean, or ``(sum, weight)``; None for a model that
            computes its own.
        metrics: Names, functions, objects of ``sp.metrics`` or of torchmetrics, one or several;
            "gradient_norm" is that of the updates.
        compute_metrics: Gets all predictions and targets of an evaluation, in the order of its
            data, and returns figures by name, as in Transformers (`EvalPrediction`).
        strategy: What `sp.strategy` returns, or its name; None lets the launcher or the cluster
            decide, once for all trainers of a process.
        train_step: A function ``(model, batch)`` that computes the loss of a batch, in place of
            ``loss``: with a penalty of gradients, several passes, or a loss of reinforcement
            learning. It returns what ``loss`` may, or ``{"loss": ..., "output": ...}``. A
            LightningModule brings this, its optimizer and its scheduler itself.
        eval_step: The same for evaluations; None: ``train_step``, with the model in eval mode.
        scheduler: One of torch's, or a function of the optimizer that makes it.
        scheduler_interval: "step": it is stepped once per global step, or "epoch": after each
            epoch, as `ReduceLROnPlateau` always is.
        scheduler_monitor: What `ReduceLROnPlateau` watches; None: ``val_loss``, or ``loss``
            without validation.
        accumulate: How many global batches make one step.
        clip_norm: The bound of the gradient's global norm; None: not clipped.
        precision: How numbers are computed: "fp32" is the model's own dtype; other names and
            what they mean are those of `Strategy.prepare`.
        checkpoint_activations: Which modules keep no activations and compute them again in the
            backward pass: less memory, more time, the same numbers. True: the entries of
            each Sequential and ModuleList that have submodules; a number of bytes; classes; or a
            function of a module (`spartito.engine.modules.recompute`).
        deterministic: Gives one device's numbers at any number of replicas. BatchNorm and its
            subclasses are synchronized; what cannot be divided is refused.
        seed: Of the order of examples and of all that is random in training.
        on_nonfinite: What becomes of an update whose loss or gradients are NaN or infinite:
            "ignore" makes it, "skip" leaves it out and counts it, "stop" ends the training too.
        run_dir: A folder for settings, history, checkpoints and a report; None:
            ``SPARTITO_RUN_DIR``, else none.
        about: More settings for ``config.json`` and loggers, as JSON.

    Raises:
        UserError: Arguments that do not go together.
        TaskLostError: Another task did not come within the time limit.
    """

    @known_names("Trainer")
    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerLike | None = None,
        loss: LossFunction | None = None,
        metrics: MetricLike | Sequence[MetricLike] = (),
        compute_metrics: ComputeMetrics | None = None,
        strategy: Strategy | str | None = None,
        train_step: StepFunction | None = None,
        eval_step: StepFunction | None = None,
        scheduler: SchedulerLike | None = None,
        scheduler_interval: str = "step",
        scheduler_monitor: str | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        checkpoint_activations: Recompute = False,
        deterministic: bool = False,
        seed: int = 0,
        on_nonfinite: str = "ignore",
        run_dir: str | Path | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"model={model!r} is no module", "Give an object: Net(), not Net.")
        self._loop: TrainingLoop | None = None
        self.step = 0
        self.strategy = asked_strategy(strategy)
        if train_step is None and is_lightning(model):
            parts = parts_of(model, self.strategy.coordination.cluster, self._position)
            train_step, eval_step = parts.train_step, eval_step or parts.eval_step
            if optimizer is None:
                optimizer = parts.optimizer
            if scheduler is None and parts.scheduler is not None:
                scheduler, scheduler_interval = parts.scheduler, parts.interval
                scheduler_monitor = parts.monitor
        self.loss = make_loss(loss)
        self.metrics, self._compute_metrics = make_metrics(metrics, self.loss), compute_metrics
        self.precision, self.deterministic, self.seed = precision, deterministic, seed
        self.about = about or {}
        self.on_nonfinite, self.skips = checked(on_nonfinite), Skips()
        self.coordination = self.strategy.coordination
        self.is_chief = self.coordination.cluster.is_chief
        task = str(self.coordination.cluster.task)
        run_dir = None if is_wanted() else run_dir  # who is measured writes nothing of the user's
        if folder := status.folder(run_dir):
            if self.is_chief:
                check_free(folder)
            check_task(folder, task)
        self._folder = RunFolder(folder) if folder and self.is_chief else None
        self.run_dir = status.begin(run_dir, task)
        self.coordination.record_to = self.run_dir  # from here on, for a task that only serves
        recompute(unwrap(model), checkpoint_activations)
        self._custom_step = custom_step(model, train_step, eval_step, self.loss, self.strategy)
        model = model if self._custom_step is None else self._custom_step
        self.model, self.optimizer = self.strategy.prepare(
            model,
            NoOptimizer() if optimizer is None else optimizer,
            accumulate=accumulate,
            clip_norm=clip_norm,
            precision=precision,
            deterministic=deterministic,
            seed=seed,
        )
        check_computes_once(self.optimizer)
        have_skipped(self.on_nonfinite, self.strategy, self.optimizer)
        report_norm(self.strategy, self.optimizer, metrics)
        if isinstance(self.loss, nn.Module):  # it may have weights of its own
            move(self.loss, self.strategy.engine.team.device, self.optimizer)
        self.loss_buffers = LossBuffers(self.loss)
        self.scheduler = make_scheduler(scheduler, self.optimizer)
        self.schedule = Schedule(self.scheduler, scheduler_interval, scheduler_monitor)
        self.coordination.follow(self.schedule.by_step)

        self.epoch = self.epochs = 0
        self.steps_per_epoch: int | None = None
        self.batch_size: int | None = None
        self.examples: int | None = None
        self.max_steps: int | None = None
        self.accumulate = accumulate
        self.stop_training = False
        self.left_to_evaluator = False
        self.history = History()
        self.callbacks: list[Callback] = []
        self.went_on = False
        self.first_options: list[dict[str, Any]] = []
        self._fits, self._verbose = 0, True
        self._given: list[Callback] = []
        self.saves = Saves(self)
        self.notice = Notice()
        self.modes = Modes()
        self._restored: dict[str, Any] | None = None

    @known_names("fit")
    @with_its_pair()
    def fit(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        max_steps: int | None = None,
        validation_data: Any = None,
        validation_split: float | None = None,
        validation_steps: int | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int | None = None,
        batch_size: int | None = None,
        verbose: bool | int = True,
    ) -> History:
        """Train, in epochs of global steps.

            for each epoch:
                for each global batch of the epoch:        # steps_per_epoch, or all there are
                    strategy.step(batch, loss)             # forward, backward, reduce, update
                    scheduler.step()
                evaluate(validation_data)
                callbacks: checkpoint, early stopping, ...

        A module that is in eval mode before stays there, as a frozen backbone; where all are, all
        train.

        Calling it again continues with the same weights, optimizer and order of examples. After
        `load` it continues at the position that was saved, up to ``epochs``; in the middle of an
        epoch the data must be the same. In a job with an evaluator the validation is left to
        it; there `fit` evaluates each new checkpoint until the training ends.

        Args:
            data: Arrays, a tuple ``(x, y)``, a data set of ``sp.data`` or of torch. A third part,
                ``(x, y, w)``, is what each example weighs in the loss.
            epochs: The number of the last epoch; ``SPARTITO_EPOCHS`` overrides it. None: 1, or as
                many as ``max_steps`` needs.
            steps_per_epoch: Global batches of an epoch; None: all of the data.
            max_steps: The global step with which training ends, in whatever epoch that is (under
                ``parameter_server`` a few more may be on their way; under ``local_sgd`` it ends
                when groups meet next).
            validation_data: What is evaluated after each epoch.
            validation_split: The fraction of ``data``, at its end, that is evaluated instead.
            validation_steps: How many global batches of it; None: all.
            callbacks: One or several.
            class_weight: What examples of each class weigh in the loss, by the class's number.
            sample_weight: What each example weighs, one number for each row of ``(x, y)``. The sum
                of losses is divided by the number of examples, whatever these weigh, as in Keras.
            initial_epoch: Begins that epoch, counted from 0, from its first batch.
            batch_size: The global batch size, where ``data`` brings none; None: 32.
            verbose: Whether the chief shows progress.

        Returns:
            The figures of every epoch, equal on all replicas.

        Raises:
            UserError: Something in the arguments, the data or the model is wrong.
            UnwritableError: The training is complete, and a disk or store has refused its last
                checkpoints: no callback has the trained model. `history` has the figures.
            PreemptedError: The machine is taken away; a backup is written (`BackupAndRestore`).
            TaskLostError: A replica was lost.
        """
        weights = Weights(class_weight, sample_weight)
        check_weights(weights, self.loss)
        if isinstance(self.optimizer, NoOptimizer):
            raise UserError("fit() without an optimizer", "Give the Trainer an optimizer.")
        check_storable(unwrap(self.model))
        callbacks = check_given(callbacks)
        chain = training_data(data, batch_size, weights, self.is_chief)
        if validation_split is not None:
            if validation_data is not None:
                raise UserError("fit() with validation_data and validation_split", "Give one.")
            chain, validation_data = split(chain, validation_split)
        chain = with_class_weights(chain, weights)
        steps = steps_per_epoch or chain.steps_per_epoch
        by_steps = max_steps is not None and not has_epochs(epochs)
        counts = epochs, steps_per_epoch, max_steps, steps, self.accumulate
        epochs = asked_epochs(*counts, first=initial_epoch)
        if not epochs and self.is_chief:
            warn("fit(epochs=0) trains nothing")
        check_documents(unwrap(self.model), chain, self.strategy.num_replicas)
        if steps_per_epoch is None and chain.repeats is None:
            raise UserError("data that repeats without end", "Give steps_per_epoch.")
        if is_wanted():
            profile_and_end(self, chain, steps_per_epoch)
        apart = self.coordination.job.has_evaluator and validation_data is not None
        self.left_to_evaluator = apart and not self.coordination.job.is_evaluator
        self.schedule.check_figures(
            (metric.name for metric in self.metrics),
            validates=validation_data is not None and not self.left_to_evaluator,
        )
        self._fits += 1
        self._given = list(callbacks)
        self._write_to_folder()
        if apart:
            check_callbacks(callbacks)
            if first_checkpoint(callbacks) is None:
                own_checkpoint(self.run_dir)
        validation = None
        check_steps("fit(validation_steps", validation_steps)
        if validation_data is not None and not self.left_to_evaluator:
            size = BATCH if batch_size is None else batch_size
            validation = self._evaluation(validation_data, validation_steps, size)
        backups = [each for each in callbacks if isinstance(each, BackupAndRestore)]
        if len(backups) > 1:
            raise UserError(f"{len(backups)} BackupAndRestore in one fit", "Give one of them.")
        backup = backups[0] if backups else None
        self.notice = backup.notice if backup else Notice()
        if self.coordination.job.is_evaluator:
            self.notice.at_once = True
            with self.notice, self._stepping(True):
                self.history = follow(self, self._given, validation, self._fits, bool(verbose))
            return self.history
        self._note_options()
        found = backup and backup.find(self, trained_on(self, chain, steps_per_epoch))
        if found:
            initial_epoch = None
        restored, self._restored = self._restored, None
        first = self.epoch if restored or found else 0
        first = first if initial_epoch is None else initial_epoch
        if not self.coordination.joins:  # a worker that comes late may have read a newer one
            first = self.coordination.publish(lambda: first)
        if by_steps and max_steps is not None and self.step < max_steps:
            done = into_epoch(restored["loop"], steps_per_epoch) if restored else 0
            left = max_steps - self.step + math.ceil(done / self.accumulate)
            epochs = max(epochs, first + asked_epochs(None, None, left, steps, self.accumulate))
        self.epochs, self.steps_per_epoch, self.max_steps = epochs, steps, max_steps
        self.batch_size, self.examples = chain.batch_size, chain.examples
        self.saves.destinations = {}
        self.stop_training, self.went_on, self._verbose = False, False, bool(verbose)
        self.callbacks = self._all_callbacks() if self.coordination.decides else []
        if self._loop is None or self._loop.chain is not chain:
            self._loop = make_loop(self, chain, self._loop)
            self.strategy.engine.team.pairs.of(self.optimizer).forget()  # of other data
        history, over = found or (History(), False)
        self.history, loop = history, self._loop
        for callback in self.callbacks:
            callback.set_trainer(self)
        if restored:
            loop.load_state_dict(restored["loop"], steps_per_epoch, whole=initial_epoch is not None)
            restore(self._given, restored["callbacks"])
        else:
            loop.begin_anew()
        self.stop_training = over  # a callback had ended it
        over = over or self.is_at_end
        epochs_left = range(first, first if over else epochs)
        with held_outputs(self):
            self._run(loop, epochs_left, steps_per_epoch, validation, history)
        self.coordination.record(loop.record())
        lost = what_is_lost(self.saves.destinations, self.step)
        came: Any = self.coordination.publish(lambda: [asdict(history), self.step, "", *lost])
        self.history, self.step = History(**came[0]), came[1]
        if came[2]:  # under parameter servers the chief alone knows
            raise PreemptedError(came[2])
        self.coordination.synchronize()  # the model is the trained one, on every task
        self._tell_lost(*came[3:])
        return self.history

    def _write_to_folder(self) -> None:
        """What this task does goes into this trainer's run folder, whatever others there were."""
        self.coordination.record_to = self.run_dir
        if self.run_dir is not None:
            status.begin(self.run_dir, str(self.coordination.cluster.task))

    def _run(
        self,
        loop: TrainingLoop,
        epochs: range,
        steps_per_epoch: int | None,
        validation: Evaluation | None,
        history: History,
    ) -> None:
        """Train these epochs, and tell all who must know how that ended."""
        try:
            with self.notice, self.coordination.training(), self._stepping(True):
                loop.run(epochs, steps_per_epoch, validation, history)
                self.saves.finish()
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_train_error(error)
            self.coordination.failed(error)
            self.saves.leave(error)
            if isinstance(error, PreemptedError) and self.coordination.decides:
                why = str(error)
                if self.is_chief:
                    note("%s", why)
                self.coordination.publish(lambda: [asdict(history), self.step, why])
            raise

    @known_names("evaluate")
    @with_its_pair("evaluate")
    def evaluate(
        self,
        data: Any,
        *,
        steps: int | None = None,
        batch_size: int = 32,
        callbacks: Callback | Sequence[Callback] = (),
    ) -> dict[str, Any]:
        """Compute loss and metrics over a data set.

        Args:
            data: Anything that `fit` takes.
            steps: How many global batches to take; None: all.
            batch_size: The global batch size, where ``data`` brings none.
            callbacks: Their ``on_test_*`` hooks are called.

        Returns:
            The figures by name, ``{"loss": ..., "accuracy": ...}``, equal on all replicas and
            exact over all examples.
        """
        check_steps("evaluate(steps", steps)
        given = self._asked(callbacks)
        with self._stepping(True):
            return Figures(
                self.coordination.publish(
                    lambda: self._evaluation(data, steps, batch_size).run(given)
                )
            )

    @known_names("predict")
    @with_its_pair("predict")
    def predict(
        self,
        data: Any,
        *,
        steps: int | None = None,
        batch_size: int = 32,
        callbacks: Callback | Sequence[Callback] = (),
    ) -> Any:
        """Compute the model's outputs for a data set.

        Args:
            data: Anything that `fit` takes. It may hold targets, which are left out, and is not
                shuffled.
            steps: How many global batches to take; None: all.
            batch_size: The global batch size, where ``data`` brings none.
            callbacks: Their ``on_predict_*`` hooks are called.

        Returns:
            The outputs in the order of the data, all of them on every replica: tensors of shape
            ``(examples, ...)``, in a tuple or dict where the model returns one.
        """
        check_steps("predict(steps", steps)
        chain = replace(
            as_dataset(data, batch_size), shuffled=False, padded=True, corrupt_limit=0, repeats=1
        )
        self.coordination.synchronize()
        has_loss = self.loss is not None or self._custom_step is not None
        with evaluating(self.model), self._stepping(False):
            return predicted(
                self.strategy, self.model, chain, steps, has_loss, self._asked(callbacks)
            )

    @with_its_pair()
    def find_learning_rate(
        self,
        data: Any,
        *,
        low: float = 1e-6,
        high: float = 1.0,
        steps: int = 100,
        batch_size: int = 32,
    ) -> LearningRates:
        """Find a learning rate to begin with, by a short training in which it grows.

        Model and optimizer are afterwards what they were before. The suggestion is where the loss
        fell fastest: a good rate to try, and no more.

        Args:
            data: Anything that `fit` takes.
            low: The rate of the first step.
            high: That of the last one, unless the loss has grown to four times its best before.
            steps: How many steps at most.
            batch_size: The global batch size, where ``data`` brings none.

        Returns:
            The rates, the losses, and the suggestion, equal on all replicas.

        Raises:
            UserError: The rates do not grow, or workers do not meet in a step.
        """
        return find_learning_rate(self, data, low, high, steps, batch_size)

    @with_its_pair()
    def find_batch_size(
        self,
        data: Any,
        *,
        low: int | None = None,
        high: int | None = None,
        steps: int = 3,
        memory: float = 0.8,
        gain: float | None = 0.05,
    ) -> BatchSizes:
        """Find a global batch size to train with, by short trials in which it doubles.

        It ends where twice the size may need more memory than is free, where two sizes in a row
        are no quicker than one before, or where there are no more examples. What a size will need
        is computed from those before, so that nothing is killed to find out. Model, optimizer and
        generators are afterwards what they were before. A line says what was chosen, and why.

        Args:
            data: Anything that `fit` takes whose examples are counted; its own batch size does not
                matter.
            low: The first size; None: two examples for each replica.
            high: The largest; None: all examples.
            steps: How many updates of each size are timed.
            memory: The part of what is free at the beginning that may be used, of RAM and of the
                device.
            gain: How much quicker a size must be to count, 0.05 is 5 %. None: time does not
                matter, and the suggestion is the largest that fits.

        Returns:
            The sizes, their examples per second, and the suggestion, equal on all replicas.

        Raises:
            UserError: There is nothing to try, or workers do not meet in a step.
        """
        return find_batch_size(self, data, low, high, steps, memory, gain)

    @with_its_pair("save")
    def save(
        self,
        path: Where,
        about: Callable[[], Mapping[str, Any]] | None = None,
        *,
        asynchronous: bool = False,
        then: Callable[[], None] | None = None,
        otherwise: Callable[[], None] | None = None,
    ) -> Where:
        """Write a checkpoint from which any strategy goes on; every replica calls it.

        Args:
            path: Its directory, which holds the model as ``model.safetensors``; or its URL in a
                store, where nothing may be yet.
            about: On the chief, what the manifest is to say beside the files, as JSON.
            asynchronous: Whether training goes on while it is written: a copy is taken, from which
                a thread writes. The next `save` or `load`, `wait` and the
                end of `fit` wait for it.
            then: What the chief does when the checkpoint is there.
            otherwise: What all replicas do where the disk is full, or refuses: then that is a
                warning and no error.

        Returns:
            The path; the checkpoint is there, unless ``asynchronous`` or with ``otherwise``.

        Raises:
            UserError: On all replicas, when it cannot be written; for an asynchronous one it comes
                from the call that waits. Under `parameter_server` the chief alone writes, and
                raises: workers do not wait for it.
        """
        if is_remote(str(path)) and not local_path(str(path)):
            stored = StoredCheckpoint(str(path))
            self.saves.save(
                stored.path,
                lambda: stored.begin(about),
                lambda: stored.end(then),
                asynchronous,
                otherwise,
            )
        else:
            self.saves.save(Path(local_path(str(path))), about, then, asynchronous, otherwise)
        return path

    @with_its_pair("save")
    def save_weights(self, path: str | Path) -> Path:
        """Write the model's weights alone into one file; every replica calls it.

        Args:
            path: Ends with ``.safetensors``, or with ``.pt``, ``.pth`` or ``.bin`` for a file that
                ``torch.load`` reads. ``{epoch}``, ``{step}`` and the figures of the last epoch
                stand for their values: ``"best-{epoch:02d}-{val_loss:.3f}.safetensors"``. A file
                that is there is replaced.

        Returns:
            The file, which has the names that the model itself has, under any strategy.

        Raises:
            UserError: On all replicas, when it cannot be written. Under `parameter_server` the
                chief alone writes, and raises: workers do not wait for it.
        """
        return save_weights(self, path)

    @with_its_pair("load")
    def load_weights(self, path: str | Path, *, strict: bool = True) -> Loaded:
        """Take the model's weights from a file; optimizer, step and schedule stay as they are.

        Args:
            path: A ``.safetensors`` file, one of ``torch.save``, a checkpoint of any trainer, or a
                folder with the safetensors of Transformers or timm. Every replica reads it.
            strict: Whether names that only one of both has are an error.

        Returns:
            The names that were not loaded: ``missing`` in the file, and ``unexpected`` there.

        Raises:
            UserError: On all replicas, when one cannot read it, or it does not fit the model.
        """
        return load_weights(self, path, strict)

    @with_its_pair("save")
    def wait(self) -> None:
        """Wait until an asynchronous `save` is written; every replica calls it.

        Raises:
            UserError: On all replicas, when it could not be written.
        """
        self.saves.finish()

    @with_its_pair("load")
    def load(self, path: str | Path) -> None:
        """Take back what `save` or `ModelCheckpoint` wrote; the next `fit` goes on from there.

        Args:
            path: One checkpoint, or a folder of them, whose newest is taken; or the URL of either
                in a store. Every replica reads it.

        Raises:
            UserError: On all replicas, when one cannot read it, or they read different ones.
        """
        self.saves.finish()
        self._note_options()
        found = find_together(self.coordination, path)
        self.strategy.load(found)
        state = read_sections(found, "trainer", "accumulated")
        saved = state.get("trainer")
        if saved is None:  # a model alone
            return
        self.step, self.epoch = saved["step"], saved["epoch"]
        self.loss_buffers.take(saved.get("loss", {}))
        self.schedule.go_on(saved["scheduler"], saved.get("ahead", 0))
        self.coordination.follow(self.schedule.by_step, self.schedule.ahead)
        self._restored = saved if saved["loop"] else None
        if self._restored and (waiting := state.get("accumulated")):  # of an earlier version
            saved["loop"]["data"].setdefault("accumulated", waiting["batches"])

    @property
    def data_wait_fraction(self) -> float:
        """The fraction of this epoch's time so far that this replica waited for data."""
        return self._loop.clock.wait_fraction if self._loop else 0.0

    @property
    def examples_per_second(self) -> float:
        """Examples that all replicas trained on per second of this epoch so far."""
        return self._loop.clock.rate if self._loop else 0.0

    @property
    def is_at_end(self) -> bool:
        """Whether as many steps are done as `fit` was asked for."""
        return self.max_steps is not None and self.step >= self.max_steps

    @property
    def ends_next(self) -> bool:
        """Whether the next update is the last one that `fit` was asked for."""
        return self.max_steps is not None and self.step + 1 >= self.max_steps

    @property
    def goes_on(self) -> bool:
        """Whether the next `fit` goes on where `load` has found that another one was."""
        return self._restored is not None

    def _position(self) -> Position:
        """Where the training is."""
        epoch, batch = (0, 0) if self._loop is None else self._loop.position
        return Position(epoch, batch, self.step)

    def _stepping(self, steps: bool) -> AbstractContextManager[None]:
        """A block in which the model is called as ``train_step`` does, or as without one."""
        own = self._custom_step
        return nullcontext() if own is None else own.stepping(steps)

    def _note_options(self) -> None:
        """Remember the optimizer's options before anything is trained or loaded."""
        self.first_options = self.first_options or options_of(self.optimizer)

    def _all_callbacks(self) -> list[Callback]:
        return with_own(self, self._given, self._folder, self._fits, self._verbose)

    def _tell_lost(self, what: str, everywhere: bool) -> None:
        """Say what callbacks could not write at the end; an error where none has the model."""
        if everywhere:
            raise UnwritableError(
                f"the training is complete, and the trained model is not saved: {what}",
                "It is still in this process: make space, and call trainer.save(folder) where "
                "you catch this error. Or start again: what is there goes on.",
            )
        if what and self.is_chief:
            warn("%s", what)

    def _asked(self, callbacks: Callback | Sequence[Callback]) -> list[Callback]:
        """The callbacks of an `evaluate` or `predict`, on tasks that have callbacks."""
        given = check_given(callbacks) if self.coordination.decides else []
        for callback in given:
            callback.set_trainer(self)
        return given

    def _evaluation(self, data: Any, steps: int | None, batch_size: int) -> Evaluation:
        chain: Dataset = as_dataset(data, batch_size)
        check_documents(unwrap(self.model), chain, self.strategy.num_replicas)
        if steps is None and chain.repeats is None:
            raise UserError("validation data that repeats without end", "Give validation_steps.")
        return Evaluation(
            self.strategy, self.model, self.loss, self.metrics, chain, steps, self._compute_metrics
        )
