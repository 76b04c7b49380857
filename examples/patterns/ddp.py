"""`DistributedDataParallel`: one process a card.

torchrun --nproc-per-node 2 examples/patterns/ddp.py
"""

import os

import torch
import torch.distributed as dist
from task import BATCH, EPOCHS, LEARNING_RATE, make_model, report, test_set, train_set
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
ranks = dist.get_world_size()
model = DistributedDataParallel(make_model().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, BATCH // ranks, sampler=sampler)
# The sampler would repeat samples to even out the ranks; each takes its own part instead.
test_part = torch.utils.data.Subset(test_set, range(dist.get_rank(), len(test_set), ranks))
test_loader = DataLoader(test_part, BATCH // ranks)

for epoch in range(EPOCHS):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in test_loader:
            right += (model.module(x.to(device)).argmax(1) == y.to(device)).sum().item()
    totals = torch.stack([loss.detach().double() / ranks, torch.tensor(right, device=device).double()])
    dist.all_reduce(totals)
    if dist.get_rank() == 0:
        report(epoch, totals[0].item(), totals[1].item() / len(test_set))
dist.destroy_process_group()
