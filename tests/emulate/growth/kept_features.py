"""Collects detached features of every batch for a plot that nobody draws."""

import torch
from torch import nn

body = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 384), nn.GELU()).cuda()
head = nn.Linear(384, 10).cuda()
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
features = []
for step in range(8):
    x, y = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    hidden = body(x)
    loss = nn.functional.cross_entropy(head(hidden), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    features.append(hidden.detach())
