"""Every option of a training run, in one place, each with its default, its meaning and its check.

Both classes derive from ``transformers.TrainingArguments`` (through TRL), so accelerate, FSDP, DeepSpeed, schedules and
reporting are configured as everywhere else in that ecosystem; what is written here is what MemOPD adds or sets
differently. Flags and YAML are interchangeable: `load_config` reads a file, flags, or both, and flags win.

    config = load_config(MemOPDConfig, ["--config", "run.yaml", "--opd_coef", "0.5"])
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

import torch
import yaml
from transformers import TrainingArguments
from trl.scripts.utils import TrlParser
from trl.trainer.base_config import _BaseConfig
from trl.trainer.sft_config import SFTConfig

from memopd_env.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    """A dataclass field whose help text is also its documentation."""
    return field(default=default, metadata={"help": text})


def _runs_in_bf16(bf16: bool | None, fp16: bool, use_cpu: bool) -> bool:
    """An explicit choice stands; otherwise bf16 where a GPU supports it, and never on a CPU."""
    if bf16 is not None:
        return bf16
    return not fp16 and not use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


@dataclass
class MemOPDSFTConfig(SFTConfig):
    """Options of the cold start, on top of TRL's ``SFTConfig``.

    Rows are calls that are tokenised already, so TRL's dataset options (packing, text field, ``max_length``) do not
    apply. Defaults that differ from TRL's: no gradient checkpointing, bf16 only on a GPU, 32 rows a batch, a warm-up of
    50 steps, a checkpoint every 200 steps (the newest two are kept), fp32 master weights left as they are.
    """

    output_dir: str | None = _option("runs/sft", "Folder of the run: checkpoints, metrics.jsonl, model/.")
    loss_on: Literal["action", "all"] = _option(
        "action", "Tokens in the loss: those the agent wrote, or every token of the call (a pretraining phase)."
    )
    max_seconds: float = _option(0.0, "Wall-clock budget of the whole run, resumptions included; 0 is no limit.")
    per_device_train_batch_size: int = _option(32, "Calls per batch and device.")
    warmup_steps: float = _option(50, "Steps of linear warm-up; below 1 it is a share of all steps.")
    save_steps: float = _option(200, "Steps between two checkpoints.")
    save_total_limit: int | None = _option(2, "Checkpoints that are kept.")
    gradient_checkpointing: bool = _option(False, "Trade computation for memory.")
    bf16: bool | None = _option(None, "Mixed precision in bf16; by default on GPUs that support it, never on a CPU.")
    disable_tqdm: bool | None = _option(True, "No second progress bar beside ours.")

    def __post_init__(self) -> None:
        self.bf16 = _runs_in_bf16(self.bf16, self.fp16, self.use_cpu)
        self.max_length = None  # nothing is truncated
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available() and not self.use_cpu
        self.dataset_kwargs = {"skip_prepare_dataset": True}
        super().__post_init__()
        _check_choices(self, MemOPDSFTConfig)
        _check_optimisation(self)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.max_seconds >= 0, "max_seconds", self.max_seconds, "0 (no limit) or a number of seconds")
        _require(not self.packing, "packing", self.packing, "false: rows are calls, and calls may not see each other")


_AT_LEAST_ONE = [
    "iterations",
    "episodes_per_iteration",
    "rollouts_per_task",
    "max_new_tokens",
    "max_active",
    "ppo_epochs",
    "mini_batch_episodes",
    "opd_top_k",
]
_NOT_NEGATIVE = [
    "value_coef",
    "entropy_coef",
    "reference_kl_coef",
    "importance_cap",
    "opd_coef",
    "opd_coef_end",
    "cliprange_value",
    "learning_rate",
    "critic_learning_rate",
    "critic_warmup_iterations",
    "max_pack_tokens",
    "alarm_gap",
    "eval_every",
    "max_seconds",
]


@dataclass
class MemOPDConfig(_BaseConfig):
    """Options of PPO with on-policy distillation.

    Defaults follow MEM1's PPO (arXiv 2506.15841) where it has one, and DGPO for the rest. One iteration plays
    ``episodes_per_iteration`` episodes and learns from them ``ppo_epochs`` times in mini-batches; one optimiser step
    is done per mini-batch, and ``save_steps``, warm-up and schedules count those steps. ``max_steps`` and
    ``num_train_epochs`` are derived from ``iterations`` and cannot be set.
    """

    output_dir: str | None = _option("runs/memopd", "Folder of the run: checkpoints, metrics.jsonl, model/.")

    # Play
    iterations: int = _option(500, "Rounds of play and learn.")
    episodes_per_iteration: int = _option(128, "Episodes played, over all ranks, before the policy learns from them.")
    rollouts_per_task: int = _option(1, "Episodes per drawn task; must divide episodes_per_iteration.")
    memory: str = _option("consolidate", "Memory policy of the default environment: consolidate, full or window:k.")
    instructions: str = _option("full", "Instructions of the default environment: full, terse or a template.")
    max_new_tokens: int = _option(512, "Most tokens of one call.")
    max_active: int = _option(64, "Most episodes in progress at a time, on each rank.")

    # Learn
    ppo_epochs: int = _option(1, "Passes over each batch of episodes.")
    mini_batch_episodes: int = _option(64, "Episodes per optimiser step, over all ranks.")
    max_pack_tokens: int = _option(
        0,
        "Most unique tokens in one forward pass; a longer call is an error. 0 is 8192 on a GPU; on a CPU 512, or more "
        "where a call is longer.",
    )
    attention: Literal["auto", "sdpa", "flex", "varlen"] = _option(
        "auto", "Attention over packs; auto is flex on a GPU and varlen on a CPU. All of them work with any layout."
    )
    share_prefix: bool = _option(True, "Compute what calls have in common once.")
    gamma: float = _option(1.0, "Discount per sampled token.")
    lam: float = _option(1.0, "Lambda of GAE.")
    whiten_advantages: bool = _option(True, "Whiten advantages over the sampled tokens of the whole batch.")
    cliprange: float = _option(0.2, "Clip range of the policy ratio.")
    cliprange_value: float = _option(0.5, "Clip range of the value; 0 is off.")
    value_coef: float = _option(0.5, "Weight of the value loss.")
    entropy_coef: float = _option(0.001, "Weight of the entropy bonus.")
    reference_kl_coef: float = _option(0.0, "Weight of KL(student || reference), full vocabulary; needs ref_model.")
    importance_cap: float = _option(
        2.0, "Cap of the correction for engine and trainer disagreeing on a sampled token; 0 is no correction."
    )
    loss_average: Literal["token", "episode"] = _option(
        "token", "Average over the sampled tokens of the mini-batch, or within each episode first."
    )
    learning_rate: float = _option(1e-6, "Peak learning rate of the actor.")
    critic_learning_rate: float = _option(1e-5, "Peak learning rate of the critic.")
    critic: Literal["own", "shared"] = _option(
        "own", "A backbone of its own, starting as a copy of the student's, or a head on the student's trunk."
    )
    critic_warmup_iterations: int = _option(0, "First iterations in which only the critic learns.")

    # Distil
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled_token", "top_k", "none"] = _option(
        "reverse_kl",
        "reverse_kl is KL(student || teacher), forward_kl is KL(teacher || student), jsd, top_k (reverse, with the "
        "tail mass), sampled_token (a detached advantage), none.",
    )
    opd_coef: float = _option(1.0, "Weight of the distillation term at the start.")
    opd_schedule: Literal["constant", "linear", "cosine"] = _option(
        "constant", "How the weight moves from opd_coef to opd_coef_end over the optimiser steps."
    )
    opd_coef_end: float = _option(0.0, "Weight of the distillation term at the end; ignored when constant.")
    opd_gate: Literal["all", "failed_only"] = _option(
        "all", "Distil on every episode, or only where the reward stayed below failed_below (DGPO)."
    )
    failed_below: float = _option(1e-6, "Reward below which an episode counts as failed.")
    opd_top_k: int = _option(32, "Tokens kept exactly by divergence top_k.")
    jsd_beta: float = _option(0.5, "Weight of the teacher in the mixture of divergence jsd.")
    teacher_state: Literal["aligned", "persistent_history"] = _option(
        "aligned", "The teacher sees what the student saw, or the whole history (the paper's comparison)."
    )

    # Measure
    eval_every: int = _option(0, "Iterations between two evaluations on eval_tasks; 0 is never.")
    eval_greedy: bool = _option(True, "Evaluate at temperature 0; otherwise at 1.")
    log_episodes: bool = _option(False, "Write every training episode to episodes.jsonl.")
    alarm_entropy: float = _option(0.02, "Warn when the mean entropy (nats) falls below; 0 is off.")
    alarm_kl: float = _option(0.2, "Warn when the approximate KL of an update rises above; 0 is off.")
    alarm_gap: float = _option(0.1, "Warn when p99 of |Δ log-prob| between engine and trainer rises above; 0 is off.")
    alarm_invalid: float = _option(0.5, "Warn when this share of actions is invalid; 0 is off.")
    max_seconds: float = _option(0.0, "Wall-clock budget of the whole run, resumptions included; 0 is no limit.")

    # Set differently from transformers
    lr_scheduler_type: str = _option("constant_with_warmup", "Schedule of both learning rates.")
    warmup_steps: float = _option(0.05, "Optimiser steps of warm-up; below 1 it is a share of all steps.")
    save_steps: float = _option(20, "Optimiser steps between two checkpoints.")
    save_total_limit: int | None = _option(2, "Checkpoints that are kept.")
    gradient_checkpointing: bool = _option(False, "Trade computation for memory.")
    bf16: bool | None = _option(None, "Mixed precision in bf16; by default on GPUs that support it, never on a CPU.")
    disable_tqdm: bool | None = _option(True, "No second progress bar beside ours.")

    def __post_init__(self) -> None:
        self.bf16 = _runs_in_bf16(self.bf16, self.fp16, self.use_cpu)
        _check_choices(self, MemOPDConfig)
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in _NOT_NEGATIVE:
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("gamma", "lam"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        _require(0 < self.cliprange < 1, "cliprange", self.cliprange, "between 0 and 1")
        _require(0 < self.jsd_beta < 1, "jsd_beta", self.jsd_beta, "strictly between 0 and 1")
        _require(
            self.episodes_per_iteration % self.rollouts_per_task == 0,
            "rollouts_per_task",
            self.rollouts_per_task,
            f"a divisor of episodes_per_iteration ({self.episodes_per_iteration})",
        )
        _require(
            self.mini_batch_episodes <= self.episodes_per_iteration,
            "mini_batch_episodes",
            self.mini_batch_episodes,
            f"at most episodes_per_iteration ({self.episodes_per_iteration})",
        )
        _require(
            self.gradient_accumulation_steps == 1,
            "gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            "1: gradients are accumulated over the packs of a mini-batch anyway; set mini_batch_episodes",
        )
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # the head is used after the forward pass, which DDP would misread
        self.max_steps = self.iterations * self.steps_per_iteration
        super().__post_init__()
        _check_optimisation(self)

    @property
    def mini_batches(self) -> int:
        """Mini-batches per pass over the episodes of an iteration."""
        return math.ceil(self.episodes_per_iteration / self.mini_batch_episodes)

    @property
    def steps_per_iteration(self) -> int:
        """Optimiser steps per iteration."""
        return self.ppo_epochs * self.mini_batches

    @property
    def needs_teacher(self) -> bool:
        """True when any step of this run asks the teacher."""
        end = self.opd_coef if self.opd_schedule == "constant" else self.opd_coef_end
        return self.divergence != "none" and max(self.opd_coef, end) > 0

    def opd_coef_at(self, step: int) -> float:
        """Weight of the distillation term at one optimiser step.

        Args:
            step: Optimiser steps done before, from 0 to ``max_steps``.
        """
        progress = min(step / max(self.max_steps - 1, 1), 1.0)
        if self.opd_schedule == "linear":
            return self.opd_coef + (self.opd_coef_end - self.opd_coef) * progress
        if self.opd_schedule == "cosine":
            return self.opd_coef_end + (self.opd_coef - self.opd_coef_end) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.opd_coef


def check_parts(args: MemOPDConfig, *, teacher: object, reference: object, train_tasks: int, eval_tasks: int) -> None:
    """Check that a run has the models and tasks that its options need.

    Raises:
        ConfigError: Names what is missing and the way out.
    """
    if args.needs_teacher and teacher is None:
        raise ConfigError(f"divergence {args.divergence!r} needs a teacher: pass one, or set divergence to none")
    if args.reference_kl_coef > 0 and reference is None:
        raise ConfigError("reference_kl_coef needs a reference: pass ref_model, e.g. the student before training")
    if not train_tasks:
        raise ConfigError("there are no training tasks: pass train_tasks")
    if args.eval_every and not eval_tasks:
        raise ConfigError("eval_every is set, but there are no eval_tasks: pass held-out tasks, or set eval_every to 0")
    groups = args.episodes_per_iteration // args.rollouts_per_task
    if groups < args.world_size:
        raise ConfigError(f"{groups} tasks an iteration cannot feed {args.world_size} ranks: play more episodes")


Config = TypeVar("Config", MemOPDConfig, MemOPDSFTConfig)


def load_config(kind: type[Config], flags: Sequence[str] = (), *, file: str | Path | None = None) -> Config:
    """Build a configuration from a YAML file, from flags, or from both; flags win.

    Args:
        kind: `MemOPDConfig` or `MemOPDSFTConfig`.
        flags: Command-line words such as ``["--gamma", "0.99"]``; ``--config FILE`` among them works too.
        file: A YAML file of ``option: value``.

    Raises:
        ConfigError: If the file is missing or malformed, an option is unknown, or a value makes no sense.
    """
    words = list(flags)
    if "--config" in words:
        at = words.index("--config")
        if at + 1 >= len(words):
            raise ConfigError("--config needs a file, e.g. --config run.yaml")
        file = words[at + 1]
        del words[at : at + 2]
    known = {option.name for option in fields(kind) if option.init}
    parser = TrlParser([cast(Any, kind)])
    if file is not None:
        values = _read_yaml(Path(file))
        for name in values:
            if name not in known:
                raise ConfigError(f"{file}{_line_of(Path(file), name)}: unknown option {name!r}{_nearest(name, known)}")
        parser.set_defaults_with_config(**values)
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name not in known and name.removeprefix("no_") not in known:
            raise ConfigError(f"unknown option {word!r}{_nearest(name, known)}")
    parser.exit_on_error = False  # so that a bad value is raised, not printed with a page of usage
    try:
        return parser.parse_args_into_dataclasses(words)[0]
    except ConfigError:
        raise
    except (argparse.ArgumentError, ValueError, TypeError, SystemExit) as problem:
        where = f"{file}: " if file is not None else ""
        raise ConfigError(f"{where}{problem}") from problem


def own_options(kind: type) -> list[tuple[str, object, str]]:
    """Name, default and meaning of the options that a class adds or sets differently, in order of definition."""
    return [
        (option.name, option.default, option.metadata["help"])
        for option in fields(kind)
        if option.name in inspect.get_annotations(kind)
    ]


def _read_yaml(file: Path) -> dict:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise ConfigError(f"no such configuration file: {file}") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{file} is not UTF-8 text; save it as UTF-8") from problem
    except yaml.YAMLError as problem:
        raise ConfigError(f"{file} is not valid YAML: {problem}") from problem
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected lines of `option: value`, found a {type(values).__name__}")
    return values


def _line_of(file: Path, name: str) -> str:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith(f"{name}:"):
            return f":{number}"
    return ""


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}")


def _check_optimisation(args: TrainingArguments) -> None:
    """What torch and transformers would refuse only after the models are loaded, or not at all."""
    _require(0 <= args.seed < 2**32, "seed", args.seed, "between 0 and 2**32 - 1")
    _require(0 <= args.learning_rate < math.inf, "learning_rate", args.learning_rate, "0 or a positive number")
    for name in ("adam_beta1", "adam_beta2"):
        _require(0 <= getattr(args, name) < 1, name, getattr(args, name), "at least 0 and below 1")
    for name in ("weight_decay", "max_grad_norm", "adam_epsilon"):
        _require(getattr(args, name) >= 0, name, getattr(args, name), "0 or more")


def _check_choices(config: object, kind: type) -> None:
    """Literal annotations are promises; a YAML file or keyword argument can break them."""
    hints = get_type_hints(kind)
    for name in inspect.get_annotations(kind):
        choices = get_args(hints[name])
        if choices and all(isinstance(choice, str) for choice in choices):
            value = getattr(config, name)
            _require(value in choices, name, value, "one of " + ", ".join(choices))
