"""A transformer encoder through torch.compile."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, vocabulary=2000, width=256, layers=2, classes=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(dim=1))


torch.set_float32_matmul_precision("high")
model = Classifier().cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step in range(5):
    tokens = torch.randint(0, 2000, (16, 128), device="cuda")
    labels = torch.randint(0, 16, (16,), device="cuda")
    loss = nn.functional.cross_entropy(compiled(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
