"""A synthetic sealed layer of a model's shape, its decode step kernel by kernel, and the bytes that each must move."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.cuda import layout
from verkv.cuda.launch import unpack_bits
from verkv.estimators.certificate import log_terms
from verkv.estimators.sampling import (
    MIN_INCLUSION_PROB,
    inclusion_probabilities,
    poisson_sample,
    quantize_inclusion_probs,
)
from verkv.sketches import RopePairSketch
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT, ResidentRows

DELTA = 0.1
UPPER_SHARES = (None, 0.7)  # of delta: Eq. (7), and the default of a press, which bounds the two sides apart
N_PROTECTED = 64  # sinks, and as many of the local window
SHORTLIST = 128


@dataclass(frozen=True)
class Model:
    """What of a model decides the time of attention over its context."""

    name: str
    n_layers: int  # with full attention
    n_heads: int
    n_kv_heads: int
    head_dim: int


QWEN3_4B = Model("Qwen3-4B", 36, 32, 8, 128)


@dataclass
class Layer:
    """Tensors of one sealed layer, N units of T tokens."""

    keys: Tensor  # (N, T, d) on the host, pinned if there is a GPU
    values: Tensor
    codes: Tensor  # (N, T)
    rows: ResidentRows
    row_positions: Tensor
    sketch: RopePairSketch
    query: Tensor  # (N, G, d), float32
    tail_lse: Tensor
    scaling: float

    def kernel_arrays(self) -> dict[str, Tensor]:
        """By the names of the kernels' parameters."""
        flat = lambda tensor: tensor.flatten(0, 1)  # noqa: E731
        return {
            "query": self.query,
            "codes": self.codes,
            "channels": flat(self.sketch._channels),
            "sketch": flat(self.sketch._codes),
            "zero": flat(self.sketch._zero),
            "scale": flat(self.sketch._scale),
            "row_keys": self.rows.keys,
            "row_values": self.rows.values,
            "row_codes": self.rows.codes,
            "row_positions": self.row_positions,
            "row_offsets": self.rows.offsets,
            "host_keys": self.keys,
            "host_values": self.values,
            "tail_lse": self.tail_lse,
        }


def make_layer(
    model: Model,
    n_tokens: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    kept: float = 1 / 16,
) -> Layer:
    """Keys with strong channels and a few needles per query head, sampled to a share of the cache's bytes.

    Parameters
    ----------
    model : Model
    n_tokens : int
    batch : int
        Contexts; each has keys of its own.
    dtype : torch.dtype
        Of keys and values.
    device : torch.device
    seed : int
    kept : float in (0, 1)
        Share of the bytes of keys and values that stays on the device, sketch and codes included. No fewer rows are
        kept than sinks and local window, twice ``N_PROTECTED`` or a quarter of a short context, and a few more.

    Returns
    -------
    Layer
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    d, group = model.head_dim, model.n_heads // model.n_kv_heads
    n_units = batch * model.n_kv_heads
    query = 0.5 * normal(n_units, group, d)
    keys = torch.empty(n_units, n_tokens, d, dtype=dtype, device=device)
    best = torch.empty(n_units, n_tokens, device=device)
    for unit in range(n_units):  # one at a time: float32 keys of all would not fit beside everything else
        own = normal(n_tokens, d) * (0.5 * normal(d)).exp()
        for row in query[unit]:
            needles = torch.randint(0, n_tokens, (12,), generator=generator, device=device)
            own[needles] += 2 * row * (0.3 + 0.9 * torch.rand(12, 1, generator=generator, device=device))
        keys[unit] = own.to(dtype)
        best[unit] = (query[unit] @ keys[unit].float().mT * d**-0.5).amax(0)
    values = normal(n_units, 1, d).to(dtype).expand(-1, n_tokens, -1) + keys.roll(1, 0)

    sketch = RopePairSketch().build(keys[None])
    scores = (0.5 * best + normal(n_units, n_tokens)).exp()
    codes = _draw(scores, _row_budget(keys, sketch, kept), generator)
    rows = ResidentRows.gather(keys[None], values[None], codes[None])
    return Layer(
        *(to_host(tensor) for tensor in (keys, values)),
        codes,
        rows,
        ((codes & RESIDENT_BIT) != 0).nonzero()[:, 1].int(),
        sketch,
        query,
        torch.full((n_units, group), -torch.inf, device=device),
        d**-0.5,
    )


def _n_protected(n_tokens: int) -> int:
    return min(N_PROTECTED, n_tokens // 8)


def _row_budget(keys: Tensor, sketch: RopePairSketch, kept: float) -> float:
    """Expected rows of a unit for this share of the bytes of keys and values."""
    _, n_tokens, d = keys.shape
    row_bytes = 2 * d * keys.element_size()
    charged = sketch.charged_bytes(n_tokens, d) + n_tokens
    budget = (n_tokens * row_bytes * kept - charged) / (row_bytes + 5)  # code and position of a row
    return max(budget, 2.5 * _n_protected(n_tokens))


def _draw(scores: Tensor, budget: float, generator: torch.Generator) -> Tensor:
    """Codes (N, T) of a sample; both ends are certain."""
    n_protected = _n_protected(scores.shape[1])
    certain = torch.zeros_like(scores, dtype=torch.bool)
    certain[:, :n_protected] = certain[:, scores.shape[1] - n_protected :] = True
    r = inclusion_probabilities(scores, budget, certain=certain, floor=MIN_INCLUSION_PROB)
    levels, r = quantize_inclusion_probs(r)
    return levels | poisson_sample(r, generator).to(torch.uint8) * RESIDENT_BIT


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, pinned if there is a GPU."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _copy(tensor: Tensor) -> Tensor:
    """A copy in the same kind of memory."""
    return torch.empty_like(tensor, pin_memory=tensor.is_pinned()).copy_(tensor)


class KernelStep:
    """The kernels of one layer's step, launched one by one on buffers that all layers share; the default's bound.

    Parameters
    ----------
    layer : Layer
    shared : dict of Tensor, optional
        Buffers of another step over a layer of the same sizes.

    Attributes
    ----------
    arrays : dict of Tensor
        What the kernels read and write, by the names of their parameters.
    upper_share : float or None
        Part of delta for denominators estimated too large; None is Eq. (7).
    """

    upper_share = UPPER_SHARES[1]

    stages = {  # noqa: RUF012
        "score": ("vk_score",),
        "shortlist": ("vk_shortlist",),
        "plan": ("vk_plan",),
        "emit": ("vk_emit",),
        "settle": ("vk_settle",),
        "attend": ("vk_attend",),
    }

    def __init__(self, layer: Layer, shared: dict[str, Tensor] | None = None):
        from verkv.cuda import operators

        n_units, group, head_dim = layer.query.shape
        n_tokens, device = layer.codes.shape[1], layer.query.device
        splits = layout.splits_of(n_units, 1, operators.n_multiprocessors(device))
        self.sizes = layout.Sizes(n_units, n_tokens, group, group, head_dim, SHORTLIST, splits)
        self.layer, self.dtype, self.run_kernels = layer, layer.rows.keys.dtype, operators.run_kernels
        if shared is None:
            buffers = {}
            for make in (layout.score_buffers, layout.plan_buffers, layout.attend_buffers):
                buffers |= make(self.sizes)
            shared = operators.empty_buffers(buffers, device, tuple(buffers))
            for name, (shape, dtype) in layout.zeroed_buffers(self.sizes).items():
                shared[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        self.shared = shared
        self.arrays = layer.kernel_arrays() | shared

    def copy(self, own_host: bool = False) -> "KernelStep":
        """The same step on copies of all that it reads from the device, and with ``own_host`` from the host, too."""
        step = object.__new__(KernelStep)
        step.__dict__.update(self.__dict__)
        same = {*self.shared, *(() if own_host else ("host_keys", "host_values"))}
        step.arrays = {name: tensor if name in same else _copy(tensor) for name, tensor in self.arrays.items()}
        return step

    def clear(self) -> None:
        """Zero the counters, which a step that ends before its last stage leaves as they are."""
        for name in layout.zeroed_buffers(self.sizes):
            self.shared[name].zero_()

    def __call__(self, stages: tuple[str, ...], epsilon: float) -> None:
        """Launch some stages.

        Parameters
        ----------
        stages : tuple of str
            In the order of ``stages``, all before them being done.
        epsilon : float
            As of :func:`~verkv.cuda.layout.safe_epsilon`.
        """
        names = tuple(name for stage in stages for name in self.stages[stage])
        scalars = {"scaling": self.layer.scaling, "max_read": 1.0, "compact": 1}
        scalars |= zip(("log_term", "log_upper", "log_lower"), log_terms(DELTA, self.upper_share), strict=True)
        self.run_kernels(names, self.sizes, self.arrays, scalars | {"epsilon": epsilon}, self.dtype)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a stage must move: of the device's memory, read or written, and read from pinned host memory."""

    device: int
    host: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.device + other.device, self.host + other.host)


def traffic(step: KernelStep, epsilon: float) -> dict[str, Traffic]:
    """Bytes that each stage of a step must move for its layer, counted from the layer and what was decided for it.

    Those are each stage's inputs and results, once: arrays over all tokens whole, rows of keys and values where they
    are read. Scratch inside a stage, and one number a row or unit, are left out.

    Parameters
    ----------
    step : KernelStep
        After all its stages.
    epsilon : float
        Tolerance that it was run with.

    Returns
    -------
    dict of str to Traffic
        By stage, of one layer.
    """
    arrays = step.arrays
    size = lambda *names: sum(arrays[name].nbytes for name in names)  # noqa: E731
    key_bytes = arrays["row_keys"].shape[1] * arrays["row_keys"].element_size()
    n_certain = int(((arrays["row_codes"] & LEVEL_MASK) == 0).sum())
    n_read, n_fetched = int(arrays["n_read"].sum()), int(arrays["n_fetched"].sum())
    n_resident_read = int(unpack_bits(arrays["known"], step.sizes.n_tokens).sum()) - n_read
    deciding = float((~(arrays["bound"] < layout.safe_epsilon(epsilon))).double().mean())  # rows that promote something
    sketch = ("channels", "sketch", "zero", "scale")
    positions = n_fetched * arrays["fetch_positions"].element_size()
    certain_bytes = key_bytes + arrays["row_positions"].element_size()
    rows = ("row_keys", "row_values", "row_codes", "row_positions")
    return {
        "score": Traffic(size("query", "codes", *sketch, "row_codes", "logits") + n_certain * certain_bytes),
        "shortlist": Traffic(size("codes", "logits", "known") + n_resident_read * key_bytes, n_read * key_bytes),
        "plan": Traffic(size("codes", "logits", "shrunk")),
        "emit + settle": Traffic(size("codes", "mask") + round(deciding * size("logits", "shrunk")) + positions),
        "attend": Traffic(size("query", *rows, "mask", "shrunk", "output") + positions, n_fetched * 2 * key_bytes),
    }
