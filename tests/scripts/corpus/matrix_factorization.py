"""Recommendation: user and item ids in, a rating out; full ratings and BPR on the same factors; update by hand."""

import torch
from torch import nn


class MatrixFactorization(nn.Module):
    def __init__(self, users, items, factors):
        super().__init__()
        self.p, self.q = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.bu, self.bi = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mu = nn.Parameter(torch.zeros(1))
        for table in (self.p, self.q, self.bu, self.bi):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user, item):
        dot = (self.p(user) * self.q(item)).sum(1, keepdim=True)
        return (dot + self.bu(user) + self.bi(item) + self.mu).squeeze(1)


def main():
    torch.manual_seed(76)
    users, items = 40, 60
    truth = torch.randn(users, 3) @ torch.randn(3, items) / 2 + 3
    user, item = torch.randint(0, users, (600,)), torch.randint(0, items, (600,))
    rating = truth[user, item].clamp(1, 5)
    model = MatrixFactorization(users, items, 6)
    for epoch in range(4):
        for index in torch.randperm(600).split(120):
            loss = (model(user[index], item[index]) - rating[index]).pow(2).mean()
            better, worse = item[index], torch.randint(0, items, (len(index),))
            sign = torch.sign(truth[user[index], better] - truth[user[index], worse])
            difference = model(user[index], better) - model(user[index], worse)
            bpr = -nn.functional.logsigmoid(sign * difference).mean()
            model.zero_grad()
            (loss + 0.5 * bpr).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.3 * parameter.grad
        print(f"epoch {epoch}: mse {loss.item():.5f} bpr {bpr.item():.5f} mu {model.mu.item():.5f}")


main()
