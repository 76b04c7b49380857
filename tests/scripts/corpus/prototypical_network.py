"""Few-shot learning: forward takes a support set and a query set of other size, and compares with class means."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ProtoNet(nn.Module):
    def __init__(self, features=10, hidden=32, embedding=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, embedding))

    def forward(self, support, support_labels, query):
        z_support, z_query = self.encoder(support), self.encoder(query)
        classes = support_labels.unique()
        prototypes = torch.stack([z_support[support_labels == c].mean(0) for c in classes])
        return -torch.cdist(z_query, prototypes).pow(2)


def episode(centers, ways=4, shots=3, queries=6):
    chosen = torch.randperm(len(centers))[:ways]

    def draw(count):
        x = centers[chosen].repeat(count, 1) + 0.6 * torch.randn(count * ways, centers.size(1))
        return x, torch.arange(ways).repeat(count)

    return *draw(shots), *draw(queries)


if __name__ == "__main__":
    torch.manual_seed(79)
    centers = torch.randn(30, 10)
    model = ProtoNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for i in range(1, 25):
        support, support_labels, query, query_labels = episode(centers)
        logits = model(support, support_labels, query)
        loss = F.cross_entropy(logits, query_labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 6 == 0:
            accuracy = (logits.argmax(1) == query_labels).float().mean().item()
            print(f"episode {i}: loss {loss.item():.5f} accuracy {accuracy:.4f}")
