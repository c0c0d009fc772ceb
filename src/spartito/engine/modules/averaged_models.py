"""Running averages of a model (`torch.optim.swa_utils.AveragedModel`) where tasks have its parts.

An average that was made before the model was divided has whole tensors: torch would say that sizes
do not match, or copy what this task does not have.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from spartito.engine.updates.optimizers import has_part, unwrap
from spartito.errors import UserError


@cache
def watch_averages() -> None:
    """Have torch's averages ask first, whoever has made them."""
    plain: Any = AveragedModel.update_parameters

    @wraps(plain)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if has_part(model):
            raise UserError(
                f"an average of a {type(unwrap(model)).__name__} of which each task has a part",
                "Average what trainer.save(folder) writes (spartito checkpoint average), or choose "
                "mirrored or sharded.",
            )
        plain(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
