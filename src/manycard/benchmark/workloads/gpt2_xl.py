"""GPT-2 XL: 1.5 billion parameters, so that memory and reductions count for more than launches."""

from __future__ import annotations

from manycard.benchmark.workloads.gpt2 import GPT2, GPTShape

__all__ = ["GPT2XL"]


class GPT2XL(GPT2):
    """1.56 B parameters, 1,024 tokens a sequence; with AdamW in fp32 it holds 23 GiB before any activation."""

    name = "gpt2-xl"
    per_card_batch = 4

    @property
    def shape(self) -> GPTShape:
        return super().shape if self.small else GPTShape(layers=48, heads=25, width=1600)
