"""What the doctors of a cluster say to each other, and the facts that they collect."""

from __future__ import annotations

import msgspec

OK = "ok"


class Name(msgspec.Struct, frozen=True):
    """What a host's name means on one task; ``error`` when it means nothing there."""

    host: str
    addresses: list[str] = []
    error: str = ""


class Route(msgspec.Struct, frozen=True):
    """How packets leave a task for ``host``: the interface and our own address on it."""

    host: str
    interface: str
    source: str


class Port(msgspec.Struct, frozen=True):
    """The port at which a task is to listen: ``holder`` has it unless it is ``free``.

    ``foreign``: its host is no address of the task's machine.
    """

    number: int
    free: bool
    holder: str = ""
    agent: bool = False
    """torchrun's own agent has it, as it should."""
    foreign: bool = False
    last: int = 0
    """The last of the range that it is the first of, if a range is allowed and all are taken."""
    drawn: int = 0
    """The one that the system drew instead, where that will do."""


class Memory(msgspec.Struct, frozen=True):
    """Bytes of a task's machine; ``limit`` is its cgroup's, None where there is none."""

    total: int
    available: int
    limit: int | None = None


class Space(msgspec.Struct, frozen=True):
    """Bytes of a file system."""

    path: str
    size: int
    free: int


class Facts(msgspec.Struct, frozen=True):
    """What one task knows about itself and its machine."""

    task: str
    host: str
    machine: str
    """Equal for the tasks of one kernel."""
    network: str
    """Equal for the tasks that share a loopback."""
    shares: str
    """Equal for the tasks that share their cores."""
    ipc: str
    """Equal for the tasks that can share memory."""
    source: str
    """Where the task read who it is."""
    would: str
    """What training would do here."""
    remarks: list[str]
    """What is worth knowing about that source."""
    cluster: dict[str, list[str]]
    python: str
    versions: dict[str, str]
    cores: int
    quota: float | None
    """Cores that the cgroup grants; None where it does not say."""
    omp: str | None
    """``OMP_NUM_THREADS``."""
    memory: Memory
    shm: Space | None
    disks: list[Space]
    gpus: list[str]
    group: bool = False
    """Whether replicas would form a process group, of gloo or NCCL."""
    share: bool = True
    """Whether replicas that can share memory would."""
    refusal: str = ""
    """Why training would not begin to listen, "" where it would."""
    port: Port | None = None
    """None where nothing says which one."""
    names: list[Name] = []
    routes: list[Route] = []


class Target(msgspec.Struct, frozen=True):
    """Where a task's doctor listens."""

    task: str
    host: str
    port: int


class Knocked(msgspec.Struct, frozen=True):
    """What came of one task's connection to another: ``how`` is `OK`, or a key of `FAILURES`."""

    source: str
    target: str
    address: str
    how: str
    detail: str = ""


class Speed(msgspec.Struct, frozen=True):
    """Of one pair, in one direction: half of no round trip, the whole; bytes/s; clock ahead."""

    source: str
    target: str
    latency: float
    """Seconds of the fastest round trip."""
    bandwidth: float
    """Bytes per second from source to target."""
    clock: float
    """Seconds by which the target's clock is ahead of the source's."""


FAILURES = {
    "unresolved": "its name does not resolve",
    "refused": "refused: nobody listens there",
    "dropped": "no answer to the connection: a firewall drops it, or the machine is off",
    "unroutable": "no route to it",
    "silent": "it accepts the connection and says nothing: frozen, or another program",
    "stranger": "another program answers there",
    "outsider": "a task of Spartito that does not know our secret: one of another job, a running "
    "one, or one with another SPARTITO_SECRET",
    "closed": "it accepts the connection and closes it at once: a proxy, or another program",
    "wrong task": "another task answers there",
    "late": "no time was left to try",
}
"""What may come of a connection, in words."""


class Message(msgspec.Struct, frozen=True, tag_field="spartito_doctor"):
    """One line of JSON between two doctors."""


class Ping(Message, frozen=True, tag="ping"):
    """Who are you, and what time is it?"""


class Pong(Message, frozen=True, tag="pong"):
    """The answer."""

    task: str
    clock: float


class Push(Message, frozen=True, tag="push"):
    """So many bytes follow; the answer, once they have come, is a `Pong`."""

    size: int


class Join(Message, frozen=True, tag="join"):
    """A task comes to the one that leads; its doctor listens at ``host`` ("": as seen)."""

    facts: Facts
    port: int
    host: str = ""


class Invite(Message, frozen=True, tag="invite"):
    """The one that leads has come itself: the answer is a `Join`, unless the task is in."""


class Welcome(Message, frozen=True, tag="welcome"):
    """The task is in; it hears its orders for at most so many seconds."""

    seconds: float


class Refused(Message, frozen=True, tag="refused"):
    """The task is not let in."""

    why: str


class Knock(Message, frozen=True, tag="knock"):
    """An order: connect to all of these at the same time, within so many seconds."""

    targets: list[Target]
    seconds: float


class Knocks(Message, frozen=True, tag="knocks"):
    """What came of it."""

    found: list[Knocked]


class Measure(Message, frozen=True, tag="measure"):
    """An order: measure the way to this one, within so many seconds."""

    target: Target
    seconds: float


class Measured(Message, frozen=True, tag="measured"):
    """What came of it; None when it failed."""

    speed: Speed | None


class End(Message, frozen=True, tag="end"):
    """All is said; the task exits with this code."""

    code: int
    words: str


Question = Ping | Push | Join | Invite
"""What a doctor that listens may be asked."""

Order = Knock | Measure | End | Refused | Welcome
"""What the one that leads says."""
