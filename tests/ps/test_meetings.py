"""Who is waited for at a meeting of groups, by the leases that are out."""

from __future__ import annotations

from contextlib import closing

from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.work import Arrival, Lease
from spartito.ps.scheduler.coordinator import Coordinator
from tests.ps import coordination as co


def test_leases_of_two_streams_are_different_ones() -> None:
    """Each stream numbers its own: what was agreed of the first is nothing to the second."""
    rules = Rules(2, quorum=2, every=2)
    with closing(Coordinator(["first", "second"], rules=rules, timeout=co.LIMIT)) as coordinator:
        sessions = [coordinator.enter(group) for group in range(2)]

        def take(group: int, stream: int) -> Lease:
            found = coordinator.take(group, stream, 0, None, wait=False)
            assert isinstance(found, Lease)
            return found

        def come(group: int, stream: int, lease: Lease) -> int | None:
            """With how many it is merged; None: others are waited for."""
            arrival = Arrival(stream, lease.id, 1.0, updates=2)
            merge = coordinator.meetings.ask(group, arrival, 0.0)
            return None if merge is None else merge.parties

        for stream in range(3):
            coordinator.open(stream, co.plan(steps_per_pass=2, multiple=2))
            leases = [take(group, stream) for group in range(2)]
            early = stream % 2
            assert come(early, stream, leases[early]) is None
            assert come(1 - early, stream, leases[1 - early]) == 2
            assert come(early, stream, leases[early]) == 2
            for group, lease in enumerate(leases):
                coordinator.take(group, stream, 0, co.report(lease), wait=False)
        for group, session in enumerate(sessions):
            coordinator.leave(group, session, lost=False)
