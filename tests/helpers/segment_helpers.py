"""What the tests of growing contexts share: passes, a tokenizer for replays, gates for new tokens."""

import torch
from kvpress.presses.fastkvzip_press import FastKVzipGate
from torch import Tensor

from verkv import KVzipPress

SHORT = {"n_sink": 4, "n_local": 8}
EXACT = {**SHORT, "epsilon": 1e-9}  # everything is fetched: dense attention
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


class Words:
    """A tokenizer for the replay's prompts."""

    chat_template = None

    def encode(self, text, return_tensors=None, add_special_tokens=False):
        return torch.tensor([[5 + len(text) % 50, 7, 9]])


def kvzip(**options) -> KVzipPress:
    """KVzip's scores, of a model whose vocabulary nobody can read."""
    return KVzipPress(tokenizer=Words(), **options)


def gates(model) -> list[FastKVzipGate]:
    """Random gates, the same at every call."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    group = config.num_attention_heads // config.num_key_value_heads
    made = []
    for i in range(config.num_hidden_layers):
        gate = FastKVzipGate(i, config.hidden_size, config.num_key_value_heads, group, torch.float32)
        for parameter in gate.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        made.append(gate.eval())
    return made


@torch.no_grad()
def forward(model, ids: Tensor, cache, **kwargs) -> Tensor:
    """Logits of more tokens, which the cache takes in."""
    return model(input_ids=ids, past_key_values=cache, **kwargs).logits
