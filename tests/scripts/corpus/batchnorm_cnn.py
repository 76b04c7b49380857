"""A small ResNet with BatchNorm: statistics of the batch in training, running ones in evaluation."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


def conv_bn(cin, cout, kernel=3, stride=1):
    conv = nn.Conv2d(cin, cout, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout))


class Residual(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.first, self.second = conv_bn(cin, cout, stride=stride), conv_bn(cout, cout)
        self.skip = conv_bn(cin, cout, kernel=1, stride=stride) if cin != cout else nn.Identity()

    def forward(self, x):
        return F.relu(self.skip(x) + self.second(F.relu(self.first(x))))


class SmallResNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.body = nn.Sequential(Residual(1, 8), Residual(8, 16, stride=2))
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
trainset = torch.utils.data.TensorDataset(images[:480], labels[:480])
trainloader = torch.utils.data.DataLoader(trainset, batch_size=48, shuffle=True)

net = SmallResNet().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
for epoch in range(2):
    net.train()
    train_loss, correct, total = 0.0, 0, 0
    for inputs, targets in trainloader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        correct += outputs.argmax(1).eq(targets).sum().item()
        total += targets.size(0)
    acc = 100.0 * correct / total
    print(f"Epoch {epoch} | Loss: {train_loss / len(trainloader):.5f} | Acc: {acc:.3f}% ({correct}/{total})")

net.eval()
with torch.no_grad():
    test_loss = criterion(net(images[480:680].to(device)), labels[480:680].to(device))
bn = net.body[0].first[1]
print(f"test loss {test_loss.item():.5f}")
print(f"running mean {bn.running_mean.norm().item():.5f} var {bn.running_var.norm().item():.5f}")
print(f"batches tracked {bn.num_batches_tracked.item()}")
