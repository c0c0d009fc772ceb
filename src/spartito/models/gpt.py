"""A small GPT: it learns which token comes next, and writes on.

After Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): a transformer
that looks back only, with the norms before each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartito.errors import UserError
from spartito.training.fitting.train_modes import evaluating


class Memory:
    """Keys and values of the tokens so far, each ``(batch, heads, tokens, width / heads)``."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of further tokens; returns those of all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


class CausalAttention(nn.Module):
    """Self-attention in which a token looks at itself and at those before it.

    Args:
        width: Channels of a token.
        heads: Parts of the channels that attend by themselves; they divide ``width``.
        dropout: Chance that a token does not see another one.
        packed: Whether one layer makes queries, keys and values, the three side by side; else
            three layers do.
    """

    def __init__(self, width: int, heads: int, dropout: float, packed: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        if packed:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.query = nn.Linear(width, width)
            self.key = nn.Linear(width, width)
            self.value = nn.Linear(width, width)
        self.packed = packed
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        """Mix the tokens ``x``, ``(batch, tokens, width)``; ``memory`` has those before them."""
        if self.packed:
            parts = self.qkv(x).chunk(3, dim=-1)
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        first = not memory
        if memory is not None:
            k, v = memory.add(k, v)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=first
        )
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1)))


class Block(nn.Module):
    """Attention, then a network for each token by itself; both are added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float, packed: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout, packed)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        """``(batch, tokens, width)`` to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), memory))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x))))))


class GPT(nn.Module):
    """A transformer over tokens whose head is its embedding.

    `GPT.small` has 0.8 million parameters, `GPT.medium` 25 million.

    Args:
        vocabulary: How many tokens there are.
        context: The longest sequence.
        layers: Blocks, one after the other.
        heads: Heads of each attention; they divide ``width``.
        width: Channels of a token.
        dropout: Chance that a value is left out in training: after the embedding, in attention,
            and after each half of a block.
        packed: Whether one layer makes queries, keys and values.

    Raises:
        UserError: The heads do not divide the width.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int = 64,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.1,
        packed: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise UserError(
                f"GPT(heads={heads}, width={width}): the heads do not divide the width",
                f"Take a width of {width // heads * heads + heads}, or other heads.",
            )
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, packed) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As GPT-2: what is added to the sum of all blocks begins smaller.
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @classmethod
    def small(cls, vocabulary: int, dropout: float = 0.1, packed: bool = False) -> GPT:
        """Make one of 0.8 million parameters: 4 layers, 4 heads, 128 channels, 64 tokens.

        Args:
            vocabulary: As `GPT`.
            dropout: As `GPT`.
            packed: As `GPT`.

        Returns:
            The model.
        """
        return cls(vocabulary, 64, 4, 4, 128, dropout, packed)

    @classmethod
    def medium(cls, vocabulary: int, dropout: float = 0.1, packed: bool = False) -> GPT:
        """Make one of 25 million parameters: 8 layers, 8 heads, 512 channels, 256 tokens.

        Args:
            vocabulary: As `GPT`.
            dropout: As `GPT`.
            packed: As `GPT`.

        Returns:
            The model.
        """
        return cls(vocabulary, 256, 8, 8, 512, dropout, packed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Say of each token what may follow it.

        Args:
            tokens: ``(batch, tokens)`` int64, no more than the context.

        Returns:
            Logits of the token behind each, ``(batch, tokens, vocabulary)``.

        Raises:
            UserError: For any other shape, or a sequence that is too long.
        """
        return cast(Tensor, self.head(self.norm(self.blocks(self.embed(tokens)))))

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """What the first block gets.

        Args:
            tokens: ``(batch, tokens)`` int64.
            first: The position of the first of them.

        Returns:
            ``(batch, tokens, width)``.

        Raises:
            UserError: As `forward`.
        """
        if tokens.dim() != 2:
            raise UserError(
                f"tokens of shape {tuple(tokens.shape)} where GPT takes sequences",
                "Give (batch, tokens).",
            )
        end = first + tokens.shape[1]
        if end > self.context:
            raise UserError(
                f"{end} tokens for a GPT with a context of {self.context}",
                "Give fewer, or make a GPT with a longer context.",
            )
        at = torch.arange(first, end, device=tokens.device)
        return cast(Tensor, self.dropout(self.embedding(tokens) + self.positions(at)))

    def extend(self, tokens: Tensor, memories: Sequence[Memory]) -> Tensor:
        """`forward` behind tokens that are known already: what generation calls.

        Args:
            tokens: ``(batch, tokens)``; where the memories hold some, a single one each.
            memories: One for each block; they keep ``tokens`` too.

        Returns:
            As `forward`.

        Raises:
            UserError: As `forward`.
        """
        x = self.embed(tokens, len(memories[0]))
        for block, memory in zip(self.blocks, memories, strict=True):
            x = block(x, memory)
        return cast(Tensor, self.head(self.norm(x)))

    def generate(
        self, tokens: Tensor, count: int, temperature: float = 1.0, seed: int = 0
    ) -> Tensor:
        """Write on.

        Args:
            tokens: How it begins, ``(batch, tokens)``; only the last ones that fit the context
                count.
            count: How many tokens are to be written.
            temperature: The logits are divided by it: 0 takes the most likely token, above 1 it
                is bolder than what it learned.
            seed: What the tokens are drawn from.

        Returns:
            ``tokens`` and what follows, ``(batch, tokens + count)``.
        """
        generator = torch.Generator().manual_seed(seed)
        with evaluating(self):
            memories: list[Memory] = []
            for _ in range(count):
                if memories and len(memories[0]) < self.context:
                    logits = self.extend(tokens[:, -1:], memories)
                else:
                    # A full context goes on from its second half: positions count from its begin.
                    keep = self.context // 2 if memories else self.context
                    memories = [Memory() for _ in self.blocks]
                    logits = self.extend(tokens[:, -keep:], memories)
                last = logits[:, -1].double().cpu()
                if temperature == 0:
                    drawn = last.argmax(1, keepdim=True)
                else:
                    drawn = torch.multinomial(
                        (last / temperature).softmax(1), 1, generator=generator
                    )
                tokens = torch.cat([tokens, drawn.to(tokens.device)], 1)
        return tokens
