"""The cluster by ``TF_CONFIG``, the JSON of the tf.distribute tutorials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spartito.cluster.address_list import roles_of, spec_of
from spartito.cluster.spec import ROLES, ClusterSpec, Task
from spartito.errors import UserError
from spartito.names import nearest
from spartito.numeric import is_whole

VARIABLE = "TF_CONFIG"
EXAMPLE = '{"cluster": {"worker": ["a:29500", "b:29500"]}, "task": {"type": "worker", "index": 0}}'
LIKE = f"It looks like {EXAMPLE}"


def applies(env: Mapping[str, str]) -> bool:
    """Whether ``TF_CONFIG`` is set."""
    return bool(env.get(VARIABLE, "").strip())


def from_tf_config(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that ``TF_CONFIG`` describes; None where it is not set.

    An evaluator may be left out of the cluster, as in TensorFlow, and never counts as a replica.
    Keys that we do not know are passed over.
    """
    text = env.get(VARIABLE, "").strip()
    if not text:
        return None
    config = _object(_parse(text), "the whole")
    cluster = roles_of(_part(config, "cluster"), VARIABLE, LIKE)
    if len(cluster.get("chief", ())) > 1:
        raise _wrong(f"the cluster has {len(cluster['chief'])} chiefs, but one is the most")
    task = _task(_object(_part(config, "task"), "'task'"), cluster)
    if task.type == "evaluator":
        cluster.setdefault("evaluator", ("",))
    return spec_of(cluster, task, VARIABLE)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(f"{text!r} is not JSON: {error}") from error


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"{name} must be a JSON object, but is {json.dumps(value)}")
    return value


def _part(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise _wrong(f"{json.dumps(config)} has no {name!r}")
    return config[name]


def _task(given: Mapping[str, Any], cluster: Mapping[str, tuple[str, ...]]) -> Task:
    kind, index = _part(given, "type"), _part(given, "index")
    if not isinstance(kind, str) or kind not in ROLES:
        raise UserError(
            f"{VARIABLE}: the task's type {kind!r} is not a role", nearest(str(kind), ROLES)
        )
    if isinstance(index, str) and index.strip().isascii() and index.strip().isdigit():
        index = int(index)  # TensorFlow takes it too
    if not is_whole(index):
        raise _wrong(f"the task's index {json.dumps(index)} is not a whole number")
    listed = cluster.get(kind, ())
    if kind == "evaluator" and not listed and index == 0:
        return Task(kind, index)
    if not listed:
        raise _wrong(f"the task is {kind} {index}, but the cluster has no {kind!r}")
    if not 0 <= index < len(listed):
        raise _wrong(
            f"the task's index {index} is out of range: the cluster has {len(listed)} "
            f"{kind!r}, so 0 to {len(listed) - 1}"
        )
    return Task(kind, index)


def _wrong(what: str) -> UserError:
    return UserError(f"{VARIABLE}: {what}", LIKE)
