"""The built-in world: an invented encyclopedia in which entity ``i`` is a pure function of ``(seed, i)``.

Nothing is stored. A passage, the facts behind it and the questions about it are recomputed from the entity's number by
integer hashing, so a world of a million passages streams in constant memory, any passage can be made alone, and every
process on every platform writes the same bytes. No model can know this world beforehand: scores on it measure search
and memory, not recall.

Entities belong to one of three classes by number (train, validation, test), and every fact of an entity points only to
entities of its own class: whatever a test question rests on never occurs in a training question or its answer. Similar
names cross classes on purpose; they are the distractors.

Two styles of the same idea: ``prose`` (people, places, works and institutions with linked facts, one- and two-hop
questions, aliases) and ``terse`` (one short line a passage, for models of under a million parameters that learn to read
within minutes on a CPU).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Passage
from memopd_env.tasks.task import Task

WORLD_VERSION = 1
"""Raised whenever the same configuration would give other passages or questions."""

SPLITS = ("train", "validation", "test")

_MASK = (1 << 64) - 1
_ONSETS = ("b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o")
_CODAS = ("n", "l", "r", "s")
STARTS = tuple(onset.upper() + vowel for onset in _ONSETS for vowel in _VOWELS)
ENDS = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)
VALUE_STARTS = tuple(start.lower() for start in STARTS)
VALUE_ENDS = tuple(
    onset + vowel + _CODAS[(i + j) % 4] for i, onset in enumerate(_ONSETS) for j, vowel in enumerate(_VOWELS)
)
TERSE_RELATIONS = ("craft", "food", "river", "metal", "tree", "tool", "song", "stone")


def mix(*parts: int) -> int:
    """Hash integers to 64 well-mixed bits (SplitMix64's finaliser, chained)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + part * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        state ^= state >> 30
        state = (state * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 27
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(index: int, size: int, key: int) -> int:
    """Apply a keyed bijection of ``range(size)``: a four-round Feistel network, walked until it lands inside."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_ in range(4):
            left, right = right, left ^ (mix(key, round_, right) & low)
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True)
class WorldConfig:
    """Which world.

    Attributes:
        passages: Number of entities, one passage each (100 to 1,000,000).
        seed: Another seed is another world.
        style: ``prose`` or ``terse``.
        facts: Facts told about each entity (terse only; prose entities have four).
        two_hop: Share of the questions of a task that need two searches (prose only).
        test_share: Share of the entities kept for ``test``; ``validation`` gets 0.1, ``train`` the rest.
    """

    passages: int = 4000
    seed: int = 0
    style: str = "prose"
    facts: int = 3
    two_hop: float = 0.2
    test_share: float = 0.2

    def __post_init__(self) -> None:
        if self.style not in ("prose", "terse"):
            raise ConfigError(f"world style {self.style!r} is unknown: choose 'prose' or 'terse'")
        if not 100 <= self.passages <= 1_000_000:
            raise ConfigError(f"a world has 100 to 1,000,000 passages, not {self.passages:,}")
        if self.style == "terse" and self.passages > len(STARTS) * len(ENDS):
            raise ConfigError(f"a terse world has at most {len(STARTS) * len(ENDS):,} names, not {self.passages:,}")
        if not 1 <= self.facts <= len(TERSE_RELATIONS):
            raise ConfigError(f"a terse entity has 1 to {len(TERSE_RELATIONS)} facts, not {self.facts}")
        if not 0.0 <= self.two_hop <= 1.0:
            raise ConfigError(f"two_hop is a share between 0 and 1, not {self.two_hop}")
        if not 0.0 < self.test_share <= 0.8:
            raise ConfigError(f"test_share lies in (0, 0.8], not {self.test_share}")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> WorldConfig:
        """Return a named world: ``default`` (4,000 passages of prose) or ``tiny`` (4,000 terse ones)."""
        presets = {"default": cls(), "tiny": cls(style="terse", two_hop=0.0)}
        if name not in presets:
            raise ConfigError(f"world preset {name!r} is unknown: choose one of {', '.join(presets)}")
        return replace(presets[name], **changes)


@dataclass(frozen=True)
class Fact:
    """One fact of an entity.

    Attributes:
        relation: Key of the relation.
        value: Canonical answer text.
        aliases: Other accepted texts.
        target: Number of the entity that is the value, or None for a plain value.
        sentence: How the passage tells it.
        question: How a one-hop question asks for it.
        noun: How a two-hop question names the value, e.g. "the place where Bora Kel was born".
    """

    relation: str
    value: str
    sentence: str
    question: str
    aliases: tuple[str, ...] = ()
    target: int | None = None
    noun: str = ""


@dataclass(frozen=True)
class Question:
    """One question with its accepted answers and the titles it rests on, in reading order."""

    text: str
    answers: tuple[str, ...]
    entities: tuple[str, ...]
    hops: int


# Prose relations: per kind, (key, target kind or pool, sentence, question, noun for two-hop questions).
_KINDS = ("person", "place", "work", "institution")
_OCCUPATIONS = (
    "painter", "physician", "cartographer", "composer", "sculptor", "botanist", "architect", "historian", "navigator",
    "poet", "astronomer", "geologist", "engraver", "jurist", "printer", "engineer", "playwright", "chemist", "weaver",
    "linguist", "surveyor", "glassmaker", "organist", "philosopher",
)  # fmt: skip
_PRODUCTS = (
    "salt", "amber", "wool", "copper", "silk", "honey", "paper", "indigo", "cedar", "tin", "saffron", "glass",
    "granite", "linen", "pearls", "barley", "olives", "slate", "tea", "resin", "porcelain", "marble", "flax", "coral",
)  # fmt: skip
_FORMS = (
    "opera", "novel", "fresco", "symphony", "epic poem", "ballad", "tapestry", "treatise", "atlas", "comedy", "mosaic",
    "oratorio", "chronicle", "sonata", "tragedy", "almanac",
)  # fmt: skip
_FIELDS = (
    "optics", "law", "medicine", "navigation", "music", "mathematics", "botany", "metallurgy", "astronomy", "rhetoric",
    "painting", "geometry", "agriculture", "printing", "theology", "hydraulics",
)  # fmt: skip
_RELATIONS: dict[str, tuple[tuple[str, str, str, str, str], ...]] = {
    "person": (
        ("birthplace", "place", "{e} was born in {v}.", "In which place was {e} born?", "the place where {e} was born"),
        ("birthyear", "year", "{e} was born in the year {v}.", "In which year was {e} born?", ""),
        ("occupation", "occupation", "{e} worked as a {v}.", "What was the occupation of {e}?", ""),
        ("employer", "institution", "{e} taught at {v}.", "At which institution did {e} teach?",
         "the institution where {e} taught"),
    ),
    "place": (
        ("ruler", "person", "The first ruler of {e} was {v}.", "Who was the first ruler of {e}?",
         "the first ruler of {e}"),
        ("product", "product", "{e} is known for its {v}.", "What is {e} known for?", ""),
        ("founded", "year", "{e} was settled in the year {v}.", "In which year was {e} settled?", ""),
        ("neighbour", "place", "The nearest town to {e} is {v}.", "What is the nearest town to {e}?",
         "the nearest town to {e}"),
    ),
    "work": (
        ("author", "person", "{e} was made by {v}.", "Who made {e}?", "the maker of {e}"),
        ("form", "form", "{e} is a {v}.", "What kind of work is {e}?", ""),
        ("year", "year", "{e} was finished in the year {v}.", "In which year was {e} finished?", ""),
        ("keeper", "institution", "{e} is kept at {v}.", "At which institution is {e} kept?",
         "the institution where {e} is kept"),
    ),
    "institution": (
        ("founder", "person", "{e} was founded by {v}.", "Who founded {e}?", "the founder of {e}"),
        ("seat", "place", "{e} has its seat in {v}.", "In which place does {e} have its seat?",
         "the place where {e} has its seat"),
        ("opened", "year", "{e} opened in the year {v}.", "In which year did {e} open?", ""),
        ("field", "field", "{e} is devoted to {v}.", "What is {e} devoted to?", ""),
    ),
}  # fmt: skip
_POOLS = {"occupation": _OCCUPATIONS, "product": _PRODUCTS, "form": _FORMS, "field": _FIELDS}
_FAMILIES = len(STARTS) * len(ENDS)
_GIVEN = len(STARTS) * len(ENDS)


class World:
    """A world of ``config.passages`` entities; see the module docstring.

    Args:
        config: A configuration, a preset name, or None for the default world.
    """

    def __init__(self, config: WorldConfig | str | None = None) -> None:
        self.config = WorldConfig.preset(config or "default") if not isinstance(config, WorldConfig) else config
        c = self.config
        cycle = 1000
        self._cycle = min(cycle, c.passages // 4)
        test = max(1, round(self._cycle * c.test_share))
        validation = max(1, round(self._cycle * 0.1))
        self._bounds = {
            "train": (0, self._cycle - validation - test),
            "validation": (self._cycle - validation - test, self._cycle - test),
            "test": (self._cycle - test, self._cycle),
        }

    def __len__(self) -> int:
        """Number of passages."""
        return self.config.passages

    # ------------------------------------------------------------------ entities

    def split_of(self, index: int) -> str:
        """Return the class of an entity."""
        # Kinds go by index % 4, so classes go by index // 4: every class holds every kind.
        position = (index // len(_KINDS)) % self._cycle
        return next(split for split, (low, high) in self._bounds.items() if low <= position < high)

    def kind_of(self, index: int) -> str:
        """Return what an entity is; in a terse world everything is just a name."""
        return _KINDS[index % len(_KINDS)] if self.config.style == "prose" else "name"

    def name(self, index: int) -> str:
        """Return the unique title of an entity."""
        if self.config.style == "terse":
            number = permute(index, _GIVEN, mix(self.config.seed, 1))
            return STARTS[number % len(STARTS)] + ENDS[number // len(STARTS)]
        return self._prose_name(index)

    def _prose_name(self, index: int) -> str:
        kind = self.kind_of(index)
        rank = index // len(_KINDS)
        # Families are shared by a few entities and given names by many: similar names are everywhere.
        group, member = divmod(rank, 4)
        family = _word(permute(group % _FAMILIES, _FAMILIES, mix(self.config.seed, 2)), group // _FAMILIES)
        given_number = (mix(self.config.seed, 3, group) + member * 1021) % _GIVEN
        given = _word(given_number, 0)
        if kind == "person":
            return f"{given} {family}"
        if kind == "place":
            return f"{('Upper', 'Lower', 'Old', 'New')[member]} {family}"
        if kind == "work":
            return f"The {('Song', 'Book', 'Gates', 'Garden')[member]} of {family}"
        return f"{family} {('Academy', 'Museum', 'College', 'Archive')[member]}"

    def aliases(self, index: int) -> tuple[str, ...]:
        """Return other names of an entity that its passage mentions and that scoring accepts."""
        if self.kind_of(index) != "person":
            return ()
        given, family = self.name(index).split(" ")
        return (f"{given[0]}. {family}",) if mix(self.config.seed, 4, index) % 3 == 0 else ()

    @lru_cache(maxsize=4096)  # noqa: B019 - a world is small and lives as long as its users
    def facts(self, index: int) -> tuple[Fact, ...]:
        """Return the facts of an entity, in the order in which its passage tells them."""
        return self._terse_facts(index) if self.config.style == "terse" else self._prose_facts(index)

    def _terse_facts(self, index: int) -> tuple[Fact, ...]:
        seed, name = self.config.seed, self.name(index)
        order = sorted(range(len(TERSE_RELATIONS)), key=lambda r: mix(seed, 5, index, r))[: self.config.facts]
        facts = []
        for relation in order:
            draw = mix(seed, 6, index, relation)
            value = VALUE_STARTS[draw % 64] + VALUE_ENDS[(draw >> 8) % 64]
            key = TERSE_RELATIONS[relation]
            facts.append(Fact(key, value, f"{key} {value}", f"{name} {key}?"))
        return tuple(facts)

    def _prose_facts(self, index: int) -> tuple[Fact, ...]:
        name, facts = self.name(index), []
        for slot, (key, source, sentence, question, noun) in enumerate(_RELATIONS[self.kind_of(index)]):
            draw = mix(self.config.seed, 7, index, slot)
            target, also = None, ()
            if source == "year":
                value = str(1100 + draw % 800)
            elif source in _POOLS:
                value = _POOLS[source][draw % len(_POOLS[source])]
            else:
                target = self._pick(index, source, draw)
                value, also = self.name(target), self.aliases(target)
            text = sentence.format(e=name, v=value).replace(" a opera", " an opera").replace(" a e", " an e")
            text = text.replace(" a a", " an a").replace(" a o", " an o")
            facts.append(Fact(key, value, text, question.format(e=name), also, target, noun.format(e=name)))
        return tuple(facts)

    def _pick(self, index: int, kind: str, draw: int) -> int:
        """Pick an entity of ``kind`` and of the class of ``index``, never ``index`` itself."""
        low, high = self._bounds[self.split_of(index)]
        ranks = self.config.passages // len(_KINDS)
        slot = _KINDS.index(kind)
        for attempt in range(1000):
            number = mix(draw, attempt)
            whole = (ranks + self._cycle - 1) // self._cycle
            rank = (number % whole) * self._cycle + low + (number >> 32) % (high - low)
            candidate = rank * len(_KINDS) + slot
            if rank < ranks and candidate != index:
                return candidate
        raise ConfigError(f"a world of {self.config.passages} passages is too small for its splits: take more passages")

    # ------------------------------------------------------------------ passages

    def passage(self, index: int) -> Passage:
        """Return the passage of entity ``index``; its id is the number as text."""
        title, facts = self.name(index), self.facts(index)
        if self.config.style == "terse":
            return Passage(str(index), title, ", ".join(fact.sentence for fact in facts) + ".")
        order = sorted(range(len(facts)), key=lambda slot: mix(self.config.seed, 8, index, slot))
        sentences = [facts[slot].sentence for slot in order]
        also = self.aliases(index)
        if also:
            sentences.insert(0, f"{title} is also written {also[0]}.")
        twin = index ^ len(_KINDS)  # the neighbouring rank shares the family name
        if twin < self.config.passages:
            sentences.append(f"Not to be confused with {self.name(twin)}.")
        return Passage(str(index), title, " ".join(sentences))

    def passages(self) -> Iterator[Passage]:
        """Stream all passages in the order of their ids, in constant memory."""
        return (self.passage(index) for index in range(self.config.passages))

    def write_corpus(self, path: Path) -> int:
        """Stream the corpus to a JSONL file, ``{"id", "contents"}`` a line; returns the number of lines.

        The file appears under its name only when it is complete.
        """
        partial = path.with_name(path.name + ".part")
        with partial.open("w", encoding="utf-8") as out:
            for passage in self.passages():
                out.write(json.dumps({"id": passage.id, "contents": passage.contents}, ensure_ascii=False) + "\n")
        partial.replace(path)
        return self.config.passages

    @cached_property
    def corpus_hash(self) -> str:
        """SHA-256 over ``id``, title and text of all passages; the same on every platform."""
        digest = hashlib.sha256()
        for passage in self.passages():
            digest.update(f"{passage.id}\t{passage.title}\t{passage.text}\n".encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return what identifies this world in results."""
        return {"world_version": WORLD_VERSION, **asdict(self.config)}

    # ------------------------------------------------------------------ questions

    def indices(self, split: str) -> Sequence[int]:
        """Return the entity numbers of a class, ascending."""
        if split not in self._bounds:
            raise ConfigError(f"split {split!r} is unknown: choose one of {', '.join(SPLITS)}")
        return _SplitIndices(self, split)

    def question(self, index: int, slot: int, second: int | None = None) -> Question:
        """Return the question for a fact of an entity or, with ``second``, for a fact of that fact's value.

        Raises:
            ConfigError: If ``second`` is given but the first fact's value has no passage.
        """
        fact, name = self.facts(index)[slot], self.name(index)
        if second is None:
            return Question(fact.question, (fact.value, *fact.aliases), (name,), 1)
        if fact.target is None:
            raise ConfigError(f"fact {fact.relation!r} of {name!r} leads to no other passage")
        final = self.facts(fact.target)[second]
        bridge = self.name(fact.target)
        text = final.question.replace(bridge, fact.noun)
        return Question(text, (final.value, *final.aliases), (name, bridge), 2)

    def tasks(
        self, num_questions: int, split: str, count: int, seed: int = 0, two_hop: float | None = None
    ) -> list[Task]:
        """Compose tasks whose questions rest on entities of one split.

        No question stands twice in a task; across tasks questions repeat only once all of the split's have been used.

        Args:
            num_questions: Questions a task, N.
            split: ``train``, ``validation`` or ``test``.
            count: Number of tasks.
            seed: Another seed, other tasks.
            two_hop: Share of two-hop questions; None takes the configuration's.
        """
        pool = self.indices(split)
        facts_each = self.config.facts if self.config.style == "terse" else 4
        total = len(pool) * facts_each
        if num_questions < 1 or num_questions > len(pool):
            raise ConfigError(f"split {split!r} has {len(pool)} entities: a task cannot ask {num_questions} questions")
        share = self.config.two_hop if two_hop is None else two_hop
        if share and self.config.style == "terse":
            raise ConfigError("a terse world has no two-hop questions: set two_hop to 0")
        tasks, cursor = [], 0
        for number in range(count):
            questions: list[Question] = []
            subjects: set[int] = set()
            while len(questions) < num_questions:
                place = permute(cursor % total, total, mix(self.config.seed, 9, seed, cursor // total))
                cursor += 1
                index, slot = pool[place // facts_each], place % facts_each
                if index in subjects:
                    continue
                subjects.add(index)
                draw = mix(self.config.seed, 10, seed, number, len(questions))
                fact = self.facts(index)[slot]
                second = None
                if (draw % 10_000) / 10_000 < share and fact.target is not None:
                    second = (draw >> 20) % len(self.facts(fact.target))
                questions.append(self.question(index, slot, second))
            tasks.append(
                Task(
                    id=f"{self.config.style}-{self.config.passages}-{self.config.seed}/{split}/q{num_questions}/{seed}/{number}",
                    questions=[question.text for question in questions],
                    answers=[question.answers for question in questions],
                    source="memopd-world",
                    split=split,
                    entities=[question.entities for question in questions],
                )
            )
        return tasks


class _SplitIndices(Sequence[int]):
    """The entity numbers of one class as a sequence that is computed, not stored."""

    def __init__(self, world: World, split: str) -> None:
        self._low, high = world._bounds[split]
        self._width, self._cycle, kinds = high - self._low, world._cycle, len(_KINDS)
        ranks = world.config.passages // kinds
        whole, rest = divmod(ranks, self._cycle)
        self._length = (whole * self._width + min(max(rest - self._low, 0), self._width)) * kinds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(self._length))]
        if position < 0:
            position += self._length
        if not 0 <= position < self._length:
            raise IndexError(position)
        rank, kind = divmod(position, len(_KINDS))
        block, offset = divmod(rank, self._width)
        return (block * self._cycle + self._low + offset) * len(_KINDS) + kind


def _word(number: int, generation: int) -> str:
    """Spell a number as a pronounceable capitalised word; later generations get one more syllable."""
    word = STARTS[number % len(STARTS)] + ENDS[number // len(STARTS) % len(ENDS)]
    return word + (VALUE_ENDS[generation - 1] if generation else "")


def majority_baseline(tasks: Sequence[Task]) -> float:
    """Return the best mean exact match that guessing from the question alone can reach.

    For every question form (the question without its capitalised names) the most frequent answer is guessed; on small
    sets this is optimistic, since the guess is chosen on the very set it is scored on.
    """
    by_form: dict[str, dict[str, int]] = {}
    total = 0
    for task in tasks:
        for question, answers in zip(task.questions, task.answers, strict=True):
            form = " ".join(word for word in question.split() if not word[:1].isupper())
            counts = by_form.setdefault(form, {})
            counts[answers[0]] = counts.get(answers[0], 0) + 1
            total += 1
    return sum(max(counts.values()) for counts in by_form.values()) / max(total, 1)
