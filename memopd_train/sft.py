"""Cold start: supervised fine-tuning on the calls of episodes.

Each call is one row: the prompt ids and action ids that were recorded, never encoded again. What is learned is chosen
by ``loss_on``: the action tokens alone, or every token of the call. Small models trained from scratch need the second
first: copying appears within a few hundred steps when every token is in the loss, and hardly at all otherwise.

    from memopd_train import MemOPDSFTConfig, train_sft

    config = MemOPDSFTConfig(loss_on="all", learning_rate=2e-3, max_steps=800, max_seconds=240)
    folder = train_sft(model, tokenizer, episodes, "runs/sft", config)   # episodes: list[Episode] or a JSONL path
    model = AutoModelForCausalLM.from_pretrained(folder)                 # also: folder / "../metrics.jsonl"

Running the same line again continues an interrupted run exactly, and returns at once when it is finished.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from memopd_agents.episode import Episode, read_episodes
from memopd_train.attention import BackendError, output_head
from memopd_train.checkpoint import AtomicCheckpoints, Interrupt, any_rank, checkpoint_to_resume, stop_on_signal
from memopd_train.config import MemOPDSFTConfig
from memopd_train.errors import CallTooLongError, EpisodeError, TrainingInterrupted, VocabularyError
from memopd_train.progress import MetricsLog, Progress, ProgressCallback
from memopd_train.projection import Projection
from memopd_train.weights import align

IGNORED = -100


def train_sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode] | str | Path,
    out: str | Path,
    config: MemOPDSFTConfig | None = None,
    *,
    resume: bool = True,
    on_progress: ProgressCallback | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """Fine-tune a model on demonstrated calls.

    Args:
        model: The model to train, in place.
        tokenizer: Saved beside the weights; also supplies the padding id.
        episodes: Demonstrations, or a JSONL file of them.
        out: Folder of the run: ``checkpoint-N/``, ``metrics.jsonl`` (step, loss, token_accuracy, ...) and ``model/``.
        config: Options; ``output_dir`` is replaced by ``out``.
        resume: Continue what ``out`` holds. When False, ``out`` must hold no run.
        on_progress: Called once a step.
        callbacks: Further transformers callbacks.

    Returns:
        ``out / "model"``: weights (safetensors), configuration and tokenizer.

    Raises:
        EpisodeError: If there is nothing to learn from.
        CallTooLongError: If a call is longer than the model's window; names episode and call.
        VocabularyError: If a call holds a token id that the model does not have.
        CheckpointError: If ``out`` holds a run and ``resume`` is False.
        TrainingInterrupted: After Ctrl-C, once the state is saved.
    """
    out = Path(out)
    checkpoint = checkpoint_to_resume(out, resume)
    if resume and (out / "model").is_dir():
        return out / "model"
    config = replace(config or MemOPDSFTConfig(), output_dir=str(out))
    rows = call_rows(episodes, model, config.loss_on)
    align(model)
    done = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    # One rank writes: a second one that opened the file anew would take it away from the first.
    log = MetricsLog(out / "metrics.jsonl", resume_step=done) if config.process_index == 0 else None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    forward, use_cache = model.__dict__.get("forward"), model.config.use_cache
    with stop_on_signal() as interrupt:
        watch = _Watch(log, config.max_seconds, interrupt, on_progress)
        trainer = _EpisodeSFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            callbacks=[watch, *callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            if log is not None:
                log.close()
            _restore(model, forward, use_cache)
        if any_rank(bool(interrupt)):
            raise TrainingInterrupted(
                f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; the state is in {out}. "
                "Run the same command again with --resume to continue"
            )
    return trainer.save_final(out / "model")


def call_rows(
    episodes: Sequence[Episode] | str | Path, model: PreTrainedModel, loss_on: str = "action"
) -> dict[str, list[list[int]]]:
    """Turn calls into rows of ids and labels.

    Args:
        episodes: Demonstrations, or a JSONL file of them.
        model: Whose window and vocabulary the rows must fit.
        loss_on: ``action`` (prompt positions are ignored) or ``all``.

    Returns:
        Columns ``input_ids`` and ``labels``, one entry per call, in the order of the episodes.
    """
    source = "the episodes"
    if isinstance(episodes, (str, Path)):
        source = str(episodes)
        episodes = list(read_episodes(source))
    text = model.config.get_text_config()
    window = getattr(text, "max_position_embeddings", None) or 2**62
    input_ids, labels = [], []
    for number, episode in enumerate(episodes):
        for call_number, call in enumerate(episode.calls):
            where = f"{source}: episode {number} (task {episode.task_id!r}), call {call_number}"
            ids = [*call.prompt_ids, *call.action_ids]
            if not call.action_ids:
                raise EpisodeError(f"{where} has no action tokens; remove it, there is nothing to learn from")
            if len(ids) > window:
                raise CallTooLongError(
                    f"{where} is {len(ids)} tokens long, the model's window is {window}; "
                    "use a smaller top_k or shorter passages, or a model with a longer window"
                )
            if max(ids) >= text.vocab_size or min(ids) < 0:
                wrong = next(token for token in ids if not 0 <= token < text.vocab_size)
                raise VocabularyError(
                    f"{where} holds token id {wrong}, the model has ids 0 to {text.vocab_size - 1}; "
                    "make the demonstrations with this model's tokenizer"
                )
            input_ids.append(ids)
            labels.append(ids if loss_on == "all" else [IGNORED] * len(call.prompt_ids) + call.action_ids)
    if not input_ids:
        raise EpisodeError(f"{source}: no calls to learn from")
    return {"input_ids": input_ids, "labels": labels}


def score_labels_at_once(model: PreTrainedModel, most_bytes: int = 2**30) -> None:
    """Give a model that TRL has patched the same scores for less work where there is no Triton.

    There TRL's head projects every position, prompt or not, and once more in the backward pass. Ours projects the
    positions that have a label, once, unless their logits would be too large.

    Args:
        model: Patched in place; its ``forward`` is TRL's.
        most_bytes: Logits beyond this size are left to TRL, which never holds them all.

    Raises:
        BackendError: If the logits are more than a linear map of the hidden states.
    """
    patched = model.forward
    output_head(model)

    @functools.wraps(patched)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        weight, bias = output_head(model)
        if not fused_lm_head or labels is None or inputs.get("output_router_logits"):
            return patched(*args, fused_lm_head=fused_lm_head, labels=labels, **inputs)
        labelled = labels[:, 1:] != IGNORED
        if 4 * int(labelled.sum()) * len(weight) > most_bytes:
            return patched(*args, fused_lm_head=True, labels=labels, **inputs)
        hidden = model.get_decoder()(*args, **inputs | {"use_cache": False}).last_hidden_state[:, :-1]
        logp = Projection(hidden[labelled], weight, bias).log_softmax(slice(None), len(weight))
        chosen = labels[:, 1:][labelled]

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(labelled.shape).masked_scatter(labelled, values)

        with torch.no_grad():
            entropy, top1 = -(logp.exp() * logp).sum(1), logp.argmax(1) == chosen
        return FusedCausalLMOutput(
            log_probs=spread(logp.gather(1, chosen[:, None])[:, 0]),
            entropy=spread(entropy),
            is_top1=spread(top1.to(logp.dtype)),
            label_mask=labelled,
        )

    model.forward = forward  # type: ignore[method-assign]


class _LengthGroups(Sampler[int]):
    """Rows of similar length together, in an order that depends on seed and epoch only, so a resumed run repeats it."""

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        full = len(order) // self.batch_size
        for batch in torch.randperm(full, generator=generator).tolist():
            yield from order[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from order[full * self.batch_size :]


class _EpisodeSFTTrainer(AtomicCheckpoints, SFTTrainer):
    """TRL's SFTTrainer with our order of rows, our checkpoints, and a head that is quicker on a CPU."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.accelerator.device.type == "cpu" and isinstance(self.model, PreTrainedModel):
            with suppress(BackendError):  # a head that is not linear stays TRL's business
                score_labels_at_once(self.model)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        assert isinstance(self.train_dataset, Dataset)
        lengths = [len(ids) for ids in self.train_dataset["input_ids"]]
        # One group is what all ranks take in a step: rows of one length, so that none waits for another.
        return _LengthGroups(lengths, self.args.train_batch_size * self.args.world_size, self.args.seed)


class _Watch(TrainerCallback):
    """Writes metrics, reports progress, and stops the run on request or when its time is up."""

    def __init__(
        self, log: MetricsLog | None, max_seconds: float, interrupt: Interrupt, on_progress: ProgressCallback | None
    ) -> None:
        self.log, self.max_seconds, self.interrupt, self.on_progress = log, max_seconds, interrupt, on_progress
        self.started = time.monotonic()
        self.seconds_before = 0.0 if log is None else log.seconds_before
        self.tokens_before = 0 if log is None else int(log.last.get("tokens", 0))
        self.newest: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if any_rank(bool(self.interrupt or (self.max_seconds and self.seconds >= self.max_seconds))):
            control.should_training_stop = control.should_save = True
        control.should_log |= control.should_save
        if self.on_progress is not None and state.is_world_process_zero:
            self.on_progress(Progress("sft", state.global_step, state.max_steps, self.seconds, self.newest))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or self.log is None:
            return
        self.newest = {"loss": logs["loss"], "accuracy": logs["mean_token_accuracy"]}
        self.log.write(
            {
                "step": state.global_step,
                "epoch": round(logs["epoch"], 4),
                "loss": logs["loss"],
                "token_accuracy": logs["mean_token_accuracy"],
                "entropy": logs["entropy"],
                "grad_norm": logs["grad_norm"],
                "learning_rate": logs["learning_rate"],
                "tokens": self.tokens_before + int(logs["num_tokens"]),
                "tokens_per_second": round(logs["num_tokens"] / (time.monotonic() - self.started), 1),
                "seconds": round(self.seconds, 3),
            }
        )


def _restore(model: PreTrainedModel, forward: Any, use_cache: bool) -> None:
    """Undo what a trainer does to a model in passing: a patched ``forward`` and a cache switched off."""
    if forward is None:
        model.__dict__.pop("forward", None)
    else:
        model.__dict__["forward"] = forward
    model.config.use_cache = use_cache
