"""Node classification on one graph: the whole graph is the batch, a sparse adjacency is passed beside the features."""

import torch
import torch.nn as nn
import torch.nn.functional as F

NODES, CLASSES = 60, 3


class GraphNet(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.inner, self.outer = nn.Linear(features, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, features, adjacency):
        hidden = torch.relu(torch.sparse.mm(adjacency, self.inner(features)))
        return torch.sparse.mm(adjacency, self.outer(hidden))


def community_graph():
    """Nodes of one class are linked more often; rows of the adjacency sum to 1."""
    labels = torch.arange(NODES) % CLASSES
    chance = torch.full((NODES, NODES), 0.03)
    chance[labels[:, None] == labels[None, :]] = 0.25
    links = torch.rand(NODES, NODES) < chance
    links = (links | links.T | torch.eye(NODES, dtype=torch.bool)).float()
    features = F.one_hot(labels, CLASSES) + torch.randn(NODES, CLASSES)
    return features, (links / links.sum(1, keepdim=True)).to_sparse(), labels


torch.manual_seed(42)
features, adjacency, labels = community_graph()
train, valid, test = torch.randperm(NODES).split(20)
model = GraphNet(CLASSES, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
for epoch in range(1, 21):
    logits = model(features, adjacency)
    loss = F.cross_entropy(logits[train], labels[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 5 == 0:
        print(
            f"epoch {epoch}: train {loss.item():.5f} valid {F.cross_entropy(logits[valid], labels[valid]).item():.5f}"
        )
with torch.no_grad():
    accuracy = (model(features, adjacency)[test].argmax(1) == labels[test]).float().mean()
print(f"test accuracy {accuracy.item():.4f}")
