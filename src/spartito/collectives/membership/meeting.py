"""Where the tasks of a job come first: the store, and who keeps it."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import msgspec
import torch.distributed as dist

from spartito.cluster.endpoints import rendezvous_endpoint, warn_if_open
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.cluster.store.client import Store
from spartito.cluster.store.server import Server
from spartito.collectives.membership.generations import Card, Generation
from spartito.collectives.membership.lifeline import Lifeline
from spartito.collectives.membership.regrouping import REPLY, Assembly, keys_of
from spartito.collectives.membership.store import KeyValues, Membership, ask, lost_with, quiet_torch
from spartito.collectives.membership.torch_store import OfTorch
from spartito.errors import TaskLostError
from spartito.life import Life
from spartito.names import ENV_STORE
from spartito.waiting import Waiting
from spartito.wire.addresses import is_loopback, split_address
from spartito.wire.dialing import dial
from spartito.wire.limits import RETRY_SECONDS
from spartito.wire.listening import listen
from spartito.wire.secret import Key, key_at

_visits = Counter[int | None]()  # of this process so far: to the job's store, or a keeper's own


class Kept:
    """A store that this process keeps as long as somebody holds this."""

    def __init__(self, server: Server) -> None:
        self.server = server
        weakref.finalize(self, server.close).atexit = False


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a task has once it has come: the job's store, and who trains together now.

    Attributes:
        store: The job's.
        keeper: What errors call the task that keeps it.
        generation: Those who train together.
        assembly: Where tasks may be replaced: how they agree on the next generation.
    """

    store: KeyValues
    keeper: str
    generation: Generation = Generation(0, ())  # noqa: RUF009 (it is frozen)
    assembly: Assembly | None = None

    @property
    def keys(self) -> KeyValues:
        """What the generation has for itself."""
        return self.store.under(keys_of(self.generation.number))

    @property
    def is_newcomer(self) -> bool:
        """Whether the others train already, without this process."""
        return self.assembly is not None and not self.generation.has(self.assembly.own)


def meet(
    cluster: ClusterSpec,
    names: list[str],
    limit: float,
    recovery: Recovery | None = None,
    own_keeper: int | None = None,
) -> Meeting:
    """The job's store, once every replica is there.

    With ``recovery`` a process that comes when the others have begun is a newcomer. A rank that is
    ``own_keeper`` has a store for these tasks alone, also where the job has one.

    Raises:
        TaskLostError: Names those who do not come within ``limit`` seconds.
        UserError: What keeps the store is another program, or has another secret.
    """
    warn_if_open(cluster)
    kept = os.environ.get(ENV_STORE, "") if own_keeper is None else ""
    host, port = split_address(kept or cluster.rendezvous or "")
    key = key_at(host)
    # torchrun's agent keeps a store at this address already, over restarts of the workers too.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not kept
    agent = agent and own_keeper is None
    recovery = None if agent else recovery
    keeper = "the launcher" if kept else "torchrun" if agent else names[own_keeper or 0]
    serves = cluster.rank == (own_keeper or 0) and not agent and not kept
    end = time.monotonic() + limit
    # All tasks count alike how often they came to the job's store; not all come to others.
    _visits[own_keeper] += 1
    is_first = _visits[own_keeper] == 1
    # A store of a launcher keeps the keys of earlier visits of the same processes.
    visit = _visits[own_keeper] if agent or kept or recovery else 0
    prefix = f"spartito/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{visit}"
    store: KeyValues | None = kept_here(cluster, keeper, limit, key) if serves else None
    while True:
        if store is None:
            dial(host, port, keeper, limit, end).close()
            store = _of_agent(host, port, limit) if agent else _at(host, port, keeper, limit, key)
        meeting = Meeting(store.under(prefix), keeper)
        try:
            if recovery is not None:
                return _gathered(meeting, cluster, names, end, limit, recovery, is_loopback(host))
            count = ask(partial(meeting.store.add, f"rank/{cluster.rank}", 1), limit, keeper)
            if count == 1:
                break
        except TaskLostError:
            if serves or is_first or time.monotonic() > end:
                raise
        else:
            # That may have been this one: the store of an earlier job goes a moment later.
            if serves or time.monotonic() > end:
                raise TaskLostError(
                    f"another process has come to {host}:{port} as {names[cluster.rank]}",
                    "Each task is one process: give this one a rank or an address of its own.",
                )
        store.close()
        store = None
        time.sleep(RETRY_SECONDS)
    _sign_in(meeting, cluster, names, end, limit)
    return meeting


def _gathered(
    meeting: Meeting,
    cluster: ClusterSpec,
    names: list[str],
    end: float,
    limit: float,
    recovery: Recovery,
    is_here: bool,
) -> Meeting:
    """The meeting of a job whose tasks may be replaced; ``is_here``: so is its store."""
    assert isinstance(meeting.store, Store)
    rank = cluster.rank
    own = Card(str(cluster.task), rank, cluster.local_rank, secrets.token_hex(8), Life.own())
    store, patience = meeting.store.within(REPLY), REPLY if is_here else limit
    with lost_with(meeting.keeper):
        lifeline = Lifeline(store, own.token)
        assembly = Assembly(store, own, tuple(names), recovery, patience, lifeline)
        generation = assembly.current()
        if generation is None:
            texts = _sign_in(meeting, cluster, names, end, limit, msgspec.json.encode(own).decode())
            cards = tuple(msgspec.json.decode(text, type=Card) for text in texts)
            generation = assembly.begin(cards)
    return replace(meeting, generation=generation, assembly=assembly)


def _sign_in(
    meeting: Meeting,
    cluster: ClusterSpec,
    names: list[str],
    end: float,
    limit: float,
    text: str = "",
) -> list[str]:
    """The texts of all, once they are there; ``limit`` is what errors say."""
    start, rank = time.monotonic(), cluster.rank
    left = max(0.0, end - start)
    world = Membership(rank, names, meeting.store, left, meeting.keeper).under("came")
    missing, texts = world.sign_in(left, text, Waiting(rank, names))
    if missing:
        raise TaskLostError(
            f"{' and '.join(missing)} did not come to {cluster.rendezvous} within {limit:g} s",
            "Start it, or correct the address; SPARTITO_TIMEOUT sets the limit in seconds.",
        )
    return texts


def kept_here(cluster: ClusterSpec, name: str, limit: float, key: Key) -> Store:
    """A store in this process, at the job's rendezvous; it ends with the last who holds it."""
    listener = listen(rendezvous_endpoint(cluster), limit)
    kept = Kept(Server(listener, key, name))
    host, port = kept.server.address
    return _at(host, port, name, limit, key, kept)


def _at(host: str, port: int, name: str, limit: float, key: Key, keeps: object = None) -> Store:
    """The store at an address where it is kept already."""
    return Store(host, port, key, limit, f"{name} at {host}:{port}", keeps)


def _of_agent(host: str, port: int, limit: float) -> OfTorch:
    """The store that torchrun keeps."""
    quiet_torch()
    seconds = timedelta(seconds=limit)
    made = ask(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=seconds),
        limit,
        f"torchrun at {host}:{port}",
    )
    return OfTorch(made)
