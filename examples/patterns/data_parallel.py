"""`nn.DataParallel`: one line, and slow.

python examples/patterns/data_parallel.py      takes every visible GPU; without any, it runs the model as it is
"""

import torch
from task import BATCH, EPOCHS, LEARNING_RATE, make_model, report, test_set, train_set
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.DataParallel(make_model().to(device))
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
