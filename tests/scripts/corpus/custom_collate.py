"""A Dataset of dicts, a collate function and a sampler of its own; batches are nested dicts that go into the model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Houses(Dataset):
    def __init__(self, count):
        g = torch.Generator().manual_seed(77)
        self.rows = []
        for i in range(count):
            rooms = int(torch.randint(1, 6, (1,), generator=g))
            area = float(torch.rand(1, generator=g)) * 50 + 20 * rooms
            town = int(torch.randint(0, 7, (1,), generator=g))
            self.rows.append(
                {"id": f"house-{i}", "rooms": rooms, "area": area, "town": town, "price": area * (3 + town) / 500}
            )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    numbers = torch.tensor([[row["rooms"] / 5, row["area"] / 100] for row in rows])
    return {
        "inputs": {"numbers": numbers, "categories": {"town": torch.tensor([row["town"] for row in rows])}},
        "target": torch.tensor([row["price"] for row in rows]),
        "ids": [row["id"] for row in rows],
    }


class PriceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.town = nn.Embedding(7, 4)
        self.mlp = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs):
        town = self.town(inputs["categories"]["town"])
        return {"price": self.mlp(torch.cat([inputs["numbers"], town], dim=1)).squeeze(1)}


torch.manual_seed(41)
dataset = Houses(150)
sampler = WeightedRandomSampler([1.0 + row["rooms"] for row in dataset.rows], num_samples=150)
loader = DataLoader(dataset, batch_size=22, sampler=sampler, num_workers=0, collate_fn=collate)
model = PriceModel()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(4):
    for batch in loader:
        loss = nn.functional.l1_loss(model(batch["inputs"])["price"], batch["target"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: l1 {loss.item():.5f}, last batch {len(batch['ids'])} ends with {batch['ids'][-1]}")
