"""Models and the processes that share a run."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from verkv.evaluation.settings import DEMO_MODEL, EvalSettings


@dataclass(frozen=True)
class Share:
    """This process among those of a run, as ``torchrun`` and ``accelerate launch`` number them.

    Attributes
    ----------
    rank, world_size, local_rank : int
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> "Share":
        """Of the variables RANK, WORLD_SIZE and LOCAL_RANK.

        Raises
        ------
        ValueError
            If they are no numbers, or contradict each other.
        """
        given = {name: os.environ.get(name, default) for name, default in _VARIABLES.items()}
        try:
            rank, world_size, local_rank = map(int, given.values())
        except ValueError:
            raise ValueError(f"the environment's {given} are no numbers") from None
        if not 0 <= rank < world_size or local_rank < 0:
            raise ValueError(f"the environment's {given} contradict each other")
        return cls(rank, world_size, local_rank)

    def takes(self, index: int) -> bool:
        """Whether the context of that number is this process' work."""
        return index % self.world_size == self.rank


_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@dataclass(frozen=True)
class ModelSource:
    """A model before its weights are loaded.

    Attributes
    ----------
    name : str
        For results: the hub's name, or that of the folder.
    path : str
        What ``from_pretrained`` takes.
    config, tokenizer
    """

    name: str
    path: str
    config: object
    tokenizer: object

    @property
    def window(self) -> int | None:
        """Tokens that the model takes at most."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)


def find_model(name: str | None) -> ModelSource:
    """Configuration and tokenizer of a model.

    Raises
    ------
    ValueError
        If they cannot be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    path = name
    if name is None:
        from verkv.demo_model import demo_model_path

        try:
            path = str(demo_model_path())
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    try:
        config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    shown = Path(path).name if Path(path).is_dir() else path
    return ModelSource(DEMO_MODEL if name is None else shown, path, config, tokenizer)


def load_model(source: ModelSource, settings: EvalSettings, share: Share):
    """The model's weights, on one device or spread over several.

    Raises
    ------
    ValueError
        If the device or dtype cannot be used.
    """
    import transformers

    options = {"dtype": dtype_of(settings.dtype)}
    if settings.device_map is not None:
        options["device_map"] = settings.device_map
    bar = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        if settings.device_map is not None:
            prepare_for_device_map(source.config)
        model = transformers.AutoModelForCausalLM.from_pretrained(source.path, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"model {source.name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    finally:
        if bar:
            transformers.utils.logging.enable_progress_bar()
    if settings.device_map is None:
        model = model.to(choose_device(settings.device, share))
    return model.eval()


def prepare_for_device_map(config) -> None:
    """Repair linear-attention layers before hooks wrap them, which would keep the functions they had."""
    from verkv.cache import make_cache

    make_cache(config)


def choose_device(name: str | None, share: Share) -> torch.device:
    """The device asked for, or this process' GPU, or the CPU.

    Raises
    ------
    ValueError
        If it cannot be used.
    """
    if name is None:
        name = f"cuda:{share.local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def dtype_of(name: str | None, config=None) -> torch.dtype | str:
    """A dtype by its name in torch; for "auto" the model's own, or "auto" where there is no configuration to ask.

    Raises
    ------
    ValueError
        If it is no floating-point type.
    """
    if name in (None, "auto"):
        return "auto" if config is None else config.get_text_config(decoder=True).dtype or torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {name!r}")
    return dtype
