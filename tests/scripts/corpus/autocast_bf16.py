"""Mixed precision on the CPU: forward and loss under torch.autocast in bfloat16, parameters in fp32."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 5))

    def forward(self, x):
        return self.layers(x)


x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.02)

for epoch in range(2):
    total = 0.0
    for input, target in loader:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = net(input)
            loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        opt.step()
        opt.zero_grad()
        total += loss.item() * len(input)
    print(f"epoch {epoch}: loss {total / 512:.3f}, logits {output.dtype}, weights {net.layers[0].weight.dtype}")

with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    accuracy = (net(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.1f}")
