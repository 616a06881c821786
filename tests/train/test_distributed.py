"""Two processes train one student: they agree on it, share the tasks, and write one record."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from memopd_train.alignpack import Pack
from memopd_train.experience import nothing_to_learn
from memopd_train.losses import LossOptions, ppo_opd_loss
from memopd_train.models import ActorCritic, Critic, project
from memopd_train.progress import read_metrics

SCRIPT = """
    import sys
    from pathlib import Path
    from safetensors.torch import save_file
    from transformers import AutoTokenizer
    from memopd_env import Task
    from memopd_env.retrieval import Passage, SparseRetriever
    sys.path.insert(0, {tests!r})
    from conftest import Colours

    cold, out = Path({cold!r}), Path({out!r})
    tasks = [Task(f"task-{{n}}", [f"thing number {{n}}?"], [["red"]]) for n in range(6)]
    retriever = SparseRetriever.from_passages([Passage("0", "red", "red thing"), Passage("1", "blue", "blue thing")])
    colours = Colours(AutoTokenizer.from_pretrained(cold), tasks, retriever, cold)
    trainer = colours.trainer(
        out, teacher=colours.stranger(), divergence="reverse_kl", iterations={iterations}, critic_warmup_iterations=1,
        max_pack_tokens=48, save_steps=3, eval_every=2, eval_tasks=tasks,
    )
    trainer.train(resume_from_checkpoint=True)
    weights = {{name: p.detach().contiguous() for name, p in trainer.actor_critic.named_parameters()}}
    save_file(weights, out / f"rank-{{trainer.args.process_index}}.safetensors")
"""

SFT_SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from test_sft import config, copying_episodes, tiny_model, tiny_tokenizer
    from memopd_train.sft import train_sft

    train_sft(
        tiny_model(), tiny_tokenizer(), copying_episodes(), {out!r}, config(per_device_train_batch_size={rows}, {more})
    )
"""


def launch(script, text, ranks=2):
    script.write_text(textwrap.dedent(text))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port), str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-4000:]


@pytest.mark.slow
def test_two_ranks_agree_and_resume(colours, tmp_path):
    out = tmp_path / "out"

    def run(iterations):
        where = {"tests": os.path.dirname(__file__), "cold": str(colours.folder), "out": str(out)}
        launch(tmp_path / "run.py", SCRIPT.format(iterations=iterations, **where))

    run(2)
    run(3)
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert all(line["episodes"] == 8 for line in lines)
    assert lines[1]["eval_episodes"] == 6
    one, other = (load_file(out / f"rank-{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_cold_start_on_two_ranks_is_the_one_on_one_rank_with_as_many_rows(tmp_path):
    where = {"tests": os.path.dirname(__file__)}
    for ranks, rows in ((1, 8), (2, 4)):
        text = SFT_SCRIPT.format(out=str(tmp_path / f"on{ranks}"), rows=rows, more="", **where)
        launch(tmp_path / "run.py", text, ranks)
    one, two = (load_file(tmp_path / f"on{ranks}" / "model" / "model.safetensors") for ranks in (1, 2))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
    logs = [read_metrics(tmp_path / f"on{ranks}" / "metrics.jsonl") for ranks in (1, 2)]
    assert [line["step"] for line in logs[1]] == list(range(1, 13))
    assert [line["tokens"] for line in logs[1]] == [line["tokens"] for line in logs[0]]


@pytest.mark.slow
def test_two_ranks_of_a_cold_start_stop_at_the_same_step_when_time_is_up(tmp_path):
    more = "max_seconds=0.5 if __import__('os').environ['RANK'] == '1' else 600.0, max_steps=100_000"
    text = SFT_SCRIPT.format(out=str(tmp_path / "out"), rows=4, more=more, tests=os.path.dirname(__file__))
    launch(tmp_path / "run.py", text)
    assert (tmp_path / "out" / "model").is_dir()
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")


def test_a_rank_without_work_contributes_a_differentiable_zero(colours):
    student = colours.stranger()
    model = ActorCritic(student, Critic.copy_of(student))
    nothing: Pack = nothing_to_learn(torch.device("cpu"))
    hidden, values = model(nothing)
    none = torch.zeros(0)
    loss, _ = ppo_opd_loss(
        project(student, hidden), nothing.action_ids, none, none, options=LossOptions(divergence="none")
    )
    (loss + values.sum()).backward()
    assert float(loss.detach()) == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
