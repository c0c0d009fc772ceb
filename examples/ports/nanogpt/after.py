"""nanoGPT's train.py in short: random batches, accumulated gradients, a cosine by hand."""

import math

import torch
from model import GPT

import spartito as sp

batch_size, block_size = 12, 16
gradient_accumulation_steps = 2
max_iters, eval_interval, eval_iters = 12, 6, 2
learning_rate, min_lr, warmup_iters = 1e-2, 1e-3, 3
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.95, 1.0

strategy = sp.strategy()
torch.manual_seed(1337)
text = "the quick brown fox jumps over the lazy dog. " * 40
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
data = {"train": ids[:-200], "val": ids[-200:]}
draws = {split: torch.Generator().manual_seed(1) for split in data}


def get_batch(split):
    last = len(data[split]) - block_size
    starts = torch.randint(last, (batch_size,), generator=draws[split])
    x = torch.stack([data[split][i : i + block_size] for i in starts])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in starts])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    done = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch("val"))[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / eval_iters


model = GPT(len(letters), block_size)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
    lr=learning_rate,
    betas=(beta1, beta2),
)
model, optimizer = strategy.prepare(model, optimizer, clip_norm=grad_clip)
train = iter(strategy.distribute(iter(lambda: get_batch("train"), None)))

for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss()}")
    for _ in range(gradient_accumulation_steps):
        X, Y = batch = next(train)
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        strategy.backward(loss, batch)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
