"""torch.func: per-sample gradients by vmap(grad(...)), clipped each and averaged as in private training."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(2)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
params = {name: p.detach() for name, p in model.named_parameters()}
lr, clip = 0.2, 1.0

inputs = torch.randn(128, 6)
targets = (inputs[:, 0] * inputs[:, 1] > 0).long()


def compute_loss(params, sample, target):
    prediction = functional_call(model, params, (sample.unsqueeze(0),))
    return nn.functional.cross_entropy(prediction, target.unsqueeze(0))


per_sample_grad = vmap(grad(compute_loss), in_dims=(None, 0, 0))

for step in range(15):
    index = torch.randperm(128)[:32]
    grads = per_sample_grad(params, inputs[index], targets[index])
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    scale = (clip / norms).clamp(max=1.0)
    params = {name: p - lr * torch.einsum("i,i...->...", scale, grads[name]) / 32 for name, p in params.items()}
    if step % 5 == 4:
        loss = nn.functional.cross_entropy(functional_call(model, params, (inputs,)), targets)
        clipped = (scale < 1).sum().item()
        print(f"step {step + 1}: loss {loss.item():.5f}, mean norm {norms.mean().item():.5f}, clipped {clipped}")
model.load_state_dict(params)
with torch.no_grad():
    print("accuracy", (model(inputs).argmax(1) == targets).float().mean().item())
