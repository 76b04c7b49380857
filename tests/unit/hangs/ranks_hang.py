"""Two ranks of a script that knows nothing of manycard; one hangs as the argument says."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KIND = sys.argv[1]


def write_log() -> None:
    time.sleep(60)


def steps(model: nn.Module, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if KIND == "start" and rank == 1:
        write_log()
    dist.init_process_group("gloo")
    other = dist.new_group()
    net = DistributedDataParallel(nn.Linear(4, 2))
    steps(net, 5)
    if KIND == "stuck" and rank == 1:
        write_log()
    if KIND == "skip":
        if rank == 0:
            dist.all_reduce(torch.ones(2))  # which the other leaves out
        dist.all_reduce(torch.ones(7), group=other)
    if KIND == "stopped" and rank == 1:
        waker = "import os, sys, time; time.sleep(4); os.kill(int(sys.argv[1]), 18)"
        os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", waker, str(os.getpid())])
        os.kill(os.getpid(), signal.SIGSTOP)
    steps(net, 3)
    print(f"rank {rank} is done")
