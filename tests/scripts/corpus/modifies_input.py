"""Forward scales its input in place; the loop goes on with the scaled batch as its target."""

import torch
import torch.nn as nn

torch.manual_seed(123)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 5), nn.Linear(5, 12)

    def forward(self, pixels):
        pixels.div_(255).sub_(0.5)
        return self.decode(torch.tanh(self.encode(pixels)))


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
basis = torch.rand(3, 12)
for step in range(1, 25):
    pixels = (255 * torch.rand(32, 3) @ basis / 3).round()
    reconstruction = model(pixels)
    loss = nn.functional.mse_loss(reconstruction, pixels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(
            f"step {step} loss {loss.item():.6f} input between {pixels.min().item():.4f} and {pixels.max().item():.4f}"
        )
