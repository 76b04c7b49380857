"""Graphs padded to one size: dense adjacency (batch, nodes, nodes) and a node mask; each graph is a sample."""

import torch
from torch import nn


class DenseGNN(nn.Module):
    def __init__(self, features=4, hidden=16):
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.layers = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(2))
        self.readout = nn.Linear(hidden, 1)

    def forward(self, x, adj, mask):
        h = self.embed(x)
        for layer in self.layers:
            h = torch.relu(layer(torch.cat([h, torch.bmm(adj, h)], dim=-1)))
        h = (h * mask.unsqueeze(-1)).sum(1)
        return self.readout(h).squeeze(-1)


def random_graphs(count, nodes=9):
    sizes = torch.randint(3, nodes + 1, (count,))
    mask = (torch.arange(nodes)[None] < sizes[:, None]).float()
    adj = (torch.rand(count, nodes, nodes) < 0.4).float().triu(1)
    adj = (adj + adj.transpose(1, 2)) * mask[:, :, None] * mask[:, None, :]
    triangles = torch.einsum("bij,bjk,bki->b", adj, adj, adj) / 6
    return torch.randn(count, nodes, 4) * 0.1 + 1, adj, mask, triangles / 5


def main(steps=24, batch=28):
    torch.manual_seed(19)
    model = DenseGNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    test_set = random_graphs(100)
    for step in range(1, steps + 1):
        *inputs, target = random_graphs(batch)
        loss = nn.functional.huber_loss(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0:
            with torch.no_grad():
                error = (model(*test_set[:3]) - test_set[3]).abs().mean()
            print(f"step {step}: huber {loss.item():.5f}, test mae {error.item():.5f}")


main()
