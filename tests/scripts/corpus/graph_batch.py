"""Several graphs concatenated into one: node features, edges by node index, and the graph that each node is of."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        row, col = edge_index
        degree = torch.zeros(x.size(0)).index_add_(0, col, torch.ones(col.size(0))).clamp(min=1)
        messages = torch.zeros_like(x).index_add_(0, col, x[row])
        return self.lin(x + messages / degree.unsqueeze(1))


class GCN(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, hidden)
        self.lin = nn.Linear(hidden, classes)

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x = self.conv2(x, edge_index).relu()
        graphs = int(batch.max()) + 1
        pooled = torch.zeros(graphs, x.size(1)).index_add_(0, batch, x)
        return self.lin(pooled / torch.bincount(batch, minlength=graphs).unsqueeze(1))


def make_graph(label):
    """A ring, or a star."""
    nodes = int(torch.randint(4, 9, (1,)))
    first = torch.arange(nodes)
    second = (first + 1) % nodes if label else torch.zeros_like(first)
    edges = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    return torch.randn(nodes, 3) + edges[1].bincount(minlength=nodes).unsqueeze(1) / 4, edges, label


def collate(graphs):
    xs, edges, batch, offset = [], [], [], 0
    for i, (x, edge_index, _) in enumerate(graphs):
        xs.append(x)
        edges.append(edge_index + offset)
        batch.append(torch.full((len(x),), i))
        offset += len(x)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.tensor([label for _, _, label in graphs])


torch.manual_seed(12345)
graphs = [make_graph(i % 2) for i in range(96)]
model = GCN(3, 16, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(3):
    order = torch.randperm(len(graphs)).tolist()
    total, correct = 0.0, 0
    for start in range(0, len(order), 16):
        x, edge_index, batch, y = collate([graphs[i] for i in order[start : start + 16]])
        out = model(x, edge_index, batch)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() * len(y)
        correct += int((out.argmax(1) == y).sum())
    print(f"Epoch: {epoch:03d}, Loss: {total / 96:.5f}, Train Acc: {correct / 96:.4f}")
