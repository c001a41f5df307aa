"""Fast KVzip scores: a small trained gate per layer reads the hidden states (arXiv:2601.17668)."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from kvpress import FastKVzipPress as KVPressFastKVzip
from kvpress.presses.fastkvzip_press import FastKVzipGate
from torch import Tensor, nn

from verkv.checks import check_count
from verkv.presses.eviction_press import EvictionPress
from verkv.presses.scores import Scores, Tail, recorded

HUB_REPOSITORY = "Jang-Hyun/Fast-KVzip"
WINDOW_SHARE = 0.02  # Fast KVzip keeps the last 2 % of the context, or LONG_WINDOW tokens of a long one
LONG_CONTEXT, LONG_WINDOW = 32_000, 4096
MAX_LAYERS = 10_000  # a file that claims more is damaged
SAFETENSORS_ENTRY = "fast-kvzip-gates"  # of the metadata of a file that experiments/train_gates.py wrote


@dataclass
class FastKVzipPress(EvictionPress):
    """Fast KVzip's importance scores; used alone, its eviction of the lowest-scored tokens.

    Gates are trained per model. They come from a file, made by ``experiments/train_gates.py`` or in the format of the
    authors' repository, or from that repository on the hub by the model's name. Reading a file runs no code.

    Parameters
    ----------
    compression_ratio, budget_scope, n_sink, audit
        As in :class:`~verkv.presses.eviction_press.EvictionPress`.
    gates : path, list of torch.nn.Module, or None
        A ``.safetensors`` or ``.pt`` file, gates per layer (None where a layer has no full attention), or None for the
        hub.
    n_local : int, optional
        Trailing tokens always kept when used alone. By default Fast KVzip's own rule: 2 % of the context, 4,096
        tokens from 32,000 on (which is more than a whole 32x budget there).

    References
    ----------
    Kim et al., "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction", arXiv:2601.17668.
    """

    gates: object = field(default=None, repr=False)
    n_local: int | None = None

    def _check_options(self) -> None:
        super()._check_options()
        if self.n_local is not None:
            check_count("n_local", self.n_local)

    def source(self) -> "GateSource":
        """A fresh gate scorer."""
        return GateSource(self.gates)

    def _n_protected_ends(self, n_tokens: int, prefix_length: int) -> tuple[int, int]:
        n_local = self.n_local
        if n_local is None:
            n_local = LONG_WINDOW if n_tokens >= LONG_CONTEXT else max(1, int(n_tokens * WINDOW_SHARE))
        return self.n_sink, n_local


@dataclass
class GateSource:
    """Scores by trained gates; see :class:`FastKVzipPress`."""

    gates: object = None
    kvpress_press: KVPressFastKVzip | None = None

    name = "FastKVzip"
    prefix_length = 0
    records = "scores"

    @classmethod
    def from_kvpress(cls, press: KVPressFastKVzip) -> "GateSource":
        """The gates of KVPress' press, loaded its way."""
        return cls(gates=press.gates, kvpress_press=copy.copy(press))

    def prepare(self, model) -> None:
        """Load the gates.

        Raises
        ------
        ValueError
            If the model has no gates, or they do not fit it.
        """
        if self.gates is None and self.kvpress_press is not None:
            self.kvpress_press.post_init_from_model(model)
            self.gates = self.kvpress_press.gates
        if self.gates is None:
            self.gates = download_gates(model.config)
        if isinstance(self.gates, (str, Path)):
            self.gates = load_gates(self.gates)
        n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        if len(self.gates) != n_layers:
            raise ValueError(f"gates are for {len(self.gates)} layers, the model has {n_layers}; pass its own gates")
        width = model.config.get_text_config(decoder=True).hidden_size
        for gate in self.gates:
            found = getattr(getattr(gate, "q_proj", None), "in_features", width)  # other modules than KVPress' may come
            if found != width:
                raise ValueError(f"gates are for hidden size {found}, the model has {width}; pass its own gates")

    def on_attention(self, module: nn.Module, kwargs: dict, output, layer) -> Tensor:
        """The gate's score of every token of one layer, (B, Hkv, T). Gates read one row at a time."""
        hidden = kwargs["hidden_states"]
        gate = self.gates[module.layer_idx].to(hidden.device)
        dtype = next(getattr(gate, "q_proj", gate).parameters()).dtype  # not that of k_base, which is always float32
        scores = torch.cat([gate(row[None].to(dtype)) for row in hidden])
        if scores.shape[1] != layer.keys.shape[1]:
            raise ValueError(
                f"gates score {scores.shape[1]} KV heads, layer {module.layer_idx} has {layer.keys.shape[1]}; pass the "
                f"model's own gates"
            )
        return scores

    def after_prefill(self, model, cache, input_ids, attention_mask) -> None:
        """Nothing is left to do."""
        return None

    def score_tail(self, model, cache, tail: Tail) -> Scores:
        """What the gates said when the tokens came: they judge each by itself."""
        scores = {}
        for i in tail.layers:
            record = cache.layers[i].record
            scores[i] = recorded(record and record.scores, "scores", *tail.is_token.shape)[..., : tail.n_new]
        return scores


def load_gates(path: str | Path) -> list[nn.Module]:
    """Gates of every layer from a ``.safetensors`` file, or from one of the authors' format.

    The first has tensors ``<layer>.<parameter>``, read as float32, and its metadata's ``fast-kvzip-gates`` is JSON with
    ``num_hidden_layers``; layers without tensors have no gate, None. The second is a torch file of
    ``{"module": [state dict per layer]}``.

    Raises
    ------
    ValueError
        If the file is missing or holds something else.
    """
    if not Path(path).is_file():
        raise ValueError(f"gates={str(path)!r} is not a file")
    read = _safetensors_states if Path(path).suffix == ".safetensors" else _torch_states
    try:
        return [_gate(i, state) if state else None for i, state in enumerate(read(path))]
    except Exception as error:
        raise ValueError(f"gates={str(path)!r} does not hold Fast KVzip gates ({error})") from error


def _safetensors_states(path: str | Path) -> list[dict[str, Tensor]]:
    """Weights by layer, empty where a layer has no gate."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        n_layers = json.loads(file.metadata()[SAFETENSORS_ENTRY])["num_hidden_layers"]
        if not isinstance(n_layers, int) or not 0 < n_layers <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {n_layers!r}")
        states = [{} for _ in range(n_layers)]
        for name in file.keys():  # noqa: SIM118
            layer, parameter = name.split(".", 1)
            states[int(layer)][parameter] = file.get_tensor(name).float()
    return states


def _torch_states(path: str | Path) -> list[dict[str, Tensor]]:
    """Weights by layer."""
    import numpy as np

    # The authors' files hold numpy scalars beside the tensors; these types, and no others, may be unpickled.
    rebuild = np._core.multiarray._reconstruct  # called numpy.core... in files that numpy 1 wrote
    harmless = [rebuild, (rebuild, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype]
    harmless += [np.dtypes.Float64DType, np.dtypes.Float32DType]
    with torch.serialization.safe_globals(harmless):
        return torch.load(path, weights_only=True, map_location="cpu")["module"]


def download_gates(config) -> list[nn.Module]:
    """Gates of a model from the authors' repository on the hub.

    Raises
    ------
    ValueError
        If the repository has none for the model, or cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    text = config.get_text_config(decoder=True)
    group = text.num_attention_heads // text.num_key_value_heads
    filename = f"{config.name_or_path.rstrip('/').split('/')[-1].lower()}/q{group}_dim16_sink16.pt"
    try:
        path = hf_hub_download(repo_id=HUB_REPOSITORY, filename=filename, repo_type="model")
    except Exception as error:
        raise ValueError(
            f"no Fast KVzip gates for {config.name_or_path!r}: {HUB_REPOSITORY} has no {filename}, or cannot be "
            f"reached; pass FastKVzipPress(gates=FILE), or use KVzipPress(), which needs no training"
        ) from error
    return load_gates(path)


def _gate(index: int, state: dict[str, Tensor]) -> nn.Module:
    """One gate, its sizes read from its weights."""
    output_dim = state["q_norm.weight"].shape[-1]
    n_heads = state["k_proj.weight"].shape[0] // output_dim
    gate = FastKVzipGate(
        index=index,
        input_dim=state["q_proj.weight"].shape[1],
        nhead=n_heads,
        ngroup=state["q_proj.weight"].shape[0] // (n_heads * output_dim),
        dtype=state["q_proj.weight"].dtype,
        output_dim=output_dim,
        sink=state["k_base"].shape[2] if "k_base" in state else 0,
    )
    gate.load_state_dict(state)
    return gate.eval()
