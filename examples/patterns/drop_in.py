"""`mc.DataParallel` in the place of `nn.DataParallel`.

python examples/patterns/drop_in.py      takes every visible GPU, or else two simulated cards
"""

import torch
from task import BATCH, EPOCHS, LEARNING_RATE, make_model, report, test_set, train_set
from torch.nn import functional as F
from torch.utils.data import DataLoader

import manycard as mc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = mc.DataParallel(make_model().to(device), None if device.type == "cuda" else "cpu:2")
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
loader = DataLoader(train_set, BATCH, shuffle=True)
test_loader = DataLoader(test_set, BATCH)

for epoch in range(EPOCHS):
    model.train()
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
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    report(epoch, loss.item(), right / len(test_set))
