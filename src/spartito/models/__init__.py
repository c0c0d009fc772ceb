"""Models that the recipes train."""

from spartito.models.cats_vs_dogs import CatsVsDogs
from spartito.models.gpt import GPT
from spartito.models.mnist import MnistMLP

__all__ = ["CatsVsDogs", "GPT", "MnistMLP"]


def __dir__() -> list[str]:
    return __all__  # the TAB key shows the API alone
