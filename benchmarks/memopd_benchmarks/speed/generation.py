"""Generated tokens per second of HFEngine at several batch sizes, against ``transformers.generate`` on the same model.

Every request has its own prompt length and the same number of tokens to sample, without end-of-sequence or stop
strings, so both sides do the same work. ``generate`` gets one left-padded batch at a time. Processor time stands
beside wall time: on a busy machine it is the figure that repeats.

    python -m memopd_benchmarks.speed.generation --layers 3 --width 128 --batches 1 8 64
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd_agents.engines import HFEngine, Request, SamplingParams
from memopd_train.smallmodel import ModelShape, new_model, terse_world_tokenizer


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print and write the figures; ``given`` replaces the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; a new small model if left out")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--requests", type=int, default=256, help="requests at the largest batch; fewer at smaller ones"
    )
    parser.add_argument("--prompt", type=int, nargs=2, default=[60, 140], help="shortest and longest prompt in tokens")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to sample per request")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/speed/generation.json"))
    arguments = parser.parse_args(given)

    if arguments.model:
        tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
        model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
    else:
        tokenizer = terse_world_tokenizer()
        model = new_model(tokenizer, ModelShape(arguments.layers, arguments.width, arguments.heads))
    model = model.to(arguments.device).eval()
    rows = []
    for batch in arguments.batches:
        count = max(batch, arguments.requests * batch // max(arguments.batches))
        prompts = _prompts(count, *arguments.prompt, vocabulary=len(tokenizer))
        for name, play in (("HFEngine", _engine), ("transformers.generate", _generate)):
            play(model, tokenizer, prompts[:batch], batch, 4)
            rows.append(
                {"player": name, "batch": batch, **_measured(play, model, tokenizer, prompts, batch, arguments.tokens)}
            )
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    report = {
        "settings": settings,
        "parameters": model.num_parameters(),
        "rows": rows,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    title = f"{model.num_parameters() / 1e6:.1f} M parameters, {arguments.device}, {torch.get_num_threads()} threads"
    table = Table("player", "batch", "sampled tokens/s", "per processor second", "requests/s", title=title)
    for row in rows:
        figures = (f"{row[name]:.0f}" for name in ("tokens_per_second", "tokens_per_cpu_second"))
        table.add_row(row["player"], str(row["batch"]), *figures, f"{row['requests_per_second']:.1f}")
    console = Console()
    console.print(table)
    console.print(f"written to {arguments.output}")


def _prompts(count: int, shortest: int, longest: int, vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocabulary, random.integers(shortest, longest + 1)).tolist() for _ in range(count)]


def _measured(
    play: Callable[..., int], model: Any, tokenizer: Any, prompts: list[list[int]], batch: int, tokens: int
) -> dict[str, float]:
    started, used = time.perf_counter(), time.process_time()
    sampled = play(model, tokenizer, prompts, batch, tokens)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, processor = time.perf_counter() - started, time.process_time() - used
    return {
        "tokens_per_second": sampled / wall,
        "tokens_per_cpu_second": sampled / processor,
        "requests_per_second": len(prompts) / wall,
    }


def _engine(model: Any, tokenizer: Any, prompts: list[list[int]], batch: int, tokens: int) -> int:
    engine = HFEngine(model, tokenizer, max_batch=batch, eos_ids=())
    for number, prompt in enumerate(prompts):
        engine.submit(Request(prompt, SamplingParams(max_tokens=tokens), number, str(number)))
    sampled = 0
    while completions := engine.poll():
        sampled += sum(len(completion.action_ids) for completion in completions)
    return sampled


def _generate(model: Any, tokenizer: Any, prompts: list[list[int]], batch: int, tokens: int) -> int:
    sampled = 0
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        width = max(map(len, group))
        ids = torch.zeros((len(group), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(group):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=True,
                top_k=0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        sampled += (output.shape[1] - width) * len(group)
    return sampled


if __name__ == "__main__":
    main()
