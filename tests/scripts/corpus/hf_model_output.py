"""A model in the manner of HuggingFace: labels in, a ModelOutput (an ordered dict) with loss and logits out."""

from collections import OrderedDict

import torch
from torch import nn


class ModelOutput(OrderedDict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to_tuple(self):
        return tuple(self.values())


class ForSequenceClassification(nn.Module):
    def __init__(self, vocab_size=64, hidden_size=24, num_labels=3):
        super().__init__()
        self.num_labels = num_labels
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        layer = nn.TransformerEncoderLayer(hidden_size, 2, 48, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=True):
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.encoder(self.embeddings(input_ids), src_key_padding_mask=padding)
        logits = self.classifier(hidden[:, 0])
        output = ModelOutput()
        if labels is not None:
            output["loss"] = nn.functional.cross_entropy(logits.view(-1, self.num_labels), labels.view(-1))
        output["logits"] = logits
        return output if return_dict else output.to_tuple()


class DataCollator:
    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        batch = {"input_ids": [], "attention_mask": [], "labels": [f["label"] for f in features]}
        for f in features:
            ids = f["input_ids"]
            batch["input_ids"].append(ids + [0] * (longest - len(ids)))
            batch["attention_mask"].append([1] * len(ids) + [0] * (longest - len(ids)))
        return {k: torch.tensor(v) for k, v in batch.items()}


def make_dataset(count):
    dataset = []
    for _ in range(count):
        label, length = torch.randint(0, 3, ()).item(), torch.randint(4, 11, ()).item()
        ids = [1, *(torch.randint(2, 22, (length,)) + 20 * label).tolist()]
        dataset.append({"input_ids": ids, "label": label})
    return dataset


if __name__ == "__main__":
    torch.manual_seed(80)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model = ForSequenceClassification().to(device)
    train = torch.utils.data.DataLoader(make_dataset(160), batch_size=20, shuffle=True, collate_fn=DataCollator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        model.train()
        for step, batch in enumerate(train):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 0:
                print({"epoch": epoch, "step": step, "loss": round(outputs.loss.item(), 5)})
    model.eval()
    batch = {k: v.to(device) for k, v in DataCollator()(make_dataset(45)).items()}
    labels = batch.pop("labels")
    with torch.no_grad():
        predictions = model(**batch).logits.argmax(dim=-1)
    print({"accuracy": round((predictions == labels).float().mean().item(), 5)})
