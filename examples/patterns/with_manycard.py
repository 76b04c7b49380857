"""manycard: all the cards from one process, or one process a card, with the same script.

python examples/patterns/with_manycard.py                      takes every visible GPU, or else two simulated cards
manycard run --strategy ddp examples/patterns/with_manycard.py  the same training, one process a card
"""

import torch
from task import BATCH, EPOCHS, LEARNING_RATE, make_model, report, test_set, train_set
from torch.nn import functional as F

import manycard as mc

parallel = mc.Parallel(cards="all" if torch.cuda.is_available() else "cpu:2", seed=0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
model, optimizer = parallel.setup(model, optimizer)
loader = parallel.loader(train_set, BATCH, shuffle=True)
test_loader = parallel.loader(test_set, BATCH)
step = parallel.train_step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), model, optimizer)


def metrics(model, batch):
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


for epoch in range(EPOCHS):
    for batch in loader:
        loss = step(batch)
    accuracy = parallel.evaluate(metrics, model, test_loader)["accuracy"]
    if parallel.is_primary:
        report(epoch, loss.item(), accuracy)
parallel.close()
