"""Architectures as people train them: tiny, random, in fp64, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.zoo import doubled

EXAMPLES, BATCH = 29, 6
"""Five steps; the last batch has five rows."""

CLIP = 0.5
IGNORED = -100


@dataclass(frozen=True)
class Animal:
    """One architecture and what it is trained with.

    ``data`` is a dict or a tuple of tensors of EXAMPLES rows. ``weigh`` says what the loss of some
    rows was divided by. Without ``loss`` the model computes its own.
    """

    title: str
    build: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[[], Callable[[Any, Any], Any]] | None = None
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = lambda p: torch.optim.AdamW(p, 1e-3)
    weigh: Callable[[Any], float] = lambda rows: float(len(leaf(rows)))
    package: str = ""


def leaf(rows: Any) -> Tensor:
    """A tensor of ``rows``, which is a dict or a tuple of them."""
    found: Tensor = next(iter(rows.values())) if isinstance(rows, dict) else rows[0]
    return found


def take(data: Any, rows: Iterable[int]) -> Any:
    """Some rows of a dict or a tuple of tensors."""
    chosen = torch.tensor(list(rows))
    if isinstance(data, dict):
        return {name: tensor[chosen] for name, tensor in data.items()}
    return tuple(tensor[chosen] for tensor in data)


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """What small differences do not grow under, where a network divides by small numbers."""
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Data ------------------------------------------------------------------------------------------

WORDS, LENGTH, CLASSES = 41, 9, 3


def lengths(longest: int = LENGTH) -> Tensor:
    """How many tokens each example has, at least three; half of each batch has no padding."""
    drawn = torch.randint(3, longest + 1, (EXAMPLES,), generator=generator(1))
    return drawn.where(torch.arange(EXAMPLES) % BATCH >= BATCH // 2, longest)


def tokens(longest: int = LENGTH, seed: int = 2) -> Tensor:
    return torch.randint(3, WORDS, (EXAMPLES, longest), generator=generator(seed))


def texts() -> dict[str, Tensor]:
    """Padded texts, and labels of which paddings and some others are left out."""
    ids, kept = tokens(), torch.arange(LENGTH) < lengths()[:, None]
    silent = torch.rand(ids.shape, generator=generator(3), dtype=torch.float64) < 0.2
    silent[:, 1] = False  # nobody is without any
    return {
        "input_ids": ids.masked_fill(~kept, 0),
        "attention_mask": kept.long(),
        "labels": ids.masked_fill(~kept | silent, IGNORED),
    }


def targets_beside(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Labels as the target of a loss function, not as an input of the model."""
    return {"y" if name == "labels" else name: tensor for name, tensor in data.items()}


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (EXAMPLES,), generator=generator(4))


def images(size: int) -> Tensor:
    return torch.randn(EXAMPLES, 3, size, size, generator=generator(5), dtype=torch.float64)


def shifted(data: Any) -> float:
    """The labels that a decoder is to predict: not the first."""
    return float((data["labels" if "labels" in data else "y"][:, 1:] != IGNORED).sum())


def kept(data: Any) -> float:
    return float((data["labels"] != IGNORED).sum())


# Transformers ----------------------------------------------------------------------------------


def of_transformers(kind: str, config: str, **options: Any) -> nn.Module:
    """``kind`` from a configuration, attention written out in torch."""
    model_class = doubled.transformers(kind)
    made: nn.Module = model_class(
        doubled.transformers(config)(attn_implementation="eager", **options)
    )
    doubled.transformers(kind)  # with what making it has imported
    return made.double().train()


SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama() -> nn.Module:
    return of_transformers(
        "LlamaForCausalLM", "LlamaConfig", **SMALL, num_key_value_heads=2, use_cache=False
    )


def gpt2() -> nn.Module:
    return of_transformers(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_positions=LENGTH, n_embd=16,
        n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip


def mixtral(router: bool = False) -> nn.Module:
    return of_transformers(
        "MixtralForCausalLM", "MixtralConfig", **SMALL, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, output_router_logits=router, use_cache=False,
        experts_implementation="eager",
    )  # fmt: skip


def bert() -> nn.Module:
    """With frozen embeddings."""
    net = of_transformers(
        "BertForSequenceClassification", "BertConfig", **SMALL, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=LENGTH,
    )  # fmt: skip
    for parameter in net.get_submodule("bert.embeddings").parameters():
        parameter.requires_grad_(False)
    return net


def t5() -> nn.Module:
    return of_transformers(
        "T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=16, d_kv=4, d_ff=24,
        num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip


def whisper() -> nn.Module:
    return of_transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=WORDS, num_mel_bins=8,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=24, decoder_ffn_dim=24, d_model=16, max_source_positions=12,
        max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        suppress_tokens=None, begin_suppress_tokens=None, use_cache=False,
    )  # fmt: skip


def speech() -> dict[str, Tensor]:
    features = torch.randn(EXAMPLES, 8, 24, generator=generator(6), dtype=torch.float64)
    return {"input_features": features, "labels": texts()["labels"]}


def wav2vec2() -> nn.Module:
    return of_transformers(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", **{**SMALL, "vocab_size": 11}, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
        feat_extract_norm="layer",
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, ctc_loss_reduction="mean", pad_token_id=0,
        feat_extract_activation="gelu",
    )  # fmt: skip


def sounds() -> dict[str, Tensor]:
    """Sounds of several lengths, each with fewer letters than frames."""
    wide = 200
    here = torch.arange(wide) < (60 + 15 * lengths())[:, None]
    sound = torch.randn(EXAMPLES, wide, generator=generator(6), dtype=torch.float64)
    letters = torch.randint(1, 11, (EXAMPLES, 5), generator=generator(8))
    spoken = torch.arange(5) < (2 + lengths() % 4)[:, None]
    return {
        "input_values": sound * here,
        "attention_mask": here.long(),
        "labels": letters.masked_fill(~spoken, IGNORED),
    }


def vit() -> nn.Module:
    options = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return of_transformers(
        "ViTForImageClassification", "ViTConfig", **options, image_size=12, patch_size=4,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def clip() -> nn.Module:
    """Each image with its text against those of all other examples."""
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    text = {
        **SMALL,
        "max_position_embeddings": LENGTH,
        "projection_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {**sizes, "image_size": 12, "patch_size": 4, "projection_dim": 8}
    return of_transformers(
        "CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=8
    )


def pairs() -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in texts().items() if name != "labels"}
    return {**found, "pixel_values": images(12), "return_loss": torch.ones(EXAMPLES).bool()}


class Contrastive(nn.Module):
    """CLIP with the loss that it computes over all pairs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = clip()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Any:
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            return_loss=True,
        )


def lora() -> nn.Module:
    """Llama with adapters on queries and values; all else is frozen."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    base: Any = llama()
    made: nn.Module = peft.get_peft_model(base, config)
    return made.double().train()


# timm ------------------------------------------------------------------------------------------


def mobilenet() -> nn.Module:
    doubled.timm()
    from timm.models import mobilenetv3

    made: nn.Module = mobilenetv3._gen_mobilenet_v3(
        "mobilenetv3_small_050", 0.25, num_classes=CLASSES, head_bias=False
    )
    return made.double()


def small_efficientnet() -> nn.Module:
    doubled.timm()
    from timm.models import efficientnet

    family: Any = efficientnet
    made: nn.Module = family._gen_efficientnet("efficientnet_b0", 0.25, 0.3, num_classes=CLASSES)
    return made.double()


def swin() -> nn.Module:
    made: nn.Module = doubled.timm().create_model(
        "swin_tiny_patch4_window7_224", num_classes=CLASSES, img_size=16, patch_size=2,
        window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0,
    )  # fmt: skip
    return made.double()


# Plain torch -----------------------------------------------------------------------------------


class Translator(nn.Module):
    """`nn.Transformer` from padded texts to padded texts."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 16), nn.Embedding(WORDS, 16)
        self.layers = nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, batch_first=True)
        self.layers.encoder.use_nested_tensor = False  # it is for fp32
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padded, later = source == 0, target == 0
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).bool()
        out: Tensor = self.layers(
            self.source(source),
            self.target(target),
            tgt_mask=causal,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
            tgt_key_padding_mask=later,
            tgt_is_causal=True,
        )
        scores: Tensor = self.head(out)
        return scores.transpose(1, 2)


def translations() -> dict[str, Tensor]:
    source = texts()
    target = tokens(LENGTH, 9).masked_fill(source["attention_mask"] == 0, 0)
    return {"source": source["input_ids"], "target": target[:, :-1], "y": target[:, 1:]}


class Recurrent(nn.Module):
    """A two-layer LSTM in both directions over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, 12, padding_idx=0)  # even: a mesh cuts it
        self.rnn = nn.LSTM(12, 10, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, CLASSES)

    def forward(self, ids: Tensor, count: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), count, batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.rnn(packed)
        out: Tensor = self.head(torch.cat([last[-2], last[-1]], 1))
        return out


def sentences() -> dict[str, Tensor]:
    return {"ids": texts()["input_ids"], "count": lengths(), "y": classes()}


def twice(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Down and up again with skip connections, a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deeper, self.bottom = twice(3, 4), twice(4, 8), twice(8, 16)
        self.up, self.higher = (
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
        )
        self.join, self.last = twice(16, 8), twice(8, 4)
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        second = self.deeper(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        second = self.join(torch.cat([self.up(bottom), second], 1))
        out: Tensor = self.head(self.last(torch.cat([self.higher(second), first], 1)))
        return out


def maps() -> tuple[Tensor, Tensor]:
    """Images, and a class for each pixel but those at uneven borders."""
    labels = torch.randint(0, CLASSES, (EXAMPLES, 16, 16), generator=generator(10))
    hidden = torch.arange(16) < lengths()[:, None, None]
    return images(16), labels.masked_fill(hidden, 255)


PIXELS = torch.tensor([1.0, 2.5, 0.3], dtype=torch.float64)


def next_words(output: Any, target: Tensor) -> Tensor:
    """The loss of a language model as everybody writes it: a mean over kept tokens."""
    logits = output.logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, target[:, 1:].flatten(), ignore_index=IGNORED)


ANIMALS = {
    "llama": Animal("Llama, labels", llama, texts, weigh=shifted, package="transformers"),
    "gpt2": Animal(
        "GPT-2, a function as loss", gpt2, lambda: targets_beside(texts()), lambda: next_words,
        weigh=shifted, package="transformers",
    ),
    "mixtral": Animal("Mixtral", mixtral, texts, weigh=shifted, package="transformers"),
    "mixtral-router": Animal(
        "Mixtral with router loss", lambda: mixtral(True), texts, weigh=shifted,
        package="transformers",
    ),
    "bert": Animal(
        "BERT classifier, frozen embeddings", bert,
        lambda: {**texts(), "labels": classes()}, package="transformers",
    ),
    "t5": Animal("T5", t5, texts, weigh=kept, package="transformers"),
    "vit": Animal(
        "ViT", vit, lambda: {"pixel_values": images(12), "y": classes()},
        lambda: lambda output, y: functional.cross_entropy(output.logits, y),
        package="transformers",
    ),
    "whisper": Animal("Whisper", whisper, speech, weigh=kept, package="transformers"),
    "wav2vec2": Animal("Wav2Vec2, CTC", wav2vec2, sounds, package="transformers"),
    "clip": Animal(
        "CLIP, contrastive", Contrastive,
        lambda: {k: v for k, v in pairs().items() if k != "return_loss"}, package="transformers",
    ),
    "lora": Animal("LoRA on Llama", lora, texts, weigh=shifted, package="peft"),
    "mobilenetv3": Animal(
        "MobileNetV3 (timm)", mobilenet, lambda: (images(32), classes()), nn.CrossEntropyLoss, sgd,
        package="timm",
    ),
    "efficientnet": Animal(
        "EfficientNet (timm)", small_efficientnet, lambda: (images(32), classes()),
        nn.CrossEntropyLoss, sgd, package="timm",
    ),
    "swin": Animal(
        "Swin (timm)", swin, lambda: (images(16), classes()), nn.CrossEntropyLoss, package="timm"
    ),
    "transformer": Animal(
        "nn.Transformer", Translator, translations, lambda: nn.CrossEntropyLoss(ignore_index=0),
        weigh=lambda rows: float((rows["y"] != 0).sum()),
    ),
    "lstm": Animal("nn.LSTM, packed", Recurrent, sentences, nn.CrossEntropyLoss),
    "unet": Animal(
        "U-Net, weighted pixels", UNet, maps,
        lambda: nn.CrossEntropyLoss(weight=PIXELS, ignore_index=255), sgd,
        weigh=lambda rows: float(PIXELS[rows[1][rows[1] != 255]].sum()),
    ),
}  # fmt: skip
"""By the name that tests and the table have for them."""


# Loops of one's own ----------------------------------------------------------------------------


class Loop(Protocol):
    """What a loop of one's own asks of a strategy, or of plain torch."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The model to call, and its optimizer."""

    def batches(self, data: Any) -> Iterable[Any]:
        """The batches of the data, or the part of them that is computed here."""

    def backward(self, losses: Tensor, batch: Any) -> None:
        """Compute the gradients of one loss per example."""

    def show(self, losses: Tensor) -> None:
        """Keep one loss per example, to be compared."""


def gan(loop: Loop) -> Iterator[Optimizer]:
    """Two models and two optimizers, taking turns; yields the optimizer that is to step."""
    first = nn.Linear(4, 16, bias=False)  # BatchNorm takes a bias out again
    painter = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    paint, paints = loop.prepare(painter, torch.optim.Adam(painter.parameters(), 1e-3))
    tell, tells = loop.prepare(judge, torch.optim.Adam(judge.parameters(), 2e-3))
    each = nn.BCEWithLogitsLoss(reduction="none")
    real = torch.randn(EXAMPLES, 2, generator=generator(1), dtype=torch.float64)
    noise = torch.randn(EXAMPLES, 4, generator=generator(2), dtype=torch.float64)
    for batch in loop.batches((real, noise)):
        fakes = paint(batch.y)
        tells.zero_grad()  # what the painter's pass left there
        right, wrong = tell(batch.x), tell(fakes.detach())
        loss = each(right, torch.ones_like(right)) + each(wrong, torch.zeros_like(wrong))
        loop.backward(loss, batch)
        yield tells
        score = tell(fakes)
        loss = each(score, torch.ones_like(score))
        loop.backward(loss, batch)
        yield paints
        loop.show(loss.flatten())


def actor_critic(loop: Loop) -> Iterator[Optimizer]:
    """Two models that share a trunk, an optimizer for each, one backward pass for both."""
    trunk = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
    actor = nn.Sequential(trunk, nn.Linear(16, CLASSES))
    critic = nn.Sequential(trunk, nn.Linear(16, 1))
    act, acts = loop.prepare(actor, torch.optim.Adam(actor.parameters(), 1e-2))
    judge, judges = loop.prepare(critic, torch.optim.Adam(critic[1].parameters(), 2e-2))
    state = torch.randn(EXAMPLES, 5, generator=generator(1), dtype=torch.float64)
    reward = torch.randn(EXAMPLES, generator=generator(2), dtype=torch.float64)
    for batch in loop.batches({"state": state, "action": classes(), "reward": reward}):
        data = batch.data
        value = judge(data["state"]).squeeze(1)
        gain = (data["reward"] - value).detach()
        surprise = functional.cross_entropy(act(data["state"]), data["action"], reduction="none")
        losses = gain * surprise + 0.5 * (data["reward"] - value).square()
        loop.backward(losses, batch)
        yield acts
        yield judges
        loop.show(losses)


LOOPS: dict[str, Callable[[Loop], Iterator[Optimizer]]] = {
    "gan": gan,
    "actor-critic": actor_critic,
}
TITLES = {
    **{name: animal.title for name, animal in ANIMALS.items()},
    "gan": "GAN, a loop of one's own",
    "actor-critic": "actor-critic with a shared trunk, a loop of one's own",
}
