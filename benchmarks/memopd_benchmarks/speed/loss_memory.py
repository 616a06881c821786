"""Peak memory and time of the fused loss against the same loss on full logits, backward pass included.

Each variant runs in a process of its own, because a process never gives its peak back. Measured is what the process
adds to what it held when all inputs were ready (hidden states and heads of student and teacher), so the gradient of the
head, which both variants must produce, is part of both figures. Time is processor time on a CPU, wall time on a GPU.

    python -m memopd_benchmarks.speed.loss_memory --tokens 2048 --vocab 151936 --hidden 1024
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from memopd_train.losses import LossOptions, ppo_opd_loss
from memopd_train.projection import Projection

MIB = 2**20


def main(argv: list[str] | None = None) -> None:
    """Measure both variants, print and write the figures; ``argv`` is the command line without the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="sampled tokens A")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary V")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden width H of student and teacher")
    parser.add_argument("--divergence", default="reverse_kl", choices=["reverse_kl", "forward_kl", "jsd"])
    parser.add_argument("--chunk-size", type=int, default=None, help="tokens per chunk of the fused loss")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/speed/loss_memory.json"))
    arguments = parser.parse_args(argv)

    shape = {
        name: getattr(arguments, name) for name in ("tokens", "vocab", "hidden", "divergence", "chunk_size", "device")
    }
    rows = {variant: measure(variant, shape) for variant in ("fused", "naive")}
    ratio = rows["fused"]["peak_mib"] / rows["naive"]["peak_mib"]
    report = {"shape": shape, "rows": rows, "ratio": ratio, "torch": torch.__version__, "machine": platform.machine()}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")

    title = (
        f"A={shape['tokens']} V={shape['vocab']} H={shape['hidden']} {shape['divergence']} {shape['device']}, float32"
    )
    table = Table("variant", "peak MiB", "seconds", "loss", title=title)
    for variant, row in rows.items():
        table.add_row(variant, f"{row['peak_mib']:.0f}", f"{row['seconds']:.1f}", f"{row['loss']:.6f}")
    console = Console()
    console.print(table)
    console.print(f"fused / naive = 1 / {1 / ratio:.1f}; written to {arguments.output}")


def measure(variant: str, shape: dict[str, Any]) -> dict[str, float]:
    """Run one variant in a fresh process and return its peak in MiB, its seconds and its loss."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, variant, shape))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise MemoryError(f"the {variant} variant died, most likely out of memory: use a smaller --tokens") from None
    finally:
        process.join()


def _run(pipe: Any, variant: str, shape: dict[str, Any]) -> None:
    inputs = _inputs(shape)
    loss_of = {"fused": _fused, "naive": _naive}[variant]
    loss_of(*_inputs({**shape, "tokens": 8, "vocab": 64, "hidden": 16}), shape)[0].backward()  # load the libraries
    on_gpu = shape["device"] == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else _reset_resident_peak()
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    loss = loss_of(*inputs, shape)[0]
    loss.backward()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = clock() - start
    peak = torch.cuda.max_memory_allocated() if on_gpu else _resident_peak()
    pipe.send({"peak_mib": (peak - before) / MIB, "seconds": seconds, "loss": float(loss.detach())})


def _inputs(shape: dict[str, Any]) -> tuple[Projection, Projection, torch.Tensor, torch.Tensor]:
    count, vocab, hidden = shape["tokens"], shape["vocab"], shape["hidden"]
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        states = torch.randn(count, hidden, device=shape["device"])
        models.append(Projection(states, torch.randn(vocab, hidden, device=shape["device"]).mul_(hidden**-0.5)))
    student = Projection(models[0].hidden.requires_grad_(), models[0].weight.requires_grad_())
    action_ids = torch.randint(0, vocab, (count,), device=shape["device"])
    return student, models[1], action_ids, torch.randn(count, device=shape["device"])


def _fused(
    student: Projection, teacher: Projection, action_ids: torch.Tensor, advantages: torch.Tensor, shape: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    options = LossOptions(divergence=shape["divergence"], chunk_size=shape["chunk_size"], entropy_coef=0.01)
    old = torch.full_like(advantages, -12.0)
    return ppo_opd_loss(student, action_ids, old, advantages, teacher=teacher, options=options)


def _naive(
    student: Projection, teacher: Projection, action_ids: torch.Tensor, advantages: torch.Tensor, shape: dict[str, Any]
) -> tuple[torch.Tensor, None]:
    """The loss as most trainers write it: two full (A, V) tables of log-probs and autograd."""
    logp = torch.log_softmax(student.hidden @ student.weight.t(), dim=1)
    with torch.no_grad():
        logq = torch.log_softmax(teacher.hidden @ teacher.weight.t(), dim=1)
    p = logp.exp()
    ratio = (logp.gather(1, action_ids[:, None])[:, 0] + 12.0).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    entropy = -(p * logp).sum(1)
    if shape["divergence"] == "reverse_kl":
        divergence = (p * (logp - logq)).sum(1)
    elif shape["divergence"] == "forward_kl":
        divergence = torch.nn.functional.kl_div(logp, logq, log_target=True, reduction="none").sum(1)
    else:
        logm = torch.logaddexp(logp, logq) - torch.log(torch.tensor(2.0))
        divergence = 0.5 * (p * (logp - logm)).sum(1) + 0.5 * (logq.exp() * (logq - logm)).sum(1)
    return (policy - 0.01 * entropy + divergence).mean(), None


def _reset_resident_peak() -> int:
    """Forget the process's peak where Linux allows it, and return what it holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_peak()


def _resident_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
