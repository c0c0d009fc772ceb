"""One model on several tasks: each has a part of every tensor, as a layout by names says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spartito.mesh.describe import Description
from spartito.mesh.layout import DEFAULT
from spartito.steps.sharding import BLOCK
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, eq=False)
class MeshStrategy(Strategy):
    """Tensors are cut along the axes of a mesh, by rules about their named dims.

    The model stays as it was written. The results are those of one device; the layout decides
    on time and memory alone.

    Args:
        mesh: The sizes of its axes, ``{"data": 2, "model": 2}``; tasks are numbered row by
            row, the last axis fastest. None: ``model`` tasks hold one model.
        layout: Ordered rules ``(dim, axis)``, or a dict: for each dim of a tensor the first
            rule whose axis the tensor does not use yet. The axis of "batch" has the data
            shards.
        names: Patterns of parameters' paths, as ``"blocks.*.up.weight"``, and the names of
            their dims, which win over those of their module's type: ``("hidden", None)``;
            ``"3*heads"`` is packed queries, keys and values.
        strict: Whether dims that do not divide are refused; else they stay whole.
        model: Short for ``mesh={"data": tasks / model, "model": model}``; None: all tasks.
        zero: 1, 2 or 3: what tasks with the same part of the model keep in shards among them, as
            under `ShardedStrategy`; 0: nothing.
        block_bytes: As under `ShardedStrategy`.
    """

    name = "mesh"
    implementation = "spartito.steps.mesh:MeshStep"

    mesh: Mapping[str, int] | None = None
    layout: Any = DEFAULT
    names: Mapping[str, Sequence[str | None]] | None = None
    strict: bool = False
    model: int | None = None
    zero: int = 0
    block_bytes: int = BLOCK

    def describe(self, model: nn.Module, example: Any = None, loss: Any = None) -> Description:
        """What the layout does to a model, before any step and without the other tasks.

        Args:
            model: A whole one; it is not changed.
            example: An input, a tuple or a dict of inputs of one task, of which shapes matter
                alone; None tries some that the first layer could take.
            loss: A function of the output alone; None is the sum of all that is in it.

        Returns:
            What ``print`` shows: each tensor with its dims, where it lies and its bytes on a task,
            the collectives of one step by module, and warnings.

        Raises:
            UserError: For a layout that `prepare` would refuse.
        """
        found: Description = self.engine.describe(model, example, loss)  # type: ignore[attr-defined]
        return found
