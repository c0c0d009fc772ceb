"""Whether Kubernetes would take an object: closed schemas, in which an unknown field is an error.

Those of Kubernetes itself are the package kubernetes-validate's. What a written file says of
JobSet and of Kubeflow's trainer is described here: the fields that we write, their types and
values, after the published definitions (jobset.x-k8s.io/v1alpha2 of JobSet 0.9,
trainer.kubeflow.org/v1alpha1 of trainer 2.0 to 2.3). A replicated job is a Job of Kubernetes, and
is looked at as one.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.skips import skip

Object = dict[str, Any]
VERSIONS = ("1.29", "1.33", "1.37")
"""Kubernetes': the first with all fields that we write, and later ones."""

NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def closed(required: list[str], **properties: Any) -> Object:
    """An object with these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


METADATA = closed(
    ["name", "labels"],
    name=NAME,
    namespace=NAME,
    labels={"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
    annotations={"type": "object", "additionalProperties": {"type": "string"}},
)
NETWORK = closed(
    [],
    enableDNSHostnames={"type": "boolean"},
    subdomain=NAME,
    publishNotReadyAddresses={"type": "boolean"},
)
TARGETS = {"type": "array", "items": {"type": "string"}}
SUCCESS = closed(["operator"], operator={"enum": ["All", "Any"]}, targetReplicatedJobs=TARGETS)
REPLICATED = closed(
    ["name", "template"],
    name=NAME,
    replicas={"type": "integer", "minimum": 0},
    template=closed(["spec"], metadata={"type": "object"}, spec={"type": "object"}),
)
JOBSET = closed(
    ["replicatedJobs"],
    ttlSecondsAfterFinished={"type": "integer", "minimum": 0},
    network=NETWORK,
    successPolicy=SUCCESS,
    failurePolicy=closed([], maxRestarts={"type": "integer"}),
    replicatedJobs={"type": "array", "items": REPLICATED, "minItems": 1},
)
RUNTIME = closed(
    [],
    mlPolicy=closed([], numNodes={"type": "integer"}),
    template=closed(["spec"], spec=JOBSET),
)
REFERENCE = closed(
    ["name"], apiGroup={"const": "trainer.kubeflow.org"}, kind={"type": "string"}, name=NAME
)


def whole(version: str, kind: str, spec: Object) -> Object:
    return closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )


TRAINER = "trainer.kubeflow.org/v1alpha1"
OTHERS = {
    "JobSet": whole("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET),
    "TrainingRuntime": whole(TRAINER, "TrainingRuntime", RUNTIME),
    "TrainJob": whole(TRAINER, "TrainJob", closed(["runtimeRef"], runtimeRef=REFERENCE)),
}


def check(one: Object) -> None:
    """Raise where an object, or a Job in it, is not valid."""
    _check(json.dumps(one))


@cache  # most objects of two files are equal
def _check(text: str) -> None:
    try:
        import jsonschema
        import kubernetes_validate
    except ImportError as error:
        skip("dev", f"{error.name} is not installed")
    one = json.loads(text)
    if one["kind"] not in OTHERS:
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)
        return
    jsonschema.Draft202012Validator(OTHERS[one["kind"]]).validate(one)
    spec = one["spec"].get("template", {}).get("spec", one["spec"])
    for each in spec.get("replicatedJobs", ()):
        check({"apiVersion": "batch/v1", "kind": "Job", **each["template"]})


def refuses(one: Object) -> None:
    """Assert that `check` raises."""
    with pytest.raises(Exception, match=r"dditional properties|is not of type|is not one of"):
        check(one)
