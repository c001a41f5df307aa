"""The demo model as most experiments on a CPU take it."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verkv.demo_model import demo_model_path


def load_demo_model():
    """SmolLM2-135M-Instruct in float32, and its tokenizer."""
    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)
