"""Double precision by torch.set_default_dtype, deterministic algorithms, NumPy data; relative errors are printed."""

import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.manual_seed(108)
rng = np.random.default_rng(108)

points = rng.uniform(-1, 1, size=(300, 2))
values = np.exp(-4 * (points**2).sum(1)) * np.cos(3 * points[:, 0])
x, y = torch.from_numpy(points), torch.from_numpy(values)


class RBFNetwork(nn.Module):
    def __init__(self, centers):
        super().__init__()
        self.centers = nn.Parameter(torch.rand(centers, 2) * 2 - 1)
        self.log_width = nn.Parameter(torch.zeros(centers))
        self.weights = nn.Linear(centers, 1)

    def forward(self, x):
        distance = (x.unsqueeze(1) - self.centers).pow(2).sum(-1)
        return self.weights(torch.exp(-distance * self.log_width.exp())).squeeze(-1)


net = RBFNetwork(16)
optimizer = torch.optim.Rprop(net.parameters(), lr=0.01)
for epoch in range(25):
    optimizer.zero_grad()
    residual = net(x) - y
    loss = residual.pow(2).mean()
    loss.backward()
    optimizer.step()
    if epoch % 6 == 0:
        print(f"epoch {epoch}: mse {loss.item():.6e} relative error {(residual.norm() / y.norm()).item():.6f}")
print("dtype", next(net.parameters()).dtype, "centers", np.round(net.centers.detach().numpy().mean(0), 5).tolist())
