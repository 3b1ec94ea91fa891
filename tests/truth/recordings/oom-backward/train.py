import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(6)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(512, 4096, device="cuda")).sum().backward()
