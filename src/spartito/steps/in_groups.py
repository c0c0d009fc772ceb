"""A replica that may be a member of a group: all of them together are one worker to the others."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from spartito.cluster.spec import Task
from spartito.collectives.collective import Collective
from spartito.data.batch import Batch
from spartito.engine.gradients import Gradients
from spartito.errors import UserError
from spartito.local.plan import Members
from spartito.ps.job import Options
from spartito.steps.inside import Inside
from spartito.steps.pusher import GroupGradients, ServedGradients
from spartito.steps.replica import ReplicaStep


class InGroups(ReplicaStep):
    """Gradients, BatchNorm and draws are those of one's own group, which `inside` joins."""

    inside: Inside = Inside.alone()
    """One's own group; alone before the groups are made."""
    _workers: list[Task]
    """The tasks that compute."""
    _members: Members
    """The workers of each group, by their indices."""

    def _enter_group(self, options: Options) -> None:
        """Meet one's own group, whose members all call this, if there is a group of several."""
        if self.in_groups:
            self.inside = Inside.connect(
                self.cluster, self._members, options.timeout, options.shared_memory,
                options.lease_seconds,
            )  # fmt: skip
            self._sync_batchnorm = self.inside.several

    @property
    def in_groups(self) -> bool:
        """Whether a group has several workers."""
        return len(self._members) < len(self._workers)

    @property
    def _group_index(self) -> int:
        """The number of one's own group; -1 in none."""
        own = self._workers.index(self.task) if self.task in self._workers else -1
        return next((g for g, members in enumerate(self._members) if own in members), -1)

    @property
    def _speakers(self) -> list[Task]:
        """The first member of each group."""
        return [self._workers[members[0]] for members in self._members]

    def _check_device(self) -> None:
        if self.in_groups and self.device.type != "cpu":
            raise UserError(
                f"groups of several workers over servers on {self.device}: they run on CPUs",
                "Give each group one worker, or device='cpu'.",
            )

    def _check_backward(self) -> None:
        """Refuse to weigh several backward passes of an update, of which nobody else knows."""
        if self.inside.several and self._pairs.only.gradients.backward_calls:
            raise UserError(
                "several backward passes of an update in groups of several workers over servers",
                "Make one of each batch, or give each group one worker.",
            )

    def _summing(self) -> Collective:
        return self.inside.group

    @property
    def _runs_without_rows(self) -> bool:
        return self.inside.several

    def _loss_divisor(self, batch: Batch) -> float:
        if self.inside.several:
            return float(batch.global_size or 1)  # all members know it
        return float(batch.size or 1)  # a push is the mean over its own examples

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        whole = model
        alone = self.cluster.local_size == 1  # among the workers of this machine
        if self.device.type == "cuda" and alone and torch.cuda.device_count() > 1:
            whole = nn.DataParallel(model)  # divides the local batch over all its devices
        if self.inside.several:
            return whole, GroupGradients(optimizer, self.inside.group)
        return whole, ServedGradients(optimizer)
