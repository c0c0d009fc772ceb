"""Whether a model of Transformers looks at where documents begin in a window."""

from __future__ import annotations

from typing import Any

from torch import nn

from spartito.data.dataset import Dataset
from spartito.data.mixture import Mixture
from spartito.data.windows.source import WindowSource
from spartito.errors import UserError


def check_documents(model: nn.Module, dataset: Dataset, replicas: int) -> None:
    """Refuse a model that would let tokens see other documents, and say nothing of it.

    Args:
        model: Any.
        dataset: Any; it matters where its examples are windows with ``position_ids``.
        replicas: How many divide a batch.

    Raises:
        UserError: It is such a model.
    """
    source, config = dataset.source, getattr(model, "config", None)
    parts = [part.data.source for part in source.parts] if isinstance(source, Mixture) else [source]
    packed = any(isinstance(part, WindowSource) and part.documents for part in parts)
    theirs = any(kind.__module__.startswith("transformers.") for kind in type(config).__mro__)
    if not packed or not theirs:
        return
    name = type(model).__name__
    if getattr(config, "use_cache", False):
        raise UserError(
            f"{name} with use_cache=True sees nothing of where documents begin: its attention "
            "goes across them",
            "model.config.use_cache = False, as Transformers' own trainer sets it.",
        )
    attention: Any = getattr(config, "_attn_implementation", None)
    if "flash" in str(attention) and (dataset.batch_size or 0) > replicas:
        raise UserError(
            f"{name} with {attention!r} sees where documents begin in a batch of one alone, and "
            f"here {replicas} replicas have {dataset.batch_size}",
            f'attn_implementation="sdpa", or .batch({replicas}) and accumulate.',
        )
