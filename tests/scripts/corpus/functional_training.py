"""torch.func style: parameters in a dict, grad_and_value of a loss over the batch, an update without an optimizer."""

import torch
import torch.nn as nn
from torch.func import functional_call, grad_and_value, stack_module_state

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))
params, buffers = stack_module_state([model])
params = {name: value[0].detach() for name, value in params.items()}


def loss_fn(params, x, y):
    return (functional_call(model, (params, {}), (x,)).squeeze(-1) - y).pow(2).mean()


step_fn = grad_and_value(loss_fn)
velocity = {name: torch.zeros_like(value) for name, value in params.items()}

for step in range(1, 31):
    x = torch.rand(50, 2) * 2 - 1
    y = torch.sin(3 * x[:, 0]) * x[:, 1]
    grads, loss = step_fn(params, x, y)
    velocity = {name: 0.9 * velocity[name] + grads[name] for name in params}
    params = {name: params[name] - 0.02 * velocity[name] for name in params}
    if step % 10 == 0:
        print(f"step {step} mse {loss.item():.6f} grad {sum(g.norm() ** 2 for g in grads.values()).sqrt().item():.6f}")
