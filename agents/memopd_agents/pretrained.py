"""A model or a tokenizer from a folder or a hub name, or one line that says why not.

A damaged folder fails in many ways: the libraries below raise whatever was at hand when they stumbled. Here all of them
become one :class:`~memopd_env.errors.ConfigError` that names the folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memopd_env.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        spec: A folder or a name on the Hugging Face hub.

    Raises:
        ConfigError: If there is none, or it is damaged or has no tokens.
        MissingExtraError: If transformers is not installed.
    """
    auto = _transformers().AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(spec)
    except Exception as problem:
        raise ConfigError(f"cannot load tokenizer {spec!r}: {_reason(problem)}") from problem
    # Without its vocabulary transformers makes up a tokenizer that knows nothing but special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(f"the tokenizer in {spec!r} has no tokens: a file such as tokenizer.json is missing")
    return tokenizer


def load_causal_lm(spec: str, **options: Any) -> PreTrainedModel:
    """Load a causal language model.

    Args:
        spec: A folder or a name on the Hugging Face hub.
        **options: For ``from_pretrained``.

    Raises:
        ConfigError: If there is none, or it is damaged.
        MissingExtraError: If transformers is not installed.
    """
    auto = _transformers().AutoModelForCausalLM
    try:
        return auto.from_pretrained(spec, **options)
    except Exception as problem:
        raise ConfigError(
            f"cannot load model {spec!r}: {_reason(problem)}; give a folder with config.json and whole weights, or a "
            "hub name"
        ) from problem


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtraError("transformers", "train") from error
    return transformers


def _reason(problem: Exception) -> str:
    lines = str(problem).strip().splitlines() or ["no reason is given"]
    known = isinstance(problem, (OSError, ValueError))
    return lines[0].rstrip(".") if known else f"{type(problem).__name__}: {lines[0]}"
