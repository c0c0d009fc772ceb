"""What groups that train apart count."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.engine.devices.host_reads import Number


@dataclass(slots=True)
class Since:
    """What a group did since the last meeting.

    Attributes:
        updates: How many; equal in all groups, also in one that had no examples.
        weight: What their losses were divided by, in sum.
        asked: Whether one of the group's tasks asked for an end.
    """

    updates: int = 0
    weight: Number = 0.0
    asked: bool = False


@dataclass(slots=True)
class Meetings:
    """What the meetings of an epoch came to.

    Attributes:
        count: How many there were.
        drift: The distances of the groups' models from their mean (L2 norm, root of the weighted
            mean square), added up.
        nbytes: What the parameters took that this task sent to other groups' leaders.
    """

    count: int = 0
    drift: float = 0.0
    nbytes: int = 0
