"""What the press tests share: prompts, prefill, decoding, and the codes of sealed layers."""

import torch
from torch import Tensor
from transformers import DynamicCache

from verkv.tiers import LEVEL_MASK, RESIDENT_BIT

SHORT = {"n_sink": 4, "n_local": 8}  # protection for contexts of about 100 tokens


def random_ids(batch: int, n_tokens: int, seed: int = 1) -> Tensor:
    """Token ids of a tiny model's vocabulary, without its special tokens."""
    return torch.randint(3, 256, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows (1, T) of different lengths, padded on the left."""
    width = max(row.shape[1] for row in rows)
    pads = [width - row.shape[1] for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    mask = (torch.arange(width) >= torch.tensor(pads)[:, None]).long()
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    """Position ids as ``generate`` makes them."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def prefill(model, ids: Tensor, press=None, cache=None, **kwargs):
    """The cache of a prompt, compressed where there is a press."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    if press is None:
        model.model(input_ids=ids, past_key_values=cache, **kwargs)
    else:
        with press(model):
            model.model(input_ids=ids, past_key_values=cache, **kwargs)
    return cache


@torch.no_grad()
def decode(model, ids: Tensor, cache, **kwargs) -> Tensor:
    """Logits of more tokens on top of a cache, which takes them in."""
    return model(input_ids=ids, past_key_values=cache, **kwargs).logits


def full_layers(cache) -> list[int]:
    """Sealed layers."""
    return [i for i, layer in enumerate(cache.layers) if getattr(layer, "sealed", False)]


def resident_rows(layer) -> Tensor:
    """How many rows each unit keeps, (N,)."""
    return layer.context.rows.offsets.diff()


def inclusion_probs(codes: Tensor) -> Tensor:
    """r of codes of tokens that are there, in float64."""
    return torch.exp2(-(codes & LEVEL_MASK).double() / 8)


def is_resident(codes: Tensor) -> Tensor:
    return (codes & RESIDENT_BIT) != 0


def leftovers(model) -> list[str]:
    """Names of modules with hooks, and of rotary embeddings that are not the model's own."""
    found = []
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            found.append(f"hook on {name}")
        if name.endswith("self_attn.rotary_emb"):
            found.append(name)
    return found
