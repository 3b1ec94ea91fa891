"""Sums its losses to report their mean, and so keeps every step's graph."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Embedding(1000, 512), nn.Flatten(), nn.Linear(512 * 64, 1024), nn.Tanh(), nn.Linear(1024, 1)
).cuda()
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)

losses = []
for step in range(6):
    tokens = torch.randint(0, 1000, (256, 64), device="cuda")
    prediction = model(tokens)
    loss = (prediction - tokens.float().mean(dim=1, keepdim=True)).abs().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
print("mean loss", (sum(losses) / len(losses)).item())
