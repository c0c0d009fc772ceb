"""A replica's elements of parameters, as an optimizer has them during its step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from spartito.engine.sharding.blocks import Section
from spartito.engine.sharding.homes import Home


class ShardPart:
    """This replica's elements of a parameter, as one that an optimizer can have.

    Args:
        whole: The parameter.
        section: Which of its elements, and where they are in the shard of a block.
        values: These elements, flat.
    """

    def __init__(self, whole: nn.Parameter, section: Section, values: Tensor) -> None:
        self.whole, self.section = whole, section
        self._is_all = section.stop - section.start == whole.numel()
        self.own = nn.Parameter(self._shaped(values), requires_grad=whole.requires_grad)
        self.state: dict[str, Any] | None = None

    def of(self, shard: Tensor) -> Tensor:
        """These elements of a flat shard of the block.

        Args:
            shard: All of it.
        """
        section = self.section
        return self._shaped(shard[section.offset : section.offset + section.stop - section.start])

    def _shaped(self, part: Tensor) -> Tensor:
        return part.view(self.whole.shape) if self._is_all else part

    def cut(self, value: Any) -> Any:
        """As `Owned.cut`.

        Args:
            value: One of the optimizer's.
        """
        whole = isinstance(value, Tensor) and value.dim() and value.shape == self.whole.shape
        if not whole or self._is_all:
            return value
        return value.reshape(-1)[self.section.start : self.section.stop].clone()


def parts_of(home: Home, learn: Collection[int]) -> dict[int, ShardPart]:
    """What an optimizer has of a block, by the ids of the parameters.

    Args:
        home: The block.
        learn: The ids of the optimizer's parameters.
    """
    found = zip(home.parameters, home.spans, home.sections, strict=True)
    return {
        id(parameter): ShardPart(parameter, section, values)
        for parameter, section, values in found
        if id(parameter) in learn and (values.numel() or not parameter.numel())
    }
