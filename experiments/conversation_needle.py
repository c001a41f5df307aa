"""A number told in the first of ten turns and asked for in the last, with the context sealed turn after turn.

Every conversation is held twice on the demo model: with dense attention and with a press whose sketch is exact. One
JSON line each goes to ``docs/results/conversation.jsonl``; lines that are there already are not made again.

    python experiments/conversation_needle.py --seeds 0 1 2 3 4 5 6 7 8 9
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import transformers
from demo_loading import load_demo_model

import verkv
from verkv import Conversation, KVzipPress, VerKVPress
from verkv.demo import prose_paragraphs

OUT = Path(__file__).parent.parent / "docs" / "results" / "conversation.jsonl"
NAMES = ("tomato", "harbor", "violin", "lantern", "meadow", "falcon", "ribbon", "kettle", "orchid", "anchor")
TOLD = "One of the special magic numbers for {name} is: {number}. Please remember it."
ASKED = "What is the special magic number for {name} mentioned in the provided text?"
N_TURNS = 10
SHORT = {"n_sink": 16, "n_local": 16}  # 64 + 64 protected tokens would be the whole budget of these contexts
METHODS = ("dense", "verkv")


def fillers(tokenizer, generator: random.Random, n_tokens: int) -> list[str]:
    """English prose for the turns between, about ``n_tokens`` tokens each."""
    paragraphs = prose_paragraphs()
    generator.shuffle(paragraphs)
    ids = tokenizer.encode("\n".join(paragraphs), add_special_tokens=False)
    starts = range(0, n_tokens * (N_TURNS - 2), n_tokens)
    return [tokenizer.decode(ids[start : start + n_tokens]) for start in starts]


def hold(talk: Conversation, seed: int, n_tokens: int) -> tuple[str, str]:
    """Ten turns; the number, and the last answer."""
    generator = random.Random(seed)
    name, number = generator.choice(NAMES), str(generator.randrange(10**6, 10**7))
    talk.ask(TOLD.format(name=name, number=number), max_new_tokens=8)
    for text in fillers(talk.tokenizer, generator, n_tokens):
        talk.read(text)  # without answers: cut short they confuse the model, in full they take long
    return number, talk.ask(ASKED.format(name=name), max_new_tokens=24)


def measure(model, tokenizer, method: str, seed: int, args) -> dict:
    """One conversation."""
    press = None
    if method == "verkv":
        press = VerKVPress(KVzipPress(tokenizer=tokenizer), args.compression_ratio, sketch="exact", seed=seed, **SHORT)
    # Texts are read as chunks: with exact attention, which on a CPU is many times faster than a plan for each query.
    talk = Conversation(model, tokenizer, press, chunk_size=256, reseal=1, do_sample=False)
    start = time.perf_counter()
    number, answer = hold(talk, seed, args.tokens)
    line = {"number": number, "answer": answer, "is_right": number in answer, "n_tokens": len(talk.token_ids)}
    line |= {"turns": len(talk.turns), "seconds": round(time.perf_counter() - start, 1)}
    if press is not None:
        context, report = talk.cache.layers[0].context, talk.memory
        line |= {
            "segments": [segment.n_tokens for segment in context.segments],
            "tail": talk.cache.get_seq_length() - context.n_tokens,
            "kv_read_per_token": talk.stats.kv_read_per_token,
            "resident_share": report.resident_share,
            "earlier_turns_share": report.host["earlier_turns"] / report.full_bytes,
        }
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=200, help="of each text between")
    parser.add_argument("--compression-ratio", type=float, default=0.875)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_demo_model()
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "verkv": verkv.__version__}
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    for seed in args.seeds:
        for method in args.methods:
            ratio = 0.0 if method == "dense" else args.compression_ratio
            setting = {"seed": seed, "method": method, "tokens": args.tokens, "compression_ratio": ratio}
            if any(setting.items() <= line.items() for line in done):
                continue
            line = setting | measure(model, tokenizer, method, seed, args) | facts
            print(json.dumps(line), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
