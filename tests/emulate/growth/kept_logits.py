"""Evaluates after every second step and keeps all logits on the device."""

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(2000, 128), nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 2000)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
held_out = torch.randint(0, 2000, (4, 8, 32), device="cuda")
predictions = []


@torch.no_grad()
def evaluate():
    model.eval()
    for batch in held_out:
        predictions.append(model(batch))
    model.train()


for step in range(10):
    tokens = torch.randint(0, 2000, (16, 32), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 1:
        evaluate()
