"""The operations of a group whose ranks are on one machine."""

from __future__ import annotations

from spartito.backend.alarm import RankAlarm
from spartito.backend.mail import RESERVE, Mail
from spartito.collectives.membership.store import Membership
from spartito.collectives.memory.memory_operations import SharedMemoryOperations
from spartito.collectives.memory.rank_memory import Memory


class OneMachine(SharedMemoryOperations):
    """Collective operations and messages, by memory that the ranks share.

    Args:
        group: The ranks, and the store where they meet.
        spins: Whether there is a core for each rank.
    """

    address = ""

    def __init__(self, group: Membership, spins: bool) -> None:
        super().__init__(Memory(group, spins, RankAlarm(group), reserve=RESERVE))
        self._mail = Mail(self.memory)
        self.begin = self.memory.begin
        self.send, self.receive = self._mail.send, self._mail.receive
