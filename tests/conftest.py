"""Shared fixtures: tiny random models, the demo model, seeding. Skips what needs a GPU or KVPress that is not there."""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may depend on a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # test files cannot import each other

import pytest
import torch

# Weights of 0.2 instead of 0.02: attention is peaked and logits are of order 1, so that a lost token is seen.
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# YaRN and a query scale that grows with the position: 64 tokens are the unscaled range, so a test's context is longer.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 64.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Linear layers alternate with full ones, whose heads are rotated in a quarter of their channels. Weights are smaller:
# with 0.2, transformers' own logits token by token are 5e-4 off those of one pass.
HYBRID = {
    "initializer_range": 0.1,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
INTERLEAVED_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
}
# Config class, model class, and what differs from TINY.
ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3": (  # five sliding layers, then a full one
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 6, "sliding_window": 16, "query_pre_attn_scalar": 24},
    ),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", {"sliding_window": None, "rope_parameters": YARN}),
    "ministral": (
        "MinistralConfig",
        "MinistralForCausalLM",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**HYBRID, "rope_parameters": INTERLEAVED_ROPE}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32, "rope_parameters": INTERLEAVED_ROPE},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32},
    ),
}


class _KVPressIsMissing:
    """An import hook that makes `import kvpress`, also by the presses, skip the module or test that does it."""

    reason = "needs KVPress, which needs transformers < 5.3: pip install 'verkv[kvpress]'"

    def find_spec(self, name, path=None, target=None):
        if name == "kvpress":
            pytest.skip(self.reason, allow_module_level=True)


HAS_KVPRESS = importlib.util.find_spec("kvpress") is not None
if not HAS_KVPRESS:
    sys.meta_path.insert(0, _KVPressIsMissing())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.skipped:  # name the file that is skipped, not the hook above
        report.longrepr = (str(collector.path), None, report.longrepr[2])
    return report


def pytest_report_header():
    import transformers

    kvpress = importlib.metadata.version("kvpress") if HAS_KVPRESS else "not installed: what needs it is skipped"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, kvpress {kvpress}"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model():
    """Factory ``tiny_model(kind, attn_implementation="sdpa", seed=0, **config_overrides)`` of tiny random models.

    Every call builds the model anew, with the same weights for the same arguments, and leaves the random state alone.
    """
    import transformers

    def build(kind: str, attn_implementation: str = "sdpa", seed: int = 0, **config_overrides):
        config_name, model_name, own = ARCHITECTURES[kind]
        config = getattr(transformers, config_name)(**{**TINY, **own, **config_overrides})
        config._attn_implementation = attn_implementation
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return getattr(transformers, model_name)(config).eval()

    return build


@pytest.fixture
def by_torch(monkeypatch):
    """Sealed layers on a CPU are served by tensor operations, also where numba is installed."""
    monkeypatch.setenv("VERKV_COMPILED", "0")


@pytest.fixture(params=["torch", "compiled"])
def each_way(monkeypatch, request):
    """Sealed layers on a CPU are served by tensor operations, and by compiled loops where numba is installed."""
    if request.param == "compiled" and importlib.util.find_spec("numba") is None:
        pytest.skip("needs numba: pip install 'verkv[compiled]'")
    monkeypatch.setenv("VERKV_COMPILED", str(int(request.param == "compiled")))


@pytest.fixture(scope="session")
def demo_model():
    """SmolLM2-135M-Instruct and its tokenizer; mark tests that use it ``real_model``."""
    import transformers

    from verkv.demo_model import demo_model_path

    if not HAS_KVPRESS:
        pytest.skip("the demo model is saved by transformers 5.2, and 5.24 takes its tokenizer for that of CodeLlama")
    path = demo_model_path()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)
