"""Continuous batching on a transformers model: CPU, GPU, and the reference for tests.

The active requests are the rows 0..n-1 of one key-value cache. A step feeds each row its newest token and samples the
next one; a finished row is replaced by the last row, so the batch is always dense; new requests enter in waves
through one right-aligned prefill. Every row carries its own position, sampling parameters and seed, so nothing that a
request samples depends on its neighbours beyond the rounding of a batched matrix product.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memopd_agents.engines.base import Completion, EngineError, PromptTooLongError, Request
from memopd_agents.engines.kv_cache import ROW_ATTENTION, RowCache
from memopd_agents.engines.sampling import draw, sampling_logprobs, uniforms
from memopd_agents.engines.stops import StopStrings
from memopd_agents.seeds import derive_seed
from memopd_env.errors import ConfigError

# A lone new request waits at most this many decoding steps for company, since a prefill costs as much as a step.
_MAX_WAIT_STEPS = 4
_OUTPUT_CHUNK = 64
# Prompts of different lengths share a prefill as long as this many tokens of padding cost less than another pass.
_MAX_PADDING = 512
_ROW = np.dtype(
    [
        ("stored", np.int64),  # tokens whose keys are in the cache
        ("newest", np.int64),  # the token that is fed next
        ("count", np.int64),  # tokens sampled
        ("limit", np.int64),  # most tokens to sample
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("stop", np.int64),  # index into the prepared stop strings
        ("temperature", np.float32),
        ("top_p", np.float32),
    ]
)


class HFEngine:
    """Samples from a transformers causal language model with full attention (Qwen2, Llama, SmolLM, ...).

    Args:
        model: Used in place: an engine that shares the trainer's module samples from its current weights.
        tokenizer: Decodes the tail of a call to find stop strings. Ids it does not know (padded rows of the output
            head) are never sampled.
        max_batch: Most requests in flight; more are queued.
        max_prefill_tokens: Most prompt tokens, padding included, in one forward pass.
        eos_ids: Ids that end a call; default: those of the generation config and the tokenizer.

    Raises:
        ConfigError: If the model has layers without full attention, or attention that cannot be replaced.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_batch: int = 64,
        *,
        max_prefill_tokens: int = 8192,
        eos_ids: Iterable[int] | None = None,
    ) -> None:
        config = model.config.get_text_config()
        other = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if other:
            raise ConfigError(f"HFEngine needs full attention in every layer, this model has {sorted(other)}: use vLLM")
        if not getattr(model, "_supports_attention_backend", False):
            raise ConfigError(f"HFEngine cannot replace the attention of {type(model).__name__}: use vLLM")
        self._config = config
        self.model = model
        self.tokenizer = tokenizer
        self.version = 0
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._window: int = config.max_position_embeddings
        self._vocabulary = len(tokenizer)
        self._eos = np.zeros(max(config.vocab_size, self._vocabulary), dtype=bool)
        self._eos[sorted(_eos_ids(model, tokenizer) if eos_ids is None else set(eos_ids))] = True
        self._device = model.device
        self._cache = RowCache(config, max_batch, model.dtype, self._device)
        self._stops: dict[tuple[str, ...], int] = {}
        self._stop_strings: list[StopStrings] = []
        self._waiting: deque[Request] = deque()
        self._steps_waited = 0
        self._closed = False
        self._finished: list[Completion] = []
        self._active = 0  # rows in use: the first so many
        self._rows = np.zeros(max_batch, dtype=_ROW)
        self._requests: list[Request | None] = [None] * max_batch
        self._tokens = np.zeros((max_batch, _OUTPUT_CHUNK), dtype=np.int64)
        self._logprobs = np.zeros((max_batch, _OUTPUT_CHUNK), dtype=np.float32)
        self._candidates = np.zeros((0, self._eos.shape[0]), dtype=bool)

    def submit(self, request: Request) -> None:
        """Queue a request; returns at once.

        Raises:
            PromptTooLongError: If prompt and ``max_tokens`` together exceed the model's window.
            EngineError: If the engine is closed or the request is empty.
        """
        if self._closed:
            raise EngineError("this engine is closed: make a new one")
        size, limit = len(request.prompt_ids), request.sampling.max_tokens
        if not size or limit < 1:
            raise EngineError(f"request {request.request_id!r}: needs at least one prompt id and max_tokens >= 1")
        if size + limit > self._window:
            raise PromptTooLongError(request.request_id, size, limit, self._window)
        self._waiting.append(request)

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        """Decode until at least one request has finished, and return all that have; empty if there are none."""
        if self._waiting or self._active:
            with self._borrowed_model():
                while not self._finished and (self._active or self._waiting):
                    self._admit()
                    if self._active and not self._finished:
                        self._step()
        finished, self._finished = self._finished, []
        return finished

    @contextmanager
    def _borrowed_model(self) -> Iterator[None]:
        """Switch the model to evaluation mode and to our attention, and give it back as it was."""
        training, attention = self.model.training, self._config._attn_implementation
        if training:
            self.model.eval()
        self._config._attn_implementation = ROW_ATTENTION
        try:
            yield
        finally:
            self._config._attn_implementation = attention
            if training:
                self.model.train()

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Copy new values into the model's parameters.

        Args:
            weights: Pairs of parameter name, as in ``model.named_parameters()``, and tensor. Parameters not named stay.
            version: What ``self.version`` reports from now on.

        Raises:
            EngineError: If requests are in flight (their cached keys would stem from old weights), or if a name or a
                shape does not match.
        """
        if self._active or self._waiting:
            raise EngineError(
                "cannot change weights while requests are in flight: poll() until it returns nothing first"
            )
        own = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own or own[name].shape != tensor.shape:
                    expected = tuple(own[name].shape) if name in own else "no such parameter"
                    raise EngineError(f"weight {name!r} of shape {tuple(tensor.shape)} does not fit: {expected}")
                own[name].copy_(tensor)
        self.version = version

    def checksum(self) -> str:
        """Return the checksum of the weights that the engine samples from; see :func:`weights_checksum`."""
        return weights_checksum(self.model.named_parameters())

    def abort(self) -> None:
        """Drop everything that is queued or running; nothing of it is ever returned."""
        self._waiting.clear()
        self._finished.clear()
        self._active = 0
        self._requests = [None] * self._max_batch

    def close(self) -> None:
        """Drop the cache, the model and all requests; idempotent."""
        self._closed = True
        self.abort()
        self.__dict__.pop("_cache", None)
        self.__dict__.pop("model", None)

    def _admit(self) -> None:
        """Move waiting requests into free rows, once there are enough of them to be worth a forward pass."""
        free = self._max_batch - self._active
        if not self._waiting or not free:
            return
        self._steps_waited += 1
        enough = min(free, -(-self._active // 8))
        if len(self._waiting) < enough and self._steps_waited <= _MAX_WAIT_STEPS:
            return
        self._steps_waited = 0
        wave = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        wave.sort(key=lambda request: len(request.prompt_ids))
        while wave:
            size, shortest = 1, len(wave[0].prompt_ids)
            while size < len(wave):
                longest = len(wave[size].prompt_ids)
                if (size + 1) * longest > self._max_prefill_tokens or size * (longest - shortest) > _MAX_PADDING:
                    break
                size += 1
            self._prefill(wave[:size])
            del wave[:size]

    def _prefill(self, requests: list[Request]) -> None:
        """Store the keys of all prompt tokens but the last, which is the first to be fed to a step.

        Prompts are padded on the right, so plain causal attention is right for every real token; what the padding
        leaves in the cache lies beyond a row's end, where it is overwritten before it can be seen.
        """
        first, last = self._active, self._active + len(requests)
        lengths = np.array([len(request.prompt_ids) - 1 for request in requests])
        width = int(lengths.max())
        self._cache.reserve(last, width + 1)
        for row, request in enumerate(requests, start=first):
            self._occupy(row, request)
        self._active = last
        if width:
            ids = np.zeros((len(requests), width), dtype=np.int64)
            for row, request in enumerate(requests):
                ids[row, : lengths[row]] = request.prompt_ids[:-1]
            rows, positions = np.divmod(np.arange(ids.size), width)
            self._cache.select(first, last, width, self._tensor(rows + first), self._tensor(positions))
            self._forward(self._tensor(ids), None, torch.arange(width, device=self._device)[None])

    def _step(self) -> None:
        """Feed every active row its newest token and sample the next one."""
        rows = self._rows[: self._active]
        positions = self._tensor(rows["stored"].copy())
        rows["stored"] += 1
        length = int(rows["stored"].max())
        self._cache.reserve(self._active, length)
        self._cache.select(0, self._active, length, torch.arange(self._active, device=self._device), positions)
        visible = torch.arange(length, device=self._device) <= positions[:, None, None, None]
        mask = torch.where(visible, 0.0, -torch.inf).to(self._cache.dtype)
        newest = self._tensor(rows["newest"].copy())
        self._sample(self._forward(newest[:, None], mask, positions[:, None]))

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Run the model on (rows, queries) ids and return the logits after the last column."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1, : self._vocabulary].float()

    def _occupy(self, row: int, request: Request) -> None:
        sampling = request.sampling
        if sampling.stop not in self._stops:
            self._stops[sampling.stop] = len(self._stop_strings)
            prepared = StopStrings(self.tokenizer, sampling.stop)
            self._stop_strings.append(prepared)
            candidates = np.zeros((1, self._candidates.shape[1]), dtype=bool)
            candidates[0, : prepared.candidates.shape[0]] = prepared.candidates
            self._candidates = np.concatenate([self._candidates, candidates])
        self._requests[row] = request
        self._rows[row] = (
            len(request.prompt_ids) - 1,
            request.prompt_ids[-1],
            0,
            sampling.max_tokens,
            derive_seed(request.seed),
            sampling.top_k,
            self._stops[sampling.stop],
            sampling.temperature,
            sampling.top_p,
        )

    def _sample(self, logits: torch.Tensor) -> None:
        """Append one token to every active row and retire those that are done."""
        rows = self._rows[: self._active]
        temperature = rows["temperature"].copy()
        if (temperature == 1).all() and (rows["top_p"] == 1).all() and not rows["top_k"].any():
            logprobs = logits.log_softmax(-1)
        else:
            cuts = self._tensor(rows["top_p"].copy()), self._tensor(rows["top_k"].copy())
            logprobs = sampling_logprobs(logits, self._tensor(temperature), *cuts)
        chosen = draw(logprobs, self._tensor(uniforms(rows["seed"], rows["count"])))
        if (temperature == 0).any():
            chosen = torch.where(self._tensor(temperature) == 0, logits.argmax(-1), chosen)
        rows["newest"] = chosen.cpu().numpy()
        if rows["count"].max() >= self._tokens.shape[1]:
            grow = ((0, 0), (0, self._tokens.shape[1]))
            self._tokens, self._logprobs = np.pad(self._tokens, grow), np.pad(self._logprobs, grow)
        place = np.arange(self._active), rows["count"]
        self._tokens[place] = rows["newest"]
        self._logprobs[place] = logprobs.gather(1, chosen[:, None])[:, 0].cpu().numpy()
        rows["count"] += 1
        self._retire()

    def _retire(self) -> None:
        """Complete the rows whose newest token ended them, and close the gaps with the last rows."""
        rows = self._rows[: self._active]
        eos = self._eos[rows["newest"]]
        full = rows["count"] >= rows["limit"]
        suspects = self._candidates[rows["stop"], rows["newest"]]
        done: list[int] = []
        for row in np.nonzero(eos | full | suspects)[0].tolist():
            ids = self._tokens[row, : rows["count"][row]]
            if suspects[row] and self._stop_strings[rows["stop"][row]].ends(ids):
                reason = "stop"
            elif eos[row]:
                reason = "eos"
            elif full[row]:
                reason = "length"
            else:
                continue
            request = self._requests[row]
            assert request is not None
            logprobs = self._logprobs[row, : len(ids)].tolist()
            self._finished.append(Completion(request.request_id, ids.tolist(), logprobs, reason))
            done.append(row)
        if not done:
            return
        remaining = self._active - len(done)
        holes = [row for row in done if row < remaining]
        if holes:
            survivors = sorted(set(range(remaining, self._active)) - set(done))
            self._cache.move(survivors, holes)
            for state in (self._rows, self._tokens, self._logprobs):
                state[holes] = state[survivors]
            for source, target in zip(survivors, holes, strict=True):
                self._requests[target] = self._requests[source]
        self._requests[remaining : self._active] = [None] * len(done)
        self._active = remaining

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Collect the ids that end a call from the generation config and the tokenizer."""
    generation = getattr(model, "generation_config", None)
    configured = getattr(generation, "eos_token_id", None)
    ids = set(configured) if isinstance(configured, list | tuple) else {configured}
    ids.add(tokenizer.eos_token_id)
    return {int(id) for id in ids if id is not None}


def weights_checksum(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hex digest of names, shapes and exact values; equal on every device and in any order of the pairs.

    Each tensor's bytes are folded, as integers weighted by their index, into one 64-bit sum on its own device, so a
    large model is not copied to the host.
    """
    lines = []
    for name, tensor in weights:
        bits = tensor.detach().contiguous().view(-1)
        words = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]).long()
        weight = torch.arange(1, words.numel() + 1, device=words.device) * 0x9E3779B1
        lines.append(f"{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\t{int((words * (weight | 1)).sum())}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
