"""kvtc against prefilling again: time to the first token of a stored context, and where it goes.

Prefill, compress, save and load take turns in one process, so that what else the machine does hits all alike; seconds
are of the process' CPU time. Ends with one JSON line.

    python experiments/kvtc_latency.py --calibration experiments/results/kvtc_table.safetensors --tokens 4000
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics

import torch
from demo_loading import load_demo_model
from transformers import DynamicCache

from verkv import __version__
from verkv.codecs import KVTC, KvtcConfig, Stages, load_context, open_context, save_context


class Timer:
    """CPU seconds of named steps, one list each."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, function):
        """Run a function, note its time, return its result."""
        start = time.process_time()
        result = function()
        self.seconds.setdefault(name, []).append(time.process_time() - start)
        return result

    def median(self, name: str) -> float:
        """Of one step."""
        return statistics.median(self.seconds[name])


@torch.inference_mode()
def prefill(model, ids: torch.Tensor) -> DynamicCache:
    """The cache of all tokens but the last."""
    cache = DynamicCache()
    model.model(input_ids=ids[:, :-1], past_key_values=cache)
    return cache


@torch.inference_mode()
def next_token(model, cache, ids: torch.Tensor) -> int:
    """The first token of an answer."""
    return int(model(input_ids=ids[:, -1:], past_key_values=cache).logits[0, -1].argmax())


def main() -> None:
    """Measure, print a table of stages and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, required=True, help="of the demo model, as kvtc_table.py makes it")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--ratio", type=float, default=16.0)
    parser.add_argument("--mode", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()

    model, tokenizer = load_demo_model()
    codec = KVTC(options.calibration, model, KvtcConfig(ratio=options.ratio, mode=options.mode))
    text = "\n\n".join(topics[name] for name in sorted(topics)[3::4])
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens + 1]
    timer, compressing, restoring = Timer(), Stages(time.process_time), Stages(time.process_time)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "context"
        for _ in range(options.repeats):
            cache = timer("prefill", lambda: prefill(model, ids))
            first = timer("first token, prefilled", lambda cache=cache: next_token(model, cache, ids))
            cache.crop(options.tokens)
            compressed = timer("compress", lambda cache=cache: codec.compress(cache, stages=compressing))
            timer("save", lambda compressed=compressed: compressed.save(file))
            timer("restore", lambda compressed=compressed: compressed.restore(stages=restoring))
            loaded = timer("load", lambda: load_context(file, model, codec.artefact))
            again = timer("first token, loaded", lambda loaded=loaded: next_token(model, loaded, ids))
            save_context(file, cache, model)
            raw = timer("load raw", lambda: load_context(file, model))
            del raw, loaded
            compressed.save(file)
            opened = open_context(file, model, codec.artefact)
            timer("one layer", lambda opened=opened: opened.decode_layer(0))
            opened.sections.close()
        n_bytes = file.stat().st_size
    full_bytes = 2 * options.tokens * codec.layout.elements_per_token()
    line = {
        "n_tokens": options.tokens,
        "ratio": options.ratio,
        "mode": options.mode,
        "threads": torch.get_num_threads(),
        "cpu_seconds": {name: round(timer.median(name), 4) for name in timer.seconds},
        "restore_over_prefill": timer.median("load") / timer.median("prefill"),
        "time_to_first_token_gain": (timer.median("prefill") + timer.median("first token, prefilled"))
        / (timer.median("load") + timer.median("first token, loaded")),
        "compress_mb_per_s": full_bytes / 1e6 / timer.median("compress"),
        "restore_mb_per_s": full_bytes / 1e6 / timer.median("restore"),
        "compress_stages": {name: round(seconds / options.repeats, 4) for name, seconds in compressing.items()},
        "restore_stages": {name: round(seconds / options.repeats, 4) for name, seconds in restoring.items()},
        "file_bytes": n_bytes,
        "full_bytes_16_bit": full_bytes,
        "same_first_token": first == again,
        "python": platform.python_version(),
        "versions": {"verkv": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }
    print(json.dumps(line))
    if options.output:
        with options.output.open("a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
