"""A multilayer perceptron in a plain loop."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(
    nn.Linear(784, 2048),
    nn.ReLU(),
    nn.Linear(2048, 2048),
    nn.ReLU(),
    nn.Linear(2048, 10),
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

inputs = torch.randn(4096, 784)
targets = torch.randint(0, 10, (4096,))

for epoch in range(2):
    for start in range(0, len(inputs), 512):
        x = inputs[start : start + 512].to(device)
        y = targets[start : start + 512].to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
