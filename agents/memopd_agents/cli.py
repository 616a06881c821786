"""``memopd eval``, ``memopd play`` and ``memopd inspect``: measure an agent, be one, look back at one.

Every option can also stand in the YAML file that ``--config`` names, under its own name; flags win.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import gymnasium as gym
import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import memopd_agents.inspection as inspection
from memopd_agents.agent import Agent, agent_factory
from memopd_agents.episode import Episode, EpisodeFileError, read_episodes
from memopd_agents.evaluation import EPISODES, RESULT, format_table
from memopd_agents.evaluation import evaluate as run_evaluation
from memopd_agents.human import HumanAgent
from memopd_agents.pretrained import load_causal_lm, load_tokenizer
from memopd_agents.rollout import RolloutError
from memopd_agents.seeds import episode_seed
from memopd_agents.terminal import History, context_view, forgotten_next, visible
from memopd_env.env import MemOPDEnv
from memopd_env.errors import ConfigError, MemOPDError, MissingExtraError

if TYPE_CHECKING:
    from memopd_agents.policy import PolicyAgent


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options of a YAML file as defaults of the flags."""
    if path is None:
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold lines like 'episodes: 100'")
    options = {str(key).replace("-", "_"): value for key, value in content.items()}
    known = {parameter.name for parameter in context.command.params} - {"config"}
    if unknown := sorted(options.keys() - known):
        raise ConfigError(
            f"{path}: unknown option {unknown[0]!r}; the options are {', '.join(sorted(map(str, known)))}"
        )
    if isinstance(options.get("agent_arg"), dict):
        options["agent_arg"] = [f"{name}={value}" for name, value in options["agent_arg"].items()]
    context.default_map = {**(context.default_map or {}), **options}
    return path


EnvId = Annotated[str, typer.Option(help="MemOPD-WikiRAG, MemOPD-Q2, MemOPD-Q8 or MemOPD-Q16.")]
Tasks = Annotated[Path | None, typer.Option(help="Task file (.jsonl, .parquet); the built-in world if left out.")]
Corpus = Annotated[Path | None, typer.Option(help="Corpus .jsonl to search, or whose hash to record with --retriever.")]
RetrieverUrl = Annotated[str | None, typer.Option("--retriever", help="URL of a retrieval server.")]
Split = Annotated[str | None, typer.Option(help="Only tasks of this split; test in the built-in world.")]
Memory = Annotated[str, typer.Option(help="consolidate, full, window:K, summary or budget:TOKENS.")]
Texts = Annotated[str, typer.Option(help="Texts around the questions: full, terse, or a template with {questions}.")]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="Turns of an episode.")]
TopK = Annotated[int, typer.Option(min=1, help="Passages per search.")]
WorldName = Annotated[str, typer.Option(help="Preset of the built-in world.")]
AgentArg = Annotated[list[str] | None, typer.Option(help="Argument of the agent, NAME=VALUE; repeat for more.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the run.")]
Config = Annotated[Path | None, typer.Option(callback=_read_config, is_eager=True, help="YAML file of these options.")]


def evaluate(
    out: Annotated[Path, typer.Option(help="Folder of the evaluation; the same command again continues it.")],
    agent: Annotated[
        str, typer.Option(help="oracle, random, chat, a plug-in, module:Class, or a model folder.")
    ] = "oracle",
    env: EnvId = "MemOPD-Q2",
    tasks: Tasks = None,
    corpus: Corpus = None,
    retriever: RetrieverUrl = None,
    split: Split = None,
    memory: Memory = "consolidate",
    instructions: Texts = "full",
    max_turns: MaxTurns = None,
    top_k: TopK = 3,
    on_invalid: Annotated[str, typer.Option(help="feedback or terminate.")] = "feedback",
    answer_count: Annotated[str, typer.Option(help="strict or lenient.")] = "strict",
    on_retriever_error: Annotated[str, typer.Option(help="raise, or truncate: exclude the episode.")] = "raise",
    deadline_s: Annotated[float | None, typer.Option(help="Wall-clock limit of an episode in seconds.")] = None,
    world: WorldName = "default",
    episodes: Annotated[int | None, typer.Option(min=1, help="The first N tasks; all if left out.")] = None,
    seed: Seed = 0,
    workers: Annotated[int, typer.Option(min=1, help="Episodes at a time, for an agent that works on text.")] = 8,
    max_active: Annotated[int, typer.Option(min=1, help="Episodes at a time, for a model.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of a model; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of a model; 1 is off.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one call of a model.")] = 512,
    device: Annotated[str | None, typer.Option(help="Of a model; a GPU if there is one.")] = None,
    agent_arg: AgentArg = None,
    tokenizer: Annotated[str | None, typer.Option(help="Counts the tokens of an agent that works on text.")] = None,
    name: Annotated[str | None, typer.Option(help="What the result calls the agent.")] = None,
    config: Config = None,
) -> None:
    """Measure an agent: episodes.jsonl and result.json in a folder, one table on the screen.

    Example: memopd eval --env MemOPD-Q2 --agent oracle --episodes 100 --out runs/oracle
    """
    choices: dict[str, Any] = {
        "memory": memory,
        "instructions": instructions,
        "max_turns": max_turns,
        "top_k": top_k,
        "on_invalid": on_invalid,
        "answer_count": answer_count,
        "on_retriever_error": on_retriever_error,
        "deadline_s": deadline_s,
    }
    make_env, core, source = _environment(env, tasks, corpus, retriever, split, world, choices)
    if (Path(agent) / "config.json").is_file():
        player: Any = _policy(agent, core, device, temperature, top_p, max_tokens, max_active)
    else:
        player = _text_agent(agent, core, agent_arg)
    count_tokens, counter_name = _token_counter(tokenizer)
    count = len(core.tasks) if episodes is None else min(episodes, len(core.tasks))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("EM {task.fields[em]:.2f}"), console=console) as progress:
        bar = progress.add_task(_shown(f"{agent} in {env}"), total=count, em=0.0)
        gained: list[float] = []

        def on_episode(episode: Episode, done: int, total: int) -> None:
            gained.append(episode.reward)
            progress.update(bar, completed=done, em=sum(gained) / len(gained))

        try:
            result = run_evaluation(
                player,
                make_env,
                range(count),
                out,
                name=name or agent,
                seed=seed,
                workers=workers,
                max_active=max_active,
                settings={"id": env, **source, **choices, "max_turns": core.max_turns},
                corpus_hash=_corpus_hash(corpus, retriever, world),
                count_tokens=count_tokens,
                counter_name=counter_name,
                on_episode=on_episode,
            )
        except (Exception, KeyboardInterrupt) as error:
            # Nothing goes on from a folder that is refused.
            if (out / EPISODES).is_file() and not isinstance(error, (ConfigError, EpisodeFileError)):
                console.print(f"Finished episodes are in {_shown(out)}; the same command again goes on from there.")
            raise
    Console().print(format_table([result], title=f"{env}, {_shown(memory)}"))
    console.print(f"{_shown(out / RESULT)}; look at episodes with: memopd inspect {_shown(out / EPISODES)}")


def play(
    env: EnvId = "MemOPD-Q2",
    agent: Annotated[
        str, typer.Option(help="human, or an agent to watch: oracle, random, chat, module:Class.")
    ] = "human",
    task: Annotated[int | None, typer.Option(help="Number of the task, from 0; drawn if left out.")] = None,
    tasks: Tasks = None,
    corpus: Corpus = None,
    retriever: RetrieverUrl = None,
    split: Split = None,
    memory: Memory = "consolidate",
    instructions: Texts = "full",
    max_turns: MaxTurns = None,
    top_k: TopK = 3,
    world: WorldName = "default",
    agent_arg: AgentArg = None,
    seed: Seed = 0,
    config: Config = None,
) -> None:
    """Play an episode yourself, or watch an agent: what it sees, what it will forget, how it scores.

    Example: memopd play --env MemOPD-Q2 --memory window:2
    """
    choices = {"memory": memory, "instructions": instructions, "max_turns": max_turns, "top_k": top_k}
    make_env, core, _ = _environment(env, tasks, corpus, retriever, split, world, choices)
    console = Console()
    person = agent == "human"
    player = HumanAgent(core.tags, console) if person else _text_agent(agent, core, agent_arg)()
    table = make_env()
    player.reset(episode_seed(seed, 0))
    observation, info = table.reset(seed=seed, options=None if task is None else {"task_index": task})
    history, ended = History(), False
    while not ended:
        console.rule(f"turn {len(history.turns) + 1}, {observation['turns_left']} left")
        context = info["context"]
        forgotten = forgotten_next(core.memory, context[0].text, history.turns, context)
        console.print(context_view(context, forgotten))
        try:
            action = player.act(observation, info)
        except MemOPDError:
            raise
        except Exception as error:  # a stranger's code
            raise RolloutError(f"turn {len(history.turns) + 1}: {type(error).__name__}: {error}") from error
        if not person:
            console.print(visible(action), style="green", markup=False, highlight=False)
            if console.is_terminal:
                console.input("[dim]Enter for the next turn[/dim] ")
        observation, _, terminated, truncated, info = table.step(action)
        history.add(action, info["context"])
        ended = terminated or truncated
    played = cast(MemOPDEnv, table.unwrapped).task
    console.print(inspection.score_table(info["episode"], played.questions, played.answers))


def inspect(
    file: Annotated[Path, typer.Argument(help="episodes.jsonl of an evaluation or a training run.")],
    episode: Annotated[int | None, typer.Option(help="Walk through the episode of this number.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Decodes episodes that were recorded without text.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Episodes to list.")] = 50,
) -> None:
    """List the episodes of a file, or walk through one call by call.

    Example: memopd inspect runs/oracle/episodes.jsonl --episode 3
    """
    console = Console()
    if episode is None:
        console.print(inspection.episode_table(read_episodes(file), limit))
        return
    chosen = next((candidate for candidate in read_episodes(file) if candidate.number == episode), None)
    if chosen is None:
        raise ConfigError(f"{file} has no episode {episode}; memopd inspect {file} lists them")
    decode = _decoder(tokenizer) if tokenizer else None
    for number in range(len(chosen.calls)):
        console.rule(f"episode {chosen.number}, call {number + 1} of {len(chosen.calls)}")
        console.print(inspection.call_view(chosen, number, decode))
        if console.is_terminal and number + 1 < len(chosen.calls):
            console.input("[dim]Enter for the next call[/dim] ")
    console.print(inspection.score_table(chosen.info))


def _environment(
    env_id: str,
    tasks: Path | None,
    corpus: Path | None,
    retriever: str | None,
    split: str | None,
    world: str,
    choices: dict[str, Any],
) -> tuple[Callable[[], gym.Env[Any, Any]], MemOPDEnv, dict[str, Any]]:
    """Return a function that makes environments, one of them, and where tasks and passages come from."""
    import memopd_env

    if env_id not in memopd_env.ENVIRONMENTS:
        raise ConfigError(f"there is no environment {env_id!r}: use {', '.join(memopd_env.ENVIRONMENTS)}")
    split = split or ("test" if tasks is None else None)
    source = {"tasks": tasks and tasks.name, "split": split, "world": world if tasks is None else None}
    given = {**choices, "tasks": tasks, "retriever": retriever or corpus, "split": split, "world": world}
    first = cast(MemOPDEnv, gym.make(env_id, disable_env_checker=True, **given).unwrapped)
    # Read and indexed once, shared by all that follow.
    shared = {**choices, "tasks": first.tasks, "retriever": first.retriever}
    return lambda: gym.make(env_id, disable_env_checker=True, **shared), first, source


def _shown(text: object) -> str:
    """A path or a name, with nothing in it that rich or a terminal would act on."""
    return escape(visible(str(text)))


def _corpus_hash(corpus: Path | None, retriever: str | None, world: str) -> str | None:
    from memopd_env.retrieval.corpus import file_sha256
    from memopd_env.tasks.world import World, WorldConfig

    if corpus is not None:
        return file_sha256(corpus)
    return None if retriever else World(WorldConfig.preset(world)).corpus_hash


def _text_agent(spec: str, core: MemOPDEnv, arguments: list[str] | None) -> Callable[[], Agent]:
    given = {}
    for argument in arguments or ():
        name, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"--agent-arg {argument!r}: write NAME=VALUE, e.g. model=Qwen/Qwen3-4B")
        try:
            given[name.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--agent-arg {argument!r}: the value is not YAML; quote it, e.g. '{name}=\"...\"'"
            ) from error
    if "/" in spec and ":" not in spec:
        raise ConfigError(f"agent {spec!r} is not a model folder (it has no config.json), and no agent has that name")
    return agent_factory(spec, {"tasks": core.tasks, "tags": core.tags}, **given)


def _policy(
    folder: str, core: MemOPDEnv, device: str | None, temperature: float, top_p: float, max_tokens: int, batch: int
) -> PolicyAgent:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "train") from error

    from memopd_agents.engines import HFEngine, SamplingParams
    from memopd_agents.policy import PolicyAgent

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {place!r}: {str(error).splitlines()[0]}; use cpu, cuda or cuda:N") from error
    tokenizer = load_tokenizer(folder)
    # fp32 on a CPU: half precision is emulated there, slower and less exact.
    dtype = torch.float32 if place == "cpu" else "auto"
    loaded: Any = load_causal_lm(folder, dtype=dtype, use_safetensors=True)
    engine = HFEngine(loaded.to(place).eval(), tokenizer, batch)
    return PolicyAgent(engine, tokenizer, sampling, tags=core.tags)


def _token_counter(name: str | None) -> tuple[Callable[[str], int] | None, str]:
    if name is None:
        return None, ""
    tokenizer = load_tokenizer(name)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False)), f"tokenizer {name}"


def _decoder(name: str) -> Callable[[list[int]], str]:
    tokenizer = load_tokenizer(name)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
