"""A script that wraps its model in nn.DataParallel itself, and saves model.module.state_dict()."""

import io

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.inner, self.outer = nn.Linear(inputs, hidden), nn.Linear(hidden, 1)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x))).squeeze(1)


def main():
    torch.manual_seed(65)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    x = torch.randn(130, 5)
    dataset = TensorDataset(x, x.abs().sum(1))
    loader = DataLoader(dataset, batch_size=30, shuffle=True)

    model = nn.DataParallel(Regressor(5, 32)).to(device)
    print("wrapped:", isinstance(model, nn.DataParallel), *(name for name, _ in model.named_parameters()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        for inputs, targets in loader:
            outputs = model(inputs.to(device))
            loss = nn.functional.smooth_l1_loss(outputs, targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.5f} of {len(outputs)} outputs")

    file = io.BytesIO()
    torch.save(model.module.state_dict(), file)
    file.seek(0)
    single = Regressor(5, 32)
    single.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        print(f"reloaded: {single(x).mean().item():.5f}, keys {list(single.state_dict())}")


if __name__ == "__main__":
    main()
