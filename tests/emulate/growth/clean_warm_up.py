"""Makes what it needs when it first needs it: buffers for each length, and a second optimizer after some steps."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)).cuda()
first = torch.optim.AdamW(model[0].parameters())
second = torch.optim.AdamW(model[2].parameters())
masks = {}
for step in range(14):
    length = 64 + 32 * (step % 3)
    if length not in masks:
        masks[length] = torch.ones(length, length, device="cuda").tril()
    x = torch.randn(length, 256, device="cuda")
    model(masks[length] @ x).square().mean().backward()
    first.step()
    if step >= 3:
        second.step()
    first.zero_grad()
    second.zero_grad()
