"""Sorts its sequences into a few lengths, the longest first."""

import torch
from torch import nn

model = nn.ModuleList([nn.Embedding(1000, 128), nn.LSTM(128, 256, batch_first=True), nn.Linear(256, 1000)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for length in (128, 64, 32, 128, 96, 64, 128, 32, 96, 64):
    tokens = torch.randint(0, 1000, (8, length), device="cuda")
    states, _ = model[1](model[0](tokens))
    loss = nn.functional.cross_entropy(model[2](states).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
