"""The operations of a group whose ranks are on one machine."""

from __future__ import annotations

from torch import Tensor

from spartito.backend.alarm import RankAlarm
from spartito.backend.mail import RESERVE, Mail
from spartito.backend.work import Done, Receive
from spartito.collectives.memory import Memory
from spartito.collectives.memory_operations import SharedMemoryOperations
from spartito.collectives.store import Membership


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

    def send(self, tensor: Tensor, target: int, tag: int) -> Done:
        """Leave ``tensor`` for rank ``target``; does not wait for it."""
        return self._mail.send(tensor, target, tag)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Receive:
        """Want a message of this size from rank ``source``, None is any."""
        return self._mail.receive(tensor, source, tag)
