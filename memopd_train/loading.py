"""A model and its tokenizer from one word: a folder, a hub name, or ``new:SIZE`` made on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memopd_agents.pretrained import load_causal_lm, load_tokenizer
from memopd_env.errors import ConfigError
from memopd_train.checkpoint import no_progress_bars
from memopd_train.smallmodel import ModelShape, learned_tokenizer, new_model, terse_world_tokenizer

SHAPES = {
    "tiny": ModelShape(layers=2, width=64, heads=2),
    "small": ModelShape(layers=4, width=128, heads=4),
    "medium": ModelShape(layers=4, width=256, heads=8),
}


def open_model(
    spec: str, *, texts: Iterable[str] | None = None, vocab_size: int = 2048, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load or make a causal language model and its tokenizer.

    Args:
        spec: A folder, a name on the Hugging Face hub, or ``new:tiny``, ``new:small``, ``new:medium``.
        texts: What a new model's tokenizer is learned from; None takes that of the terse built-in world.
        vocab_size: Tokens that a new model's tokenizer learns, at least 256; a larger vocabulary makes shorter calls.
        seed: Seed of new weights.

    Raises:
        ConfigError: If the size is unknown, or there is no such model.
    """
    if spec.startswith("new:"):
        size = spec.removeprefix("new:")
        if size not in SHAPES:
            raise ConfigError(f"model {spec!r}: the size must be one of {', '.join(SHAPES)}")
        tokenizer = terse_world_tokenizer() if texts is None else learned_tokenizer(texts, vocab_size)
        return new_model(tokenizer, SHAPES[size], seed), tokenizer
    return load_model(spec), open_tokenizer(spec)


def open_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        ConfigError: If there is none.
    """
    return load_tokenizer(spec)


def load_model(spec: str, *, frozen: bool = False) -> PreTrainedModel:
    """Load a causal language model.

    Args:
        spec: A folder or a name on the Hugging Face hub.
        frozen: It is only asked, never trained: keep its own precision where there is a GPU. Models that train, and all
            models on a CPU, are loaded in float32.

    Raises:
        ConfigError: If there is no such model.
    """
    if Path(spec).exists() and not (Path(spec) / "config.json").is_file():
        raise ConfigError(f"{spec} is not a model: it has no config.json; the model of a run is in its folder model/")
    dtype = "auto" if frozen and torch.cuda.is_available() else torch.float32
    with no_progress_bars():
        return load_causal_lm(spec, dtype=dtype)
