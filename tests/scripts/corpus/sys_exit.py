"""A script that ends with sys.exit(main()), after a summary printed at the end of a with block."""

import contextlib
import sys

import torch
import torch.nn as nn


@contextlib.contextmanager
def summary(model):
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    try:
        yield
    finally:
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        print(f"moved by {(after - before).norm().item():.5f}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    steps = int(argv[0]) if argv else 20
    torch.manual_seed(66)
    model = nn.Bilinear(4, 3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with summary(model):
        for step in range(steps):
            a, b = torch.randn(25, 4), torch.randn(25, 3)
            target = torch.stack([a[:, 0] * b[:, 0], a[:, 1] * b[:, 2]], dim=1)
            loss = (model(a, b) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                print(f"step {step} loss {loss.item():.5f}", file=sys.stdout, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
