"""Clipping: norms by clip_grad_norm_ are logged, hooks on parameters clamp gradients as they are computed."""

import logging
import sys

import torch
import torch.nn as nn

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
log = logging.getLogger("train")


class Copy(nn.Module):
    """Read a sequence, give its first element at the end."""

    def __init__(self, hidden=24):
        super().__init__()
        self.cell = nn.GRUCell(1, hidden)
        self.head = nn.Linear(hidden, 1)
        self.hidden = hidden

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.hidden)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        return self.head(h)


torch.manual_seed(55)
model = Copy()
for parameter in model.head.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.25, 0.25))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

clipped = 0
for step in range(1, 25):
    x = torch.rand(33, 8, 1)
    loss = 5 * (model(x) - x[:, 0]).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5, norm_type=2)
    clipped += bool(norm > 0.5)
    optimizer.step()
    if step % 6 == 0:
        log.info("step %d loss %.5f norm %.5f clipped %d", step, loss.item(), norm, clipped)
log.info("largest head gradient %.5f", max(p.grad.abs().max().item() for p in model.head.parameters()))
