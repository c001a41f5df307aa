"""Table 13 of kvtc's paper: what lossless codecs gain on coded rows, this library's and those of other packages."""

import bz2
import importlib
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from kvtc_common import Setting, say, test_texts
from kvtc_table import prefill
from torch import Tensor

from verkv.codecs import KVTC, CodecError, KvtcConfig, lossless
from verkv.codecs.container import ROWS
from verkv.evaluation import tasks
from verkv.evaluation.prompts import PromptEncoder, read_examples

RATIO = 32
TASKS = ("niah_single_2", "vt")  # prose, and one line of noise again and again
N_TOKENS = 2000


def codecs() -> dict[str, Callable[[bytes], bytes]]:
    """Those that are there: the library's by name, then further ones."""
    found: dict[str, Callable[[bytes], bytes]] = {}
    for name in lossless.FORMATS:
        try:
            lossless.check_lossless(name)
        except CodecError as error:
            say(f"left out: {error}")
            continue
        found[name] = _by_name(name)
    try:
        found["lz4"] = importlib.import_module("lz4.frame").compress
    except ImportError:
        say("left out: lz4 needs pip install lz4")
    return found | {"bz2": bz2.compress, "lzma": lzma.compress}


def _by_name(name: str) -> Callable[[bytes], bytes]:
    return lambda data: lossless.compress(name, data)


def contexts(setting: Setting, n_texts: int) -> dict[str, list[Tensor]]:
    """Token ids of the contexts by kind."""
    encoder = PromptEncoder(setting.tokenizer)
    found = {"pydoc": test_texts(setting.tokenizer, n_texts)}
    for task in TASKS:
        examples = read_examples(tasks, task, setting.tokenizer, N_TOKENS, n_texts, 0, None)
        found[task] = [encoder.context(example.context)[0] for example in examples]
    return found


@torch.inference_mode()
def lossless_lines(setting: Setting, n_texts: int, is_done: Callable[[dict], bool]) -> Iterator[dict]:
    """One line for every context, layout and codec; sections are coded singly, as they are stored.

    Parameters
    ----------
    setting : Setting
    n_texts : int
        Of every kind.
    is_done : function
        Of the fields "text", "number", "layout" and "codec".
    """
    available = codecs()
    for kind, sequences in contexts(setting, n_texts).items():
        for number, ids in enumerate(sequences):
            keys = [
                {"text": kind, "number": number, "layout": layout, "codec": name}
                for layout in ("store", "fetch")
                for name in available
            ]
            missing = [key for key in keys if not is_done(key)]
            cache = prefill(setting.model, ids) if missing else None
            for layout in dict.fromkeys(key["layout"] for key in missing):
                coded = _coded(setting, cache, layout)
                for key in missing:
                    if key["layout"] == layout:
                        yield key | coded.gain(available[key["codec"]])
        say(f"lossless codecs on {kind}: done")


@dataclass(frozen=True)
class _Coded:
    """Sections of coded rows, the tokens that count, and bytes of a row at 16 bit."""

    sections: list[bytes]
    n_sinks: int
    n_coded: int
    full_row: int

    def gain(self, compress: Callable[[bytes], bytes]) -> dict:
        """What a codec makes of them; the ratio counts as the paper's, with sinks and without the window."""
        raw = sum(map(len, self.sections))
        stored = sum(min(len(section), len(compress(section))) for section in self.sections)
        n_tokens = self.n_sinks + self.n_coded
        ratio = n_tokens * self.full_row / (stored + self.n_sinks * self.full_row)
        return {"stored_bytes": stored, "gain": raw / stored, "paper_ratio": ratio, "n_tokens": n_tokens}


def _coded(setting: Setting, cache, layout: str) -> _Coded:
    config = KvtcConfig(ratio=RATIO, layout=layout, lossless="none", outlier_fraction=0.0)
    compressed = KVTC(setting.artefact, setting.model.config, config).compress(cache)
    sections = compressed.sections
    rows = [bytes(sections.stored(key).data) for key in sections if key.kind == ROWS]
    full_row = 2 * setting.artefact.layout.elements_per_token()
    return _Coded(rows, config.sinks, sum(compressed.blocks), full_row)
