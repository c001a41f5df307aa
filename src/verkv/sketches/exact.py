"""The paper's "perfect sketch": exact scores, from the host's keys. An oracle for experiments, not for deployment."""

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verkv.sketches.rope_pair import RopePairSketch


@dataclass
class ExactSketch:
    """Score all tokens with their exact keys, read from host memory.

    It shows what a sketch without error would give. To make its samples comparable with the 2-bit sketch's it is
    charged to the memory budget as that one is (``charged_as``), although it keeps nothing on the device, and its key
    reads are left out of the KV read statistics. Both are said in the statistics' notes.

    Parameters
    ----------
    charged_as : RopePairSketch
        The sketch whose bytes are charged to the budget.

    Examples
    --------
    >>> import torch
    >>> keys = torch.randn(1, 2, 5, 8)
    >>> sketch = ExactSketch().build(keys)
    >>> torch.equal(sketch.logits(keys), keys @ keys.mT)
    True
    """

    charged_as: RopePairSketch = field(default_factory=RopePairSketch)

    name = "exact"
    is_oracle = True
    is_linear = True

    def build(self, keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None) -> "ExactSketch":
        """Keep a reference to the keys (B, Hkv, T, d); nothing is copied. Queries and positions are not used."""
        built = dataclasses.replace(self)
        built._keys = keys
        return built

    def extend(self, keys: Tensor) -> "ExactSketch":
        """With a reference to the keys of later tokens."""
        return self.build((*self._parts, keys))

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self._keys if isinstance(self._keys, tuple) else (self._keys,)

    def logits(self, query: Tensor) -> Tensor:
        """Exact <k, q> in float32; (B, Hkv, R, d) -> (B, Hkv, R, T)."""
        query = query.float()
        return torch.cat([query @ keys.to(query.device).float().mT for keys in self._parts], -1)

    def decode(self) -> Tensor:
        """The keys themselves, in float32."""
        return torch.cat([keys.float() for keys in self._parts], 2)

    def charged_bytes(self, n_tokens: int, head_dim: int) -> int:
        """Those of the 2-bit sketch, so that the samples match."""
        return self.charged_as.charged_bytes(n_tokens, head_dim)

    @property
    def nbytes(self) -> int:
        """0: the keys it reads are the host tier's."""
        return 0

    @property
    def uncharged_nbytes(self) -> int:
        """0."""
        return 0

    def tensors(self) -> dict[str, Tensor]:
        """None: the keys belong to the host tier."""
        return {}

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def select(self, indices: Tensor) -> "ExactSketch":
        """Reindex the batch."""
        chosen = [keys[indices.to(keys.device)] for keys in self._parts]
        return self.build(tuple(chosen) if len(chosen) > 1 else chosen[0])
