"""Trains a while, evaluates after every step, and keeps the best weights."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Recurrent(nn.Module):
    def __init__(self, features=32, hidden=256, classes=8):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.head(states[:, -1])


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total, right, losses = 0, 0, 0.0
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        logits = model(x)
        losses += nn.functional.cross_entropy(logits, y, reduction="sum").item()
        right += (logits.argmax(-1) == y).sum().item()
        total += len(y)
    model.train()
    return losses / total, right / total


data = TensorDataset(torch.randn(768, 50, 32), torch.randint(0, 8, (768,)))
train, validation = random_split(data, [512, 256])
train = DataLoader(train, batch_size=128, shuffle=True)
validation = DataLoader(validation, batch_size=256)

model = Recurrent().cuda()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
best, kept = float("inf"), None
for x, y in train:
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    validation_loss, accuracy = evaluate(model, validation)
    if validation_loss < best:
        best, kept = validation_loss, copy.deepcopy(model.state_dict())
    print(f"loss {loss.item():.4f}, validation {validation_loss:.4f}, accuracy {accuracy:.3f}")
