"""Saved activations wait in host memory for the backward pass."""

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.SiLU()))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for step in range(4):
    x = torch.randn(4096, 2048, device="cuda")
    with save_on_cpu(pin_memory=True):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
