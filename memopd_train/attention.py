"""Run a decoder over a pack with its attention structure spelled out, and keep the hidden states that predict tokens.

The one rule: the structure is always passed, never inferred. Given only restarting positions, transformers guesses: its
packed-sequence detection misreads shared prefixes on every back end, and an all-ones mask or the default cache gives
wrong logits without a warning. So each back end gets the visibility ``j <= i < subtree_end[j]`` in its own form, with
the cache off:

========  ===========================================  =============================================================
back end  structure                                    use
========  ===========================================  =============================================================
sdpa      (1, 1, T, T) boolean mask                    any device, and the reference; its cost grows with T x T
varlen    causal runs, each under its ancestors        any device: pays for visible keys only; the flash kernel on a GPU
                                                       in half precision, a loop over the runs elsewhere
flex      FlexAttention block mask                     GPU; no backward pass on a CPU
========  ===========================================  =============================================================

Axes: T = tokens of the row, A = sampled tokens, H = hidden width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from memopd_agents.episode import Episode
from memopd_env.errors import MemOPDError

from .alignpack import FLEX_BLOCK, Pack

CPU_MAX_TOKENS = 512
"""Good ``max_tokens`` of a pack on a CPU. With ``sdpa`` longer rows spend their time on masked scores (3 layers of
width 128: 12.2 k tokens/s at 512, 9.8 k at 1024, 4.5 k at 2048, 2.7 k at 4096); ``varlen`` does 22-25 k at all."""


class Backend(StrEnum):
    """How attention is computed over a pack."""

    SDPA = "sdpa"
    FLEX = "flex"
    VARLEN = "varlen"


IMPLEMENTATIONS = {Backend.SDPA: "sdpa", Backend.FLEX: "flex_attention", Backend.VARLEN: "memopd_varlen"}
"""Name of each back end's attention function in transformers."""


class BackendError(MemOPDError, RuntimeError):
    """An attention back end cannot run here, or would misread the structure; the message says what to use instead."""


def use_backend(model: PreTrainedModel, backend: Backend | str) -> None:
    """Make ``model`` compute attention with ``backend``; needed once per model unless it already does.

    Raises:
        BackendError: If the model has its attention hard-wired.
    """
    implementation = IMPLEMENTATIONS[Backend(backend)]
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise BackendError(
            f"{type(model).__name__} cannot switch its attention to {implementation}: use another model class"
        )


def hidden_states(model: PreTrainedModel, pack: Pack, backend: Backend | str = Backend.SDPA) -> Tensor:
    """Run the decoder of ``model`` over ``pack`` and gather before the head.

    Args:
        model: A causal language model, or a bare decoder (a critic's backbone). Its head is not applied.
        pack: The row to compute; moved to the model's device.
        backend: Which attention to use; the model must be set to it (:func:`use_backend`).

    Returns:
        (A, H): the last hidden state at ``pack.action_index``, which predicts ``pack.action_ids``.

    Raises:
        BackendError: If the back end cannot run here or the model's layers would ignore the structure.
    """
    backend = Backend(backend)
    _check(model, pack, backend)
    row = pack
    if backend is Backend.FLEX:
        # Whole tiles only: the kernel has no ragged edge and is compiled for fewer lengths.
        row = pack.padded(-(-pack.num_tokens // FLEX_BLOCK) * FLEX_BLOCK)
    row = row.to(model.device)
    structure: dict[str, Any]
    if backend is Backend.SDPA:
        structure = {"attention_mask": row.attention_mask()[None, None]}
    elif backend is Backend.FLEX:
        structure = {"attention_mask": row.block_mask()}
    else:
        runs = pack.runs()
        ends = [int(seen[-1]) + 1 for seen in runs]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        on_device = torch.cat(runs).to(model.device).split([len(seen) for seen in runs])
        # The mask is a stand-in: any 4-D mask keeps transformers from deriving one from the positions.
        stand_in = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        structure = {"attention_mask": stand_in, "runs": on_device, "run_lengths": lengths}
    output = model.get_decoder()(
        input_ids=row.input_ids[None], position_ids=row.position_ids[None], use_cache=False, **structure
    )
    return output.last_hidden_state[0, row.action_index]


def call_hidden_states(model: PreTrainedModel, episodes: Sequence[Episode]) -> Tensor:
    """Score every call alone, as the engine saw it: the reference that packs are held against.

    Args:
        model: As for :func:`hidden_states`.
        episodes: Played episodes.

    Returns:
        (A, H) in the global order (episode, call, token), one forward pass a call.
    """
    decoder = model.get_decoder()
    states = []
    for call in (call for episode in episodes for call in episode.calls if call.action_ids):
        ids = torch.tensor([*call.prompt_ids, *call.action_ids], device=model.device)
        output = decoder(input_ids=ids[None], use_cache=False)
        states.append(output.last_hidden_state[0, len(call.prompt_ids) - 1 : -1])
    return torch.cat(states) if states else torch.zeros(0, model.config.hidden_size, device=model.device)


def output_head(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return weight (V, H) and bias (V,) or None of the model's output head, as the losses take them.

    Raises:
        BackendError: If the logits are more than a linear map of the hidden states (softcapping, scaling).
    """
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1.0):
            raise BackendError(
                f"{type(model).__name__} transforms its logits ({name}): the fused losses expect a linear head"
            )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise BackendError(f"{type(model).__name__} has no output head: load it with AutoModelForCausalLM")
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    return weight, bias if isinstance(bias, Tensor) else None


def _check(model: PreTrainedModel, pack: Pack, backend: Backend) -> None:
    implementation = model.config._attn_implementation
    if implementation != IMPLEMENTATIONS[backend]:
        raise BackendError(
            f"{type(model).__name__} computes attention with {implementation!r}, which would misread the structure of "
            f"back end {backend.value!r}: call use_backend(model, {backend.value!r}) once"
        )
    if backend is Backend.FLEX and model.device.type == "cpu" and torch.is_grad_enabled():
        raise BackendError("FlexAttention has no backward pass on a CPU: use back end 'sdpa'")
    window = getattr(model.config, "sliding_window", None)
    kinds = set(getattr(model.config, "layer_types", None) or (["sliding_attention"] if window else []))
    longest = int(pack.position_ids.max()) + 1 if pack.num_tokens else 0
    if window is not None and longest <= window:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        raise BackendError(
            f"{type(model).__name__} has {', '.join(sorted(kinds - {'full_attention'}))} layers, which cannot follow "
            f"the structure of a pack with calls of {longest} tokens: use a model with full attention"
        )


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    runs: Sequence[Tensor] | None = None,
    run_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention run by run, (1, heads, T, head width) -> (1, T, heads, head width); plain sdpa when generating."""
    if runs is None or run_lengths is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return output, None
    # One gather and one split: their gradients cost one pass over the row, not one for each run.
    seen, seen_lengths = torch.cat(list(runs)), [len(run) for run in runs]
    key, value = key.index_select(2, seen), value.index_select(2, seen)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and dropout == 0.0:
        return _flash(query, key, value, scaling, run_lengths, seen_lengths), None
    pieces = zip(query.split(run_lengths, 2), key.split(seen_lengths, 2), value.split(seen_lengths, 2), strict=True)
    parts = []
    for run_query, run_key, run_value in pieces:
        length, total = run_query.shape[2], run_key.shape[2]
        structure: dict[str, Any] = {"is_causal": True}
        if total > length:
            visible = torch.ones(length, total, dtype=torch.bool, device=query.device).tril(total - length)
            structure = {"attn_mask": visible}
        parts.append(
            F.scaled_dot_product_attention(
                run_query, run_key, run_value, dropout_p=dropout, scale=scaling, enable_gqa=True, **structure
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, lengths: list[int], seen_lengths: list[int]
) -> Tensor:
    """All runs in one flash kernel: its causal mask is aligned to the end of the keys, so ancestors are all seen."""
    from torch.nn.attention.varlen import varlen_attn

    def bounds(sizes: list[int]) -> Tensor:
        return F.pad(torch.tensor(sizes, device=query.device).cumsum(0, dtype=torch.int32), (1, 0))

    row_query, row_key, row_value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    output = varlen_attn(
        row_query,
        row_key,
        row_value,
        bounds(lengths),
        bounds(seen_lengths),
        max(lengths),
        max(seen_lengths),
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(IMPLEMENTATIONS[Backend.VARLEN], _varlen_attention)
AttentionMaskInterface.register(IMPLEMENTATIONS[Backend.VARLEN], sdpa_mask)
