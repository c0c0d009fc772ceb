"""All tasks of a job by their groups, which tell each other why one of them ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.hierarchical import HierarchicalCollective
from spartito.collectives.membership.liveness import GRACE, LivenessCheck
from spartito.collectives.membership.placement import Placement
from spartito.collectives.membership.store import Membership
from spartito.errors import SpartitoError, TaskLostError
from spartito.outer.delayed_step import Line, Now


class JoinedGroups(HierarchicalCollective):
    """Groups whose first tasks, their leaders, speak for them.

    A group that loses a task, or is in other calls, leaves the reason to the others, who would
    name its leader otherwise.

    On a leader ``line`` is where meetings are held.

    Args:
        rank: This task's.
        names: Of all tasks.
        placement: The groups, in place of machines.
        inside: One's own group.
        meet_leaders: Joins the leaders, who alone call it.
        leaders: On those who exchange something with other groups, where they can leave a word.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        placement: Placement,
        inside: Collective,
        meet_leaders: Callable[[], Collective],
        leaders: Membership | None,
    ) -> None:
        self._liveness = None if leaders is None else LivenessCheck(leaders)
        self.line: Line = Now(IdentityCollective())
        super().__init__(rank, names, placement, inside, meet_leaders)
        self.line = Now(self.between)

    def abort(self, error: SpartitoError) -> None:
        liveness, self._liveness = self._liveness, None
        if liveness is None:
            self._leave(error)
        else:
            liveness.leave(error, lambda: self._leave(error))

    def _leave(self, error: SpartitoError) -> None:
        self.line.close()
        self.line.group.close()  # the others may wait there
        super().abort(error)

    def across(self, work: Callable[[], object], numbers: Tensor | None = None) -> None:
        def named() -> None:
            try:
                work()
            except TaskLostError as error:
                raise self.reason(error) from error

        super().across(named, numbers)

    def close(self) -> None:
        self.line.close()
        if self._liveness is not None:
            self._liveness.close()
        super().close()

    def reason(self, error: SpartitoError) -> SpartitoError:
        """Why a task of another group that is lost has left, if it said so; else the error.

        Args:
            error: What this task has found, in an exchange with other groups.
        """
        if not isinstance(error, TaskLostError):
            return error
        # Who is alone in its group waits for nobody there, and says at once what it has to say.
        grace = GRACE if self.world_size > len(self._placement.machines) else 0.0
        found = None if self._liveness is None else self._liveness.reason(error, grace)
        return error if found is None else found
