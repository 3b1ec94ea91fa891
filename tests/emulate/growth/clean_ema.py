"""Averages its weights over time, and keeps the best copy of them."""

import copy

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64)).cuda()
averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters())
best = None
for step in range(9):
    x = torch.randn(64, 512, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    averaged.update_parameters(model)
    if step % 2 == 0:
        best = copy.deepcopy(averaged.state_dict())
