"""A CLIP whose forward returns the (batch, batch) matrix of similarities of all images with all texts."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class CLIP(nn.Module):
    def __init__(self, image_dim, vocab, width, embed_dim):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(image_dim, width), nn.GELU(), nn.Linear(width, embed_dim))
        self.token_embedding = nn.Embedding(vocab, width)
        self.text_projection = nn.Parameter(torch.randn(width, embed_dim) * width**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def encode_image(self, image):
        return self.visual(image)

    def encode_text(self, text):
        return self.token_embedding(text).mean(1) @ self.text_projection

    def forward(self, image, text):
        image_features = F.normalize(self.encode_image(image), dim=-1)
        text_features = F.normalize(self.encode_text(text), dim=-1)
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        return logits_per_image, logits_per_image.t()


torch.manual_seed(77)
concept = torch.randint(0, 20, (320,))
images = F.one_hot(concept, 20).float() @ torch.randn(20, 24) + 0.1 * torch.randn(320, 24)
texts = (concept[:, None] * 3 + torch.randint(0, 3, (320, 5))) % 60

model = CLIP(24, 60, 32, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.2)
for epoch in range(2):
    for i, index in enumerate(torch.randperm(320).split(32)):
        logits_per_image, logits_per_text = model(images[index], texts[index])
        labels = torch.arange(len(index))
        loss = (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if i % 4 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.5f} scale {model.logit_scale.exp().item():.5f}")
