"""Keeps what a frozen encoder says of a batch, for at most five batches."""

import torch
from torch import nn

encoder = nn.Linear(512, 1024).cuda().requires_grad_(False)
head = nn.Linear(1024, 16).cuda()
optimizer = torch.optim.Adam(head.parameters())
cache = {}
for step in range(14):
    x, y = torch.randn(128, 512, device="cuda"), torch.randint(0, 16, (128,), device="cuda")
    known = encoder(x)
    if len(cache) < 5:
        cache[step] = known
    loss = nn.functional.cross_entropy(head(known), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
