"""A compose file as the user gave it: what job it describes, and what that needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.cluster.tf_config import from_tf_config
from spartito.declared import parse
from spartito.errors import UserError
from spartito.launch.containers.plan import JOB_NAME
from spartito.names import ENV_SECRET, ENV_SECRET_FILE, ENV_STRATEGY, ENV_TLS
from spartito.registry import strategy_info

RESTARTS_LABEL = "spartito.restarts"
"""By which a compose file says how often who follows the job starts a lost task again."""

SECRET = "spartito"
"""What a compose file calls the job's secret; it is ``/run/secrets/spartito`` in containers."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of this machine in a container that runs as ``user``, as ``1000:1000``."""

    path: Path
    written: bool
    user: str

    @property
    def owner(self) -> tuple[int, int] | None:
        """The numbers of user and group; None where they are names."""
        return owner_of(self.user)

    def is_open(self) -> bool:
        """Whether the container's user can use it, by its owner and its mode."""
        state = self.path.stat()
        if self.owner is None or self.owner[0] == 0:
            return True
        user, group = self.owner
        shift = 6 if user == state.st_uid else 3 if group == state.st_gid else 0
        needed = 0o7 if self.written else 0o5
        return state.st_mode >> shift & needed == needed


@dataclass(frozen=True, slots=True)
class JobFile:
    """A compose file as `read_job` found it; ``text`` is what it says, word for word."""

    path: Path
    name: str
    services: Mapping[str, Mapping[str, Any]]
    text: str

    @property
    def images(self) -> list[str]:
        """The images that the services need."""
        return sorted({str(service["image"]) for service in self.services.values()})

    @property
    def folders(self) -> list[Folder]:
        """The folders of this machine that containers mount, each once."""
        found = [
            Folder(
                (self.path.parent / str(volume["source"]).replace("$$", "$")).resolve(),
                not volume.get("read_only"),
                str(service.get("user", "0")),
            )
            for service in self.services.values()
            for volume in service.get("volumes", [])
            if isinstance(volume, dict) and volume.get("type") == "bind"
        ]
        return list(dict.fromkeys(found))

    @property
    def secret(self) -> Path | None:
        """The file with the job's secret, None where it has none."""
        secrets = yaml.safe_load(self.text).get("secrets") or {}
        file = secrets.get(SECRET, {}).get("file")
        return None if file is None else self.path.parent / str(file).replace("$$", "$")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The services that are tasks of the job: all but its store."""
        return tuple(name for name, one in self.services.items() if not _keeps_store(one))

    @property
    def recovery(self) -> Recovery | None:
        """How the job goes on when a task is lost; None: it ends."""
        return Recovery.from_environment(self._environment(self.tasks[0]))

    def restarts(self, service: str) -> int:
        """How often who follows the job starts a lost ``service`` again."""
        labels = self.services[service].get("labels")
        text = str(labels.get(RESTARTS_LABEL, "")) if isinstance(labels, dict) else ""
        return int(text) if text.isdigit() else 0

    @property
    def is_partial(self) -> bool:
        """Whether other files have tasks of the same job, for other machines."""
        specs = [self.spec(name) for name in self.tasks]
        counts = [sum(map(len, spec.addresses.values())) for spec in specs if spec is not None]
        return len(self.tasks) < max(counts, default=0)

    @property
    def leader(self) -> str | None:
        """The service of the coordinator; None where that runs on another machine.

        A service without a ``TF_CONFIG`` is taken for one.
        """
        specs = {name: self.spec(name) for name in self.tasks}
        return next((name for name, spec in specs.items() if spec is None or spec.is_chief), None)

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers, on this machine or on another."""
        specs = [self.spec(name) for name in self.tasks]
        named = {self._environment(name).get(ENV_STRATEGY, "") for name in self.services}
        return any(spec is not None and spec.addresses.get("ps") for spec in specs) or any(
            map(_needs_servers, named)
        )

    @property
    def insecurity(self) -> str:
        """What others could do to its tasks, for the first line; "" for nothing."""
        each = [self._environment(name) for name in self.services]
        if len(each) == 1 and not self.is_partial:
            return ""
        if self.secret is None and not any({ENV_SECRET, ENV_SECRET_FILE} & {*env} for env in each):
            return "insecure: this job has no secret, so whoever reaches its tasks can take part"
        off = any(env.get(ENV_TLS) == "off" for env in each)
        return f"insecure: what tasks send is not encrypted ({ENV_TLS}=off)" if off else ""

    def spec(self, service: str) -> ClusterSpec | None:
        """The whole job, by the ``TF_CONFIG`` of ``service``; None where the file has none."""
        return from_tf_config(self._environment(service))

    def _environment(self, service: str) -> dict[str, str]:
        environment = self.services[service].get("environment")
        given = environment if isinstance(environment, dict) else {}
        return {str(key): str(value) for key, value in given.items()}

    def goes_on_without(self, service: str) -> bool:
        """Whether the engine starts a lost ``service`` again while the others go on."""
        return str(self.services[service].get("restart", "no")) != "no"


def _needs_servers(strategy: str) -> bool:
    try:
        return strategy_info(parse(strategy, checked=False).name).needs_servers
    except UserError:  # its tasks say what is wrong with it
        return False


def _keeps_store(service: Mapping[str, Any]) -> bool:
    return "spartito.cluster.store" in (service.get("command") or ())


def owner_of(user: str) -> tuple[int, int] | None:
    """The numbers of user and group of ``1000:1000``; None where they are names."""
    name, _, group = user.partition(":")
    numbers = name, group or name
    return (int(numbers[0]), int(numbers[1])) if all(map(str.isdigit, numbers)) else None


def read_job(path: Path) -> JobFile:
    """The job that the file describes; `UserError` when it is none."""
    advice = "Write one with: spartito cluster compose mnist --workers 2 > compose.yaml"
    try:
        text = path.read_text()
        document = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", advice) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}", advice) from error
    services = document.get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or not services:
        raise UserError(f"{path} has no services", advice)
    for name, service in services.items():
        if not isinstance(service, dict) or "image" not in service:
            raise UserError(f"{path}: the service {name!r} has no image", advice)
    name = document.get("name")
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise UserError(
            f"{path} has {f'the name {name!r}' if name else 'no name'}",
            "Add a line 'name: digits', for example: small letters, digits, - and _.",
        )
    return JobFile(path, name, services, text)
