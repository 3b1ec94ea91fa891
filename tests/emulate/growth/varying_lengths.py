"""Pads every batch to its own longest sequence."""

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
model = nn.Sequential(nn.Embedding(1000, 128), layer, nn.Linear(128, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for length in (96, 40, 128, 72, 160, 88, 120, 208, 144, 64):
    tokens = torch.randint(0, 1000, (8, length), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
