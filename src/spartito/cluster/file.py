"""The cluster by a plain file that lists all tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spartito.cluster.address_list import ENV_TASK, named_task, roles_of, spec_of
from spartito.cluster.spec import ClusterSpec, Task
from spartito.errors import UserError
from spartito.wire.addresses import canonical, split_address
from spartito.wire.interfaces import is_here, own_name

VARIABLE = "SPARTITO_CLUSTER"
EXAMPLE = "worker: [a:29500, b:29500]"
LIKE = f"It looks like {EXAMPLE}"


def applies(env: Mapping[str, str]) -> bool:
    """Whether ``SPARTITO_CLUSTER`` names a file."""
    return bool(env.get(VARIABLE, "").strip())


def from_file(
    env: Mapping[str, str], is_ours: Callable[[str], bool] | None = None
) -> ClusterSpec | None:
    """The cluster in the YAML or JSON file that ``SPARTITO_CLUSTER`` names; None if none is.

    The file maps roles to addresses: ``worker: [a:29500, b:29500]``. We are the task that
    ``SPARTITO_TASK`` names, else the only one whose host ``is_ours``, by default `is_this_machine`.
    """
    if not applies(env):
        return None
    path = Path(env[VARIABLE].strip())
    cluster = roles_of(_read(path), f"{path}", LIKE)
    task = named_task(env) or _by_host(cluster, is_ours or is_this_machine, f"{path}")
    if task.index >= len(cluster.get(task.type, ())):
        listed = ", ".join(f"{len(tasks)} {role}" for role, tasks in cluster.items())
        raise UserError(f"{ENV_TASK} names {task}, but {path} lists {listed}")
    return spec_of(cluster, task, str(path))


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is this machine's own name, or an address that it has, or stands for one.

    The own name alone would not do: on Debian it means 127.0.1.1, and the file says 10.0.0.1.
    """
    own = canonical(own_name())
    return canonical(host) in {own, own.partition(".")[0]} or is_here(host)


def _read(path: Path) -> Any:
    import yaml  # here: only who has such a file pays for the import

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{VARIABLE}={str(path)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise UserError(f"{path} is neither YAML nor JSON: {where}", LIKE) from error


def _by_host(
    cluster: Mapping[str, tuple[str, ...]], is_ours: Callable[[str], bool], source: str
) -> Task:
    found = [
        Task(role, index)
        for role, tasks in cluster.items()
        for index, address in enumerate(tasks)
        if is_ours(split_address(address)[0])
    ]
    if len(found) == 1:
        return found[0]
    here = f"this machine ({own_name()})"
    what = f"{' and '.join(map(str, found))} are on {here}" if found else f"no task is on {here}"
    raise UserError(f"{source}: {what}", f"Say which task this is: {ENV_TASK}='worker 0'")
