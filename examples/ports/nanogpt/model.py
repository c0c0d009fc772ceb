"""A small GPT, as nanoGPT has one beside its train.py."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention to what came before, then an MLP; both beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, time, width)`` to the same."""
        parts = self.attention(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        found: torch.Tensor = x + self.mlp(self.norm_2(x))
        return found


class GPT(nn.Module):
    """Logits and, given targets, the mean loss of the next character."""

    def __init__(self, vocabulary: int, block_size: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(block_size, width),
        )
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, idx, targets=None):  # type: ignore[no-untyped-def]
        """Token numbers ``(batch, time)``."""
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
