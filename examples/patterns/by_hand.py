"""By hand: a copy of the model on each card, gradients summed, one update each. One process, no library.

python examples/patterns/by_hand.py      takes every visible GPU, or else plays two cards on the CPU
"""

import torch
from task import BATCH, EPOCHS, LEARNING_RATE, make_model, report, test_set, train_set
from torch.nn import functional as F
from torch.utils.data import DataLoader

cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")] * 2
models = [make_model().to(card) for card in cards]
optimizers = [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9) for model in models]
device, model = cards[0], models[0]
loader = DataLoader(train_set, BATCH, shuffle=True)
test_loader = DataLoader(test_set, BATCH)

for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = []
        for replica, card, part, target in zip(models, cards, x.chunk(len(cards)), y.chunk(len(cards)), strict=True):
            # A sum over the part divided by the whole: parts may differ in size.
            losses.append(F.cross_entropy(replica(part.to(card)), target.to(card), reduction="sum") / len(y))
            losses[-1].backward()
        with torch.no_grad():
            for copies in zip(*(replica.parameters() for replica in models), strict=True):
                total = sum(parameter.grad.to(device) for parameter in copies)
                for parameter in copies:
                    parameter.grad.copy_(total)
        for optimizer in optimizers:
            optimizer.step()
        loss = sum(part.detach().to(device) for part in losses)
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in test_loader:
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    report(epoch, loss.item(), right / len(test_set))
