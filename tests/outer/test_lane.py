"""What a thread beside the computation sends is counted once, also while it sends."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.collectives.collective import IdentityCollective, Traffic
from spartito.collectives.lane import Lane


@dataclass
class Busy(Traffic):
    """As if the thread always sent seven bytes more just after somebody has looked."""

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name in ("sent", "received"):
            object.__setattr__(self, name, found + 7)
        return found


def test_what_is_sent_while_it_is_counted_is_counted_next() -> None:
    group, total = IdentityCollective(), IdentityCollective()
    group.traffic = Busy(100, 200)
    lane = Lane(group)
    for times in (1, 2, 3):
        lane.count_for(total)
        assert (total.traffic.sent, total.traffic.received) == (93 + 7 * times, 193 + 7 * times)
