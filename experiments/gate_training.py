"""Fast KVzip's gates: made, trained and kept in a file.

A gate (Kim et al., arXiv:2601.17668) guesses from the hidden states that enter an attention layer how much attention
KVzip's replay will find for each token. Here it learns that from the replay itself.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from kvpress.presses.fastkvzip_press import FastKVzipGate
from safetensors.torch import save_file
from torch import Tensor, nn

from verkv.presses import fastkvzip_press
from verkv.presses.fastkvzip_press import SAFETENSORS_ENTRY as FORMAT

LOSSES = ("bce", "log")
LOG_FLOOR = 1e-4  # scores below are alike to the loss "log": nothing ever keeps a token for such a score
SCALE_FLOOR = 1e-2  # of the largest channel's scale: dividing by less would take the folded weights out of float16

# --- gates ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateOptions:
    """Sizes of a gate and how it is trained.

    Attributes
    ----------
    dim, sink : int
        Channels of a gate's queries and keys, and its learned sinks; 16 and 16 in the authors' gates.
    loss : {"bce", "log"}
        Binary cross-entropy against the scores, or the squared difference of logarithms.
    epochs, batch : int
        Passes over the tokens, and tokens per step.
    rate : float
        Of Adam; it falls to 0 as a cosine does.
    seed : int
    """

    dim: int = 8
    sink: int = 16
    loss: str = "log"
    epochs: int = 8
    batch: int = 256
    rate: float = 3e-3
    seed: int = 0


def new_gate(layer: int, config, options: GateOptions) -> FastKVzipGate:
    """An untrained gate of one layer."""
    text = config.get_text_config(decoder=True)
    group = text.num_attention_heads // text.num_key_value_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed * 10_007 + layer)
        gate = FastKVzipGate(
            layer, text.hidden_size, text.num_key_value_heads, group, torch.float32, options.dim, options.sink
        )
        nn.init.normal_(gate.k_base)  # equal sinks would get equal gradients and stay equal
    return gate


def loss_of(scores: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Mean loss of scores in (0, 1) against KVzip's, both (Hkv, n)."""
    if kind == "bce":
        return nn.functional.binary_cross_entropy(scores.clamp(1e-7, 1 - 1e-7), targets)
    return nn.functional.mse_loss((scores + LOG_FLOOR).log(), (targets + LOG_FLOOR).log())


def train_gate(gate: FastKVzipGate, hidden: Tensor, targets: Tensor, options: GateOptions) -> list[float]:
    """Fit a gate in place and return the mean loss of every epoch.

    Parameters
    ----------
    gate : FastKVzipGate
    hidden : Tensor, shape (N, D), float32
    targets : Tensor, shape (Hkv, N), in [0, 1]
    options : GateOptions
    """
    scale = hidden.square().mean(0).sqrt()
    scale = scale.clamp_min(SCALE_FLOOR * float(scale.max()))
    hidden = hidden / scale  # a few channels are many times larger than the rest and would slow all others down
    order = torch.Generator().manual_seed(options.seed)
    optimiser = torch.optim.Adam(gate.parameters(), lr=options.rate)
    n_steps = options.epochs * math.ceil(len(hidden) / options.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: 0.5 * (1 + math.cos(math.pi * i / n_steps)))
    losses = []
    for _ in range(options.epochs):
        total = 0.0
        for index in torch.randperm(len(hidden), generator=order).split(options.batch):
            loss = loss_of(gate(hidden[index][None])[0], targets[:, index], options.loss)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item() * len(index)
        losses.append(total / len(hidden))
    with torch.no_grad():  # the gate reads hidden states as they are
        gate.q_proj.weight /= scale
        gate.k_proj.weight /= scale
    return losses


# --- their file -------------------------------------------------------------------------------------------------------


def save_gates(path: Path, gates: dict[int, nn.Module], config, details: dict) -> int:
    """Write gates in float16 and return the file's size in bytes.

    The tensors of layer i are called ``i.<parameter>``. Layers without full attention have none. The metadata's only
    entry, ``fast-kvzip-gates``, is JSON with the number of layers of the model and ``details``.
    """
    text = config.get_text_config(decoder=True)
    tensors = {f"{i}.{name}": t.half() for i, gate in gates.items() for name, t in gate.state_dict().items()}
    described = json.dumps({"num_hidden_layers": text.num_hidden_layers, **details})
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={FORMAT: described})  # of several entries the order would differ between runs
    return path.stat().st_size


def load_gates(path: Path, config) -> list[nn.Module | None]:
    """Gates of every layer of a model, in float32, as ``FastKVzipPress(gates=...)`` takes them.

    Parameters
    ----------
    path : path
        Of :func:`save_gates`.
    config : PretrainedConfig
        Of the model.

    Returns
    -------
    list of FastKVzipGate or None
        None at layers without full attention.

    Raises
    ------
    ValueError
        If the file is missing, holds something else, or its gates are for another model.
    """
    gates = fastkvzip_press.load_gates(path)
    check_gates(gates, config)
    return gates


def check_gates(gates: list[nn.Module | None], config) -> None:
    """Raise ValueError unless the gates are for a model of these sizes."""
    text = config.get_text_config(decoder=True)
    group = text.num_attention_heads // text.num_key_value_heads
    wanted = {
        "layers": text.num_hidden_layers,
        "hidden size": text.hidden_size,
        "KV heads": text.num_key_value_heads,
        "query heads per KV head": group,
    }
    first = next(gate for gate in gates if gate is not None)
    found = dict(zip(wanted, (len(gates), first.q_proj.in_features, first.nhead, first.ngroup), strict=True))
    wrong = [f"{found[name]} {name} (the model has {wanted[name]})" for name in wanted if found[name] != wanted[name]]
    if wrong:
        raise ValueError(f"the gates are for another model, with {', '.join(wrong)}: train gates for this one")
