"""What sharing prefixes saves: tokens computed, and time of a forward and backward pass of a small model.

Made-up episodes in the shape of a consolidating agent (task, last action, last information), several rollouts of each
task. Every layout computes the same hidden states at the same sampled tokens; their largest difference is shown. On a
CPU the time is processor time, so that a busy machine does not decide the comparison.

    python -m memopd_benchmarks.speed.packing --questions 16 --tasks 2 --rollouts 4
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from memopd_agents.episode import Call, Episode
from memopd_train.alignpack import Pack, pack, sampled_tokens, unpack
from memopd_train.attention import hidden_states, use_backend

VOCAB = 512
ACTION, INFORMATION, QUESTION, CALLS_PER_QUESTION = (10, 40), (40, 120), (8, 16), 1.2
"""Tokens of an action, an information block and a question, and calls of an episode for each question."""


def main(argv: list[str] | None = None) -> None:
    """Measure all layouts, print and write the figures; ``argv`` is the command line without the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=8, help="questions a task, which set its length and its calls")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=4, help="episodes of each task")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens in one pack or padded batch")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/speed/packing.json"))
    arguments = parser.parse_args(argv)

    episodes = make_episodes(arguments.questions, arguments.tasks, arguments.rollouts)
    model = make_model(arguments.layers, arguments.hidden).to(arguments.device)
    start = time.perf_counter()
    shared = pack(episodes, max_tokens=arguments.max_tokens)
    packing_seconds = time.perf_counter() - start
    apart = pack(episodes, max_tokens=arguments.max_tokens, share_prefix=False)
    padded = padded_batches(episodes, arguments.max_tokens)

    layouts: dict[str, tuple[str, int, Callable[[], list[Tensor]]]] = {
        "shared, varlen": ("varlen", tokens(shared), lambda: [hidden_states(model, p, "varlen") for p in shared]),
        "shared, sdpa": ("sdpa", tokens(shared), lambda: [hidden_states(model, p) for p in shared]),
        "not shared, varlen": ("varlen", tokens(apart), lambda: [hidden_states(model, p, "varlen") for p in apart]),
        "padded calls, sdpa": ("sdpa", sum(x.numel() for x, _ in padded), lambda: run_padded(model, padded)),
    }
    if arguments.device == "cuda":
        layouts["shared, flex"] = ("flex", tokens(shared), lambda: [hidden_states(model, p, "flex") for p in shared])

    raw = sum(len(call.prompt_ids) + len(call.action_ids) for episode in episodes for call in episode.calls)
    reference: Tensor | None = None
    rows: dict[str, dict[str, float]] = {}
    for name, (backend, computed, run) in layouts.items():
        use_backend(model, backend)
        with torch.no_grad():
            parts = run()
            found = torch.cat(parts) if name.startswith("padded") else unpack(apart if "not" in name else shared, parts)
        reference = found if reference is None else reference
        error = float((found - reference).abs().max())
        seconds = timed(model, run, arguments.repeats)
        rows[name] = {"tokens": computed, "seconds": seconds, "raw_tokens_per_second": raw / seconds, "error": error}

    report = {
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "episodes": len(episodes),
        "calls": sum(len(episode.calls) for episode in episodes),
        "raw_tokens": raw,
        "sampled_tokens": len(sampled_tokens(episodes).action_ids),
        "packing_seconds": packing_seconds,
        "layouts": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    show(report, arguments.output)


def make_episodes(questions: int, tasks: int, rollouts: int) -> list[Episode]:
    """Episodes of a consolidating agent over random tokens."""
    rng = np.random.default_rng(0)

    def some(bounds: tuple[int, int], times: int = 1) -> list[int]:
        return rng.integers(1, VOCAB, int(rng.integers(*bounds, size=times).sum())).tolist()

    episodes = []
    for _ in range(tasks):
        task = some(QUESTION, questions)
        for _ in range(rollouts):
            kept: list[int] = []
            calls = []
            for _ in range(max(2, int(rng.normal(CALLS_PER_QUESTION * questions, 1.0)))):
                action = some(ACTION)
                calls.append(Call(task + kept, action))
                kept = action + some(INFORMATION)
            episodes.append(Episode(calls, reward=0.0))
    return episodes


def make_model(layers: int, hidden: int) -> PreTrainedModel:
    """A small random decoder."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def tokens(packs: list[Pack]) -> int:
    """Tokens that are computed."""
    return sum(p.num_tokens for p in packs)


def padded_batches(episodes: list[Episode], max_tokens: int) -> list[tuple[Tensor, list[Call]]]:
    """Calls as rows padded on the right, as many to a batch as ``max_tokens`` holds: ids (rows, longest) and calls."""
    batches: list[list[Call]] = []
    longest = 0
    for call in (call for episode in episodes for call in episode.calls):
        longest = max(longest, len(call.prompt_ids) + len(call.action_ids))
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = len(call.prompt_ids) + len(call.action_ids)
        batches[-1].append(call)
    rows = [[torch.tensor(call.prompt_ids + call.action_ids) for call in batch] for batch in batches]
    return [
        (torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), batch)
        for ids, batch in zip(rows, batches, strict=True)
    ]


def run_padded(model: PreTrainedModel, batches: list[tuple[Tensor, list[Call]]]) -> list[Tensor]:
    """Hidden states at the sampled tokens; causal attention never looks right, so padding there needs no mask."""
    states = []
    for ids, calls in batches:
        output = model.get_decoder()(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
        for row, call in zip(output, calls, strict=True):
            first = len(call.prompt_ids) - 1
            states.append(row[first : first + len(call.action_ids)])
    return states


def timed(model: PreTrainedModel, run: Callable[[], list[Tensor]], repeats: int) -> float:
    """Best seconds of forward and backward over the whole batch: wall time on a GPU, processor time on a CPU."""
    on_gpu = model.device.type == "cuda"
    clock, best = time.perf_counter if on_gpu else time.process_time, float("inf")
    for _ in range(repeats):
        model.zero_grad()
        start = clock()
        torch.cat(run()).square().sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return best


def show(report: dict[str, Any], output: Path) -> None:
    """Print the report as a table."""
    raw = report["raw_tokens"]
    sampled = report["sampled_tokens"]
    title = f"{report['episodes']} episodes, {report['calls']} calls, {raw} raw and {sampled} sampled tokens"
    table = Table("layout", "tokens computed", "of raw", "seconds", "raw tokens/s", "max error", title=title)
    for name, row in report["layouts"].items():
        table.add_row(
            name,
            f"{row['tokens']:.0f}",
            f"{row['tokens'] / raw:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['raw_tokens_per_second']:.0f}",
            f"{row['error']:.1e}",
        )
    console = Console()
    console.print(table)
    console.print(f"packing took {report['packing_seconds'] * 1000:.0f} ms; written to {output}")


if __name__ == "__main__":
    main()
