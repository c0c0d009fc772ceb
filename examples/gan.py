"""A custom loop: a small GAN with two models and two optimizers, under any strategy.

    spartito run --strategy mirrored --workers 2 examples/gan.py

It learns to draw points from a ring. Every replica computes its part of the global batch.
"""

import torch
from torch import nn

import spartito as sp

STEPS_SHOWN = 200


def ring(count: int) -> torch.Tensor:
    """Points (count, 2) near the circle of radius 1."""
    angle = torch.rand(count) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


strategy = sp.strategy()
torch.manual_seed(0)
with strategy.scope():
    painter = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    critic = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    paint_optimizer = torch.optim.Adam(painter.parameters(), 1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.9))
paint, paint_steps = strategy.prepare(painter, paint_optimizer)
judge, critic_steps = strategy.prepare(critic, critic_optimizer)

each = nn.BCEWithLogitsLoss(reduction="none")
data = strategy.distribute(sp.data.arrays(ring(8192), torch.randn(8192, 4)).shuffle().batch(128))

step = 0
for _ in range(12):
    for batch in data:
        fakes = paint(batch.y)

        critic_steps.zero_grad()  # what the painter's pass left in the critic
        real_score, fake_score = judge(batch.x), judge(fakes.detach())
        critic_loss = each(real_score, torch.ones_like(real_score)) + each(
            fake_score, torch.zeros_like(fake_score)
        )
        strategy.backward(critic_loss, batch)
        strategy.update(critic_steps)

        score = judge(fakes)
        paint_loss = each(score, torch.ones_like(score))
        strategy.backward(paint_loss, batch)
        strategy.update(paint_steps)

        step += 1
        if step % STEPS_SHOWN == 0:
            losses = strategy.reduce("mean", torch.cat([critic_loss, paint_loss], 1))
            if strategy.is_chief:
                print(f"step {step}: mean loss {losses.item():.3f}", flush=True)

with torch.no_grad():
    radius = paint(torch.randn(1000, 4)).norm(dim=1)
mean = strategy.reduce("mean", radius)
if strategy.is_chief:
    print(f"mean radius of what it paints: {mean.item():.2f} (the ring has 1)")
strategy.close()
