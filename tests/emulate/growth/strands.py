"""Keeps a small result between two large scratch tensors, round after round, and so pins what they leave free."""

import torch
from torch import nn

model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
MIB = 1 << 20
kept = []
for step in range(8):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    first = torch.empty((60 + step) * MIB, dtype=torch.uint8, device="cuda")
    second = torch.empty((30 + step) * MIB, dtype=torch.uint8, device="cuda")
    del first, second
    kept.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
