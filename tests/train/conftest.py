"""A world of one question: is the thing red or blue? Small enough that a student learns it within seconds."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from memopd_env import MemOPDEnv, Task
from memopd_env.retrieval import Passage, SparseRetriever
from memopd_train.config import MemOPDConfig, MemOPDSFTConfig
from memopd_train.demonstrations import demonstrate
from memopd_train.sft import train_sft
from memopd_train.smallmodel import ModelShape, new_model, pieces_tokenizer
from memopd_train.trainer import MemOPDTrainer

SHAPE = ModelShape(layers=2, width=32, heads=2, window=128)


class Script:
    """An agent that says its lines."""

    def __init__(self, actions):
        self.actions = actions

    def reset(self, seed=None):
        self.left = list(self.actions)

    def act(self, observation, info):
        return self.left.pop(0)


@dataclass
class Colours:
    """The parts of a run here; `student` answers red, which is right, half of the time, and may search first."""

    tokenizer: object
    tasks: list
    retriever: object
    folder: Path

    def env(self, tasks):
        return MemOPDEnv(
            tasks=tasks, retriever=self.retriever, instructions="terse", top_k=1, max_turns=2, memory="consolidate"
        )

    def student(self):
        return Qwen2ForCausalLM.from_pretrained(self.folder)

    def stranger(self, seed=1):
        return new_model(self.tokenizer, SHAPE, seed)

    def config(self, out, **options):
        return MemOPDConfig(
            **{
                "output_dir": str(out),
                "use_cpu": True,
                "iterations": 2,
                "episodes_per_iteration": 8,
                "mini_batch_episodes": 4,
                "max_new_tokens": 10,
                "learning_rate": 1e-3,
                "critic_learning_rate": 1e-3,
                "warmup_steps": 0,
                "divergence": "none",
                **options,
            }
        )

    def trainer(self, out, *, model=None, teacher=None, engine=None, critic_model=None, ref_model=None, **options):
        hooks = {name: options.pop(name) for name in ("callbacks", "on_progress", "eval_tasks") if name in options}
        return MemOPDTrainer(
            model=model or self.student(),
            teacher=teacher,
            critic=critic_model,
            ref_model=ref_model,
            args=self.config(out, **options),
            processing_class=self.tokenizer,
            env_fn=self.env,
            train_tasks=self.tasks,
            engine=engine,
            **hooks,
        )


@pytest.fixture(scope="session")
def colours(tmp_path_factory) -> Colours:
    tokenizer = pieces_tokenizer(["Q:", " thing", " number", *map(str, range(10)), "red", "blue", "\n", "?", " "])
    tasks = [Task(f"task-{number}", [f"thing number {number}?"], [["red"]]) for number in range(6)]
    retriever = SparseRetriever.from_passages([Passage("0", "red", "red thing"), Passage("1", "blue", "blue thing")])
    made = Colours(tokenizer, tasks, retriever, tmp_path_factory.mktemp("cold"))
    episodes = []
    for word in ("red", "blue"):
        answer = f"<think>{word}</think><answer>{word}</answer>"
        search = f"<think>?</think><search>{word}</search>"
        for actions in ([answer], [search, answer]):
            episodes += demonstrate(Script(actions), made.env(tasks), tokenizer, range(len(tasks)))
    config = MemOPDSFTConfig(
        use_cpu=True,
        max_steps=80,
        learning_rate=1e-2,
        warmup_steps=5,
        save_strategy="no",
        per_device_train_batch_size=12,
        logging_steps=80,
    )
    made.folder = train_sft(new_model(tokenizer, SHAPE), tokenizer, episodes, made.folder, config)
    return made
