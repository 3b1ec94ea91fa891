"""A residual network with batch norm on random images, in channels-last half precision."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def network(classes=100):
    stem = [nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    stages = [Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 256, 2)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


torch.backends.cudnn.benchmark = True
model = network().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

for step in range(5):
    images = torch.randn(32, 3, 224, 224).cuda(non_blocking=True).to(memory_format=torch.channels_last)
    target = torch.randint(0, 100, (32,)).cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(images)
        loss = criterion(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    correct = (output.argmax(dim=1) == target).sum().item()
    print(f"step {step}: loss {loss.item():.4f}, {correct} of 32 right")
