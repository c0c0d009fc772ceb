"""Ask each source in turn who we are; the first that knows decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from spartito.cluster.spec import ClusterSpec
from spartito.cluster.tf_config import from_tf_config
from spartito.cluster.torchrun import from_torchrun

Resolver = Callable[[Mapping[str, str]], ClusterSpec | None]
"""Reads an environment; None when it says nothing of this kind, `UserError` when it is wrong."""

RESOLVERS: tuple[Resolver, ...] = (from_tf_config, from_torchrun)
"""In order of precedence."""


def resolve(env: Mapping[str, str] | None = None) -> ClusterSpec:
    """The cluster that ``env`` (this process's own by default) describes; else alone."""
    variables = os.environ if env is None else env
    for resolver in RESOLVERS:
        spec = resolver(variables)
        if spec is not None:
            return spec
    return ClusterSpec.alone()
