"""A HuggingFace-like language model whose loss, a mean over the tokens that aren't padding, is computed in forward."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn
from torch.nn import CrossEntropyLoss


@dataclass
class CausalLMOutput:
    loss: Optional[torch.FloatTensor] = None  # noqa: UP045
    logits: Optional[torch.FloatTensor] = None  # noqa: UP045


class ForCausalLM(nn.Module):
    def __init__(self, vocab=32, hidden=24):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.rnn(self.embed_tokens(input_ids))[0])
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss_fct = CrossEntropyLoss(ignore_index=-100)
            loss = loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


def make_batch(size, longest=14):
    lengths = torch.randint(3, longest + 1, (size,))
    start, stride = torch.randint(0, 32, (size, 1)), torch.randint(1, 4, (size, 1))
    ids = (start + stride * torch.arange(longest)) % 32
    padding = torch.arange(longest)[None] >= lengths[:, None]
    return ids.masked_fill(padding, 0), ids.masked_fill(padding, -100)


torch.manual_seed(48)
model = ForCausalLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model.train()
for step in range(30):
    input_ids, labels = make_batch(16)
    outputs = model(input_ids=input_ids, labels=labels)
    outputs.loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 0:
        print(f"step {step} loss {outputs.loss.item():.5f} tokens {(labels[:, 1:] != -100).sum().item()}")
