"""PPO with on-policy distillation: play, learn, measure, again.

One iteration, top to bottom:

1. *play*: the engine samples ``episodes_per_iteration`` episodes from the student's present weights;
2. *prepare*: the episodes become packs; student, critic and the frozen models are asked once for every sampled token in
   exactly the state it was sampled in; GAE and whitening give advantages;
3. *learn*: for each epoch and mini-batch one optimiser step on PPO + value + entropy + distillation;
4. *measure*: one line in ``metrics.jsonl``, alarms, and every so often an evaluation on held-out tasks.

Everything random is a function of (seed, iteration), so a checkpoint needs no history: weights, optimiser, schedule,
how far the iteration has come, and, in the middle of one, its episodes and the numbers that came from weights that are
gone.

    from memopd_train import MemOPDConfig, MemOPDTrainer

    trainer = MemOPDTrainer(
        model=student,                     # a causal language model, or its path
        teacher=teacher,                   # frozen; None with divergence="none"
        args=MemOPDConfig(output_dir="runs/q2", iterations=60, episodes_per_iteration=64, mini_batch_episodes=32),
        processing_class=tokenizer,
        env_fn=lambda tasks: MemOPDEnv(tasks=tasks, retriever=retriever, instructions="terse", top_k=1),
        train_tasks=train_tasks,
        eval_tasks=validation_tasks,       # optional, with eval_every
    )
    trainer.train(resume_from_checkpoint=True)   # continues runs/q2 if it was begun, exactly
    trainer.args.output_dir + "/model"           # the trained student, with its tokenizer

Axes: A = sampled tokens of the iteration on this rank, H = hidden width.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import TrainOutput
from trl.trainer.utils import disable_dropout_in_model

from memopd_agents.engines.base import Engine, SamplingParams
from memopd_agents.engines.hf import HFEngine
from memopd_agents.episode import Episode, write_episodes
from memopd_agents.rollout import rollout
from memopd_env.env import MemOPDEnv
from memopd_env.errors import ConfigError
from memopd_env.tasks.task import Task
from memopd_train import monitor
from memopd_train.alignpack import Pack
from memopd_train.checkpoint import any_rank, checkpoint_to_resume, stop_on_signal
from memopd_train.config import MemOPDConfig, check_parts
from memopd_train.errors import EpisodeError, TrainingInterrupted
from memopd_train.experience import Experience, Layout, gather, lay_out, nothing_to_learn
from memopd_train.loading import load_model
from memopd_train.losses import LossOptions, ppo_opd_loss, value_loss
from memopd_train.models import ActorCritic, Critic, freeze, project, valid_vocabulary
from memopd_train.progress import ProgressCallback
from memopd_train.projection import Projection
from memopd_train.run import Run
from memopd_train.weights import sync_engine

logger = logging.getLogger(__name__)

EnvFactory = Callable[[Sequence[Task]], gym.Env[Any, Any]]
"""Makes an environment for some tasks; all environments of a run should share one retriever."""


_SUMMED = (
    "policy_loss",
    "opd",
    "entropy",
    "ref_kl",
    "clip_fraction",
    "outside_fraction",
    "approx_kl",
    "importance",
    "importance_capped",
    "policy_pull",
    "opd_pull",
)
"""Loss metrics that are weighted like the loss, so that packs add up."""


class _Stop(Exception):
    """The run is asked to stop in the middle of a rollout."""


class MemOPDTrainer(Run):
    """Trains a student by playing, with PPO and on-policy distillation from a frozen teacher.

    Args:
        model: The student: a causal language model with full attention, or its path.
        teacher: Frozen teacher with the same token ids; None with ``divergence="none"``. Model or path.
        critic: None makes one as ``args.critic`` says; a causal language model or decoder becomes its backbone.
        ref_model: Frozen reference of ``reference_kl_coef``. Model or path.
        args: Options.
        processing_class: The student's tokenizer.
        env_fn: Makes an environment for a list of tasks; None plays them in `MemOPDEnv` with the built-in world's
            retriever.
        train_tasks: Tasks to learn on, drawn in shuffled order, each once before any comes again.
        eval_tasks: Held-out tasks for ``eval_every``.
        engine: Where tokens come from; None samples from the student's live weights with `HFEngine`.
        teacher_processing_class: The teacher's tokenizer, if it is to be checked against the student's.
        callbacks: transformers callbacks; ``on_step_end`` comes once per optimiser step, ``on_log`` once per iteration.
        optimizers: Optimiser and schedule to use instead of those of ``args``.
        peft_config: Trains an adapter on the student.
        on_progress: Called after every episode and every optimiser step.

    Raises:
        ConfigError: If arguments and options do not fit together.
        VocabularyError: If student and teacher disagree on token ids.
    """

    _tag_names = ["memopd"]  # noqa: RUF012  (read as a list by the base class)
    _name = "MemOPD"

    def __init__(
        self,
        model: PreTrainedModel | str,
        teacher: PreTrainedModel | str | None = None,
        critic: Critic | PreTrainedModel | None = None,
        ref_model: PreTrainedModel | str | None = None,
        args: MemOPDConfig | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        env_fn: EnvFactory | None = None,
        train_tasks: Sequence[Task] = (),
        eval_tasks: Sequence[Task] = (),
        engine: Engine | None = None,
        *,
        teacher_processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        peft_config: Any = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        args = args or MemOPDConfig()
        if processing_class is None:
            raise ConfigError("processing_class is missing: pass the student's tokenizer")
        check_parts(
            args, teacher=teacher, reference=ref_model, train_tasks=len(train_tasks), eval_tasks=len(eval_tasks)
        )
        actor = load_model(model) if isinstance(model, str) else model
        if peft_config is not None:
            from peft import get_peft_model  # pyright: ignore[reportMissingImports]

            actor = get_peft_model(actor, peft_config)
        disable_dropout_in_model(actor)
        use_cache = actor.config.use_cache
        if critic is None:
            width = actor.config.get_text_config().hidden_size
            critic = Critic.copy_of(actor) if args.critic == "own" else Critic(width)
        elif isinstance(critic, PreTrainedModel):
            critic = Critic.on(critic.get_decoder())
        on_gpu = args.device.type == "cuda"
        backend = args.attention if args.attention != "auto" else "flex" if on_gpu else "varlen"
        super().__init__(
            model=ActorCritic(actor, critic, backend),
            args=args,
            data_collator=lambda rows: rows,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.remove_callback(PrinterCallback)
        actor.config.use_cache = use_cache
        self.tokenizer = processing_class
        self.teacher = freeze(teacher, backend, args.device)
        self.reference = freeze(ref_model, backend, args.device)
        self.valid_vocab = valid_vocabulary(processing_class, actor, self.teacher, teacher_processing_class)
        self.env_fn = env_fn or _default_env(args)
        self.train_tasks, self.eval_tasks = train_tasks, eval_tasks
        self.engine = engine
        self.on_progress = on_progress
        self.alarms = monitor.Alarms(args)

    # The loop

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Play, learn and measure until ``iterations`` are done.

        Args:
            resume_from_checkpoint: True continues the run in ``output_dir`` if it was begun; a path continues that
                checkpoint; otherwise ``output_dir`` must hold no run.
            *args: Further arguments of the base class; not taken.
            **kwargs: The same.

        Raises:
            CheckpointError: If ``output_dir`` holds a run that is not to be resumed, or of other tasks.
            TrainingInterrupted: After Ctrl-C or SIGTERM, once the state is saved.
        """
        if args or kwargs:
            raise ConfigError(
                "train() takes only resume_from_checkpoint; every other choice is an option of MemOPDConfig"
            )
        if isinstance(resume_from_checkpoint, str):
            checkpoint: Path | None = Path(resume_from_checkpoint)
        else:
            checkpoint = checkpoint_to_resume(self.out, bool(resume_from_checkpoint))
        known = self.begin(checkpoint)
        with stop_on_signal() as self.interrupt:
            try:
                if known is not None:
                    self.experience = self.prepare(self.episodes, known)
                while self.iteration < self.args.iterations and not self.stopping():
                    if self.experience is None:
                        self.episodes = self.play()
                        self.experience = self.prepare(self.episodes)
                    if self.learn(self.experience):
                        self.measure()
            except _Stop:
                pass
            finally:
                self.finish()
            self._save_checkpoint(self.actor_critic)
            if any_rank(bool(self.interrupt)):
                raise TrainingInterrupted(
                    f"stopped in iteration {self.iteration + 1} of {self.args.iterations}; the state is in {self.out}. "
                    "Run the same command again with --resume to continue"
                )
        self.save_final(self.out / "model")
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return TrainOutput(self.state.global_step, self.line.get("policy_loss", 0.0), dict(self.line))

    def play(self) -> list[Episode]:
        """Sample this rank's share of the iteration's episodes from the student as it is now."""
        started = time.perf_counter()
        self._sync_engine()
        episodes = self._roll_out(
            self.train_tasks,
            self.task_indices(self.iteration),
            seed=self.derived_seed("play", self.iteration, self.args.process_index),
            temperature=1.0,
            stage="play",
        )
        seconds = time.perf_counter() - started
        tokens = sum(len(call.action_ids) for episode in episodes for call in episode.calls)
        if self.args.log_episodes:
            folder = self.out / "episodes"
            write_episodes(folder / f"{self.iteration:06d}-{self.args.process_index}.jsonl", episodes)
        self.line = {
            **monitor.episode_metrics(episodes),
            "excluded": float(sum(bool(episode.info.get("excluded")) for episode in episodes)),
            "seconds_play": seconds,
            "tokens_per_second_play": tokens / seconds,
        }
        self.updates = []
        usable = [episode for episode in episodes if not episode.info.get("excluded")]
        if not usable:
            raise EpisodeError("the retriever failed in every episode of this iteration: nothing to learn from")
        return usable

    def prepare(self, episodes: Sequence[Episode], known: Mapping[str, Tensor] | None = None) -> Experience:
        """Find out everything about the sampled tokens that the updates need, before the first of them.

        Args:
            episodes: What was played.
            known: What a checkpoint remembers of weights that are gone; None asks the present ones.
        """
        started = time.perf_counter()
        layout = self._lay_out(episodes)
        self.actor_critic.eval()
        experience = gather(
            episodes,
            layout,
            self.args,
            self.actor_critic,
            self.valid_vocab,
            teacher=self.teacher,
            reference=self.reference,
            known=known,
        )
        self.line |= {
            **monitor.mismatch_metrics(experience.old_logprobs, layout.rollout_logprobs),
            **monitor.value_metrics(experience.old_values, experience.returns, experience.advantages),
            **monitor.pack_metrics(layout.packs),
            "seconds_prepare": time.perf_counter() - started,
        }
        return experience

    def learn(self, experience: Experience) -> bool:
        """Do the iteration's remaining optimiser steps; False if the run was asked to stop before the last one."""
        args, started = self.args, time.perf_counter()
        batches = experience.layout.mini_batches
        while self.update < args.steps_per_iteration:
            epoch, at = divmod(self.update, len(batches))
            order = self.permutation(len(batches), "learn", self.iteration, epoch)
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            self.updates.append(self._update(experience, batches[order[at]]))
            self.update += 1
            self.state.global_step += 1
            self.state.epoch = self.iteration + self.update / args.steps_per_iteration
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            self.report("learn", self.line | self.updates[-1], ("reward", "entropy", "opd"))
            if self.update < args.steps_per_iteration:
                if self.stopping():
                    return False
                self.save_if_due()
        seconds = time.perf_counter() - started
        self.line["seconds_learn"] = seconds
        self.line["tokens_per_second_learn"] = self.line["unique_tokens"] * args.ppo_epochs / seconds
        return True

    def measure(self) -> None:
        """Close the iteration: evaluate if it is time, write its line, ring alarms, save if due."""
        if self.args.eval_every and (self.iteration + 1) % self.args.eval_every == 0:
            self.line |= self.evaluate()
        self.line |= monitor.summarise(self.updates)
        line = self.over_ranks(self.line)
        self.iteration += 1
        self.update, self.experience, self.episodes, self.updates = 0, None, [], []
        assert self.optimizer is not None
        rates = [group["lr"] for group in self.optimizer.param_groups]
        line = {
            "step": self.state.global_step,
            "iteration": self.iteration,
            **line,
            "learning_rate": rates[0],
            "critic_learning_rate": rates[-1],
            "seconds": round(self.seconds(), 3),
        }
        self.line = line
        self.write_line(line)
        self.alarms.check(self.iteration, line)
        self.report("measured", line, ("reward", "em", "eval_em", "entropy"))
        self.save_if_due()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Play every evaluation task once and return its metrics, each named ``eval_...``."""
        started = time.perf_counter()
        self._sync_engine()
        share = range(self.args.process_index, len(self.eval_tasks), self.args.world_size)
        episodes = self._roll_out(
            self.eval_tasks,
            list(share),
            seed=self.derived_seed("evaluate", 0, self.args.process_index),
            temperature=0.0 if self.args.eval_greedy else 1.0,
            stage="evaluate",
        )
        metrics = {f"eval_{name}": value for name, value in monitor.episode_metrics(episodes).items()}
        metrics["seconds_evaluate"] = time.perf_counter() - started
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # The update

    def _update(self, experience: Experience, packs: Sequence[Pack]) -> dict[str, float]:
        """One optimiser step on one mini-batch, accumulated over its packs."""
        args, layout, whole = self.args, experience.layout, self.actor_critic
        only_critic = self.iteration < args.critic_warmup_iterations
        options = self._loss_options()
        totals: dict[str, Tensor] = {}
        logprobs, old = [], []
        wrapped: Any = self.model_wrapped
        wrapped.train()
        packs = packs or [nothing_to_learn(args.device)]  # a rank without work still takes part in the common step
        for number, p in enumerate(packs):
            at = p.flat_index
            with self._gradient_sync(number == len(packs) - 1):
                hidden, values = wrapped(p, actor=not only_critic)
                critic_loss, value_clipped = value_loss(
                    values,
                    experience.old_values[at],
                    experience.returns[at],
                    clip_range=args.cliprange_value or None,
                    weights=layout.weights[at],
                )
                loss = args.value_coef * critic_loss
                found: dict[str, Tensor] = {"value_loss": critic_loss.detach(), "value_clip_fraction": value_clipped}
                if only_critic and args.world_size > 1:
                    loss = loss + 0.0 * sum(weight.sum() for weight in whole.actor_parameters())  # DDP waits for all
                if not only_critic:
                    policy_loss, metrics = ppo_opd_loss(
                        project(whole.actor, hidden),
                        p.action_ids,
                        experience.old_logprobs[at],
                        experience.advantages[at],
                        teacher=_frozen(self.teacher, experience.teacher_hidden, at),
                        reference=_frozen(self.reference, experience.reference_hidden, at),
                        weights=layout.weights[at],
                        opd_weights=experience.opd_weights[at],
                        rollout_logprobs=None
                        if layout.rollout_logprobs is None or args.importance_cap == 0
                        else layout.rollout_logprobs[at],
                        options=options,
                    )
                    loss = loss + policy_loss
                    found |= {name: getattr(metrics, name) for name in _SUMMED}
                    logprobs.append(metrics.logprobs)
                    old.append(experience.old_logprobs[at])
                self.accelerator.backward(loss)
            for name, value in found.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        norms = self._step()
        summed = {name: float(value) for name, value in totals.items()}
        pulls = [] if only_critic else [summed.pop("policy_pull"), summed.pop("opd_pull")]
        return {
            **(monitor.pull_metrics(*pulls) if pulls else {}),
            **summed,
            **monitor.ratio_metrics(logprobs, old),
            **norms,
            "opd_coef": options.opd_coef,
        }

    def _step(self) -> dict[str, float]:
        """Clip each network's gradient by its own norm and step; a gradient that is not finite is skipped."""
        limit = self.args.max_grad_norm or float("inf")
        norms = {
            "grad_norm": self.accelerator.clip_grad_norm_(list(self.actor_critic.actor_parameters()), limit),
            "critic_grad_norm": self.accelerator.clip_grad_norm_(list(self.actor_critic.critic_parameters()), limit),
        }
        found = {name: float(norm) for name, norm in norms.items() if norm is not None}
        optimizer, scheduler = cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        if all(np.isfinite(norm) for norm in found.values()):
            optimizer.step()
            found["skipped"] = 0.0
        else:
            logger.warning("step %d: the gradient is not finite, the step is skipped", self.state.global_step)
            found = {"skipped": 1.0}
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return found

    def _loss_options(self) -> LossOptions:
        args = self.args
        coefficient = args.opd_coef_at(self.state.global_step)
        return LossOptions(
            clip_low=args.cliprange,
            clip_high=args.cliprange,
            importance_cap=args.importance_cap,
            entropy_coef=args.entropy_coef,
            divergence=args.divergence if coefficient > 0 else "none",
            opd_coef=coefficient,
            jsd_beta=args.jsd_beta,
            top_k=args.opd_top_k,
            ref_coef=args.reference_kl_coef,
            valid_vocab=self.valid_vocab,
        )

    def _gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Ranks exchange gradients once per mini-batch, with its last pack."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model_wrapped)

    # Playing

    def _roll_out(
        self, tasks: Sequence[Task], indices: Sequence[int], *, seed: int, temperature: float, stage: str
    ) -> list[Episode]:
        assert self.engine is not None
        rewards: list[float] = []

        def on_episode(episode: Episode, done: int, wanted: int) -> None:
            rewards.append(episode.reward)
            self.report(stage, {"reward": sum(rewards) / len(rewards), "done": done / wanted}, ("reward", "done"))
            if self.interrupt and self.args.world_size == 1:  # ranks stop together, between two steps
                raise _Stop

        self.actor.eval()
        return rollout(
            self.engine,
            self.tokenizer,
            lambda: self.env_fn(tasks),
            indices,
            sampling=SamplingParams(max_tokens=self.args.max_new_tokens, temperature=temperature),
            seed=seed,
            max_active=self.args.max_active,
            on_episode=on_episode,
            repeatable=True,
        )

    def _sync_engine(self) -> None:
        if self.engine is None:
            self.engine = HFEngine(self.actor, self.tokenizer, max_batch=self.args.max_active)
        sync_engine(self.engine, self.actor, self.state.global_step)

    # Preparing

    def _lay_out(self, episodes: Sequence[Episode]) -> Layout:
        return lay_out(
            episodes,
            self.args,
            mini_batches=self.args.mini_batches,
            seed=self.derived_seed("mini-batches", self.iteration, 0),
            device=self.args.device,
            global_sum=lambda x: self.accelerator.reduce(x, "sum"),  # pyright: ignore[reportArgumentType]
            ranks=self.args.world_size,
        )


def _frozen(model: PreTrainedModel | None, hidden: Tensor | None, at: Tensor) -> Projection | None:
    return None if model is None or hidden is None else project(model, hidden[at])


def _default_env(args: MemOPDConfig) -> EnvFactory:
    return lambda tasks: MemOPDEnv(tasks=tasks, memory=args.memory, instructions=args.instructions)
