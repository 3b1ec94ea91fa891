"""Adds up the gradients of four micro-batches, and their losses on the device."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(6):
    total = torch.zeros((), device="cuda")
    for _ in range(4):
        x, y = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
        loss = nn.functional.cross_entropy(model(x), y) / 4
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
