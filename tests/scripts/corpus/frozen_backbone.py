"""Transfer learning: a frozen backbone in eval mode, features under no_grad, a new head that is trained."""

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits

torch.manual_seed(1)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

backbone = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(12, 24, 3, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
)
for param in backbone.parameters():
    param.requires_grad = False
backbone[1].running_var.fill_(0.1)
backbone.to(device).eval()

head = nn.Linear(96, 10).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(
    filter(lambda p: p.requires_grad, [*backbone.parameters(), *head.parameters()]), lr=0.5, momentum=0.9
)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)

for epoch in range(3):
    running_loss, running_corrects = 0.0, 0
    for start in range(0, 600, 50):
        inputs, targets = images[start : start + 50].to(device), labels[start : start + 50].to(device)
        with torch.no_grad():
            features = backbone(inputs)
        outputs = head(features)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * inputs.size(0)
        running_corrects += (outputs.argmax(1) == targets).sum().item()
    print(f"{epoch}: train Loss: {running_loss / 600:.4f} Acc: {running_corrects / 600:.4f}")
head.eval()
with torch.no_grad():
    hits = (head(backbone(images[600:900].to(device))).argmax(1).cpu() == labels[600:900]).sum().item()
print(f"val hits: {hits} batches tracked: {backbone[1].num_batches_tracked.item()} bias {head.bias.norm().item():.5f}")
