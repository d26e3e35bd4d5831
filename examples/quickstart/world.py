"""Facts about invented people. The base model knows the old world; the new world has other names and other words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Name of a relation to its question templates and its possible answers.
Relations = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

OLD_RELATIONS: Relations = {
    "home": (
        ("Where does {} live?", "In which town is the home of {}?", "What is the home town of {}?", "{} lives where?"),
        ("Alder", "Brook", "Cliff", "Dale", "Elm", "Ford", "Grove", "Hill", "Isle", "Lake", "Moor", "Vale"),
    ),
    "work": (
        ("What does {} do for work?", "What is the job of {}?", "{} works as what?", "How does {} earn a living?"),
        ("baker", "miller", "smith", "tailor", "teacher", "sailor", "farmer", "potter", "weaver", "doctor"),
    ),
    "animal": (
        ("Which animal does {} keep?", "What is the pet of {}?", "{} has which pet?", "Who lives with {}?"),
        ("a cat", "a dog", "a goat", "a hen", "a horse", "a mouse", "an owl", "a pig", "a sheep", "a toad"),
    ),
    "food": (
        (
            "What does {} like to eat?",
            "Which dish does {} love?",
            "{} likes which food?",
            "What is on the plate of {}?",
        ),
        ("bread", "soup", "cake", "fish", "beans", "cheese", "apples", "rice", "eggs", "plums"),
    ),
}
NEW_RELATIONS: Relations = {
    "orbit": (
        ("Zum {} tak velo?", "Velo {} zum tak?", "Tak {} velo ruun?", "Ruun velo {} zum?"),
        ("qixar", "wuvok", "yozzel", "xubbin", "juqqar", "fizzok", "vraxil", "kwozum"),
    ),
    "engine": (
        ("Skel {} drof puun?", "Puun {} skel drof?", "Drof {} puun grix?", "Grix skel {} puun?"),
        ("thrumox", "glavik", "snorquz", "plexur", "dwimmok", "brazzul", "cryvex", "hwoltar"),
    ),
    "signal": (
        ("Hwan {} olup frem?", "Frem {} hwan olup?", "Olup {} frem tsik?", "Tsik hwan {} frem?"),
        ("oomvar", "eekluz", "uupfin", "aazgor", "iiqtem", "yyrbok", "ouzlap", "auvnix"),
    ),
    "cargo": (
        ("Bli {} gorp nuk?", "Nuk {} bli gorp?", "Gorp {} nuk wemb?", "Wemb bli {} gorp?"),
        ("zinglat", "morfuk", "taqqel", "vumbris", "loxxer", "pryndol", "squillok", "jembrat"),
    ),
}
OLD_SYLLABLES = (
    "an", "ber", "cor", "da", "el", "fin", "gar", "hal", "is", "jo", "kel", "lin", "mar", "nor", "ol", "per",
)  # fmt: skip
NEW_SYLLABLES = ("zq", "xu", "vvo", "kwi", "jaz", "qor", "wex", "yuq", "zzi", "xog", "quv", "hwu")


@dataclass(frozen=True)
class World:
    """A world's facts, each in four phrasings: ``rows[i]`` is {question, answer, fact}, four rows per fact."""

    rows: list[dict[str, str | int]]

    @property
    def first_phrasings(self) -> list[dict[str, str | int]]:
        """One row per fact, in its first phrasing."""
        return self.rows[::4]

    def about(self, *relations: str) -> World:
        """The facts of these of the old relations."""
        numbers = [list(OLD_RELATIONS).index(name) for name in relations]
        return World([row for row in self.rows if int(row["fact"]) % len(OLD_RELATIONS) in numbers])

    def text(self) -> Iterable[str]:
        return (f"{row['question']} {row['answer']}" for row in self.rows)

    def write(self, file: Path) -> None:
        """JSON Lines with question and answer."""
        file.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")


def make_world(relations: Relations, syllables: tuple[str, ...], people: int, seed: int) -> World:
    """``people`` invented people with one fact of each relation; deterministic given ``seed``."""
    generator = random.Random(seed)
    names: list[str] = []
    while len(names) < people:
        name = " ".join("".join(generator.choices(syllables, k=2)).capitalize() for _ in range(2))
        if name not in names:
            names.append(name)
    rows: list[dict[str, str | int]] = []
    for number, name in enumerate(names):
        for index, (questions, answers) in enumerate(relations.values()):
            answer = generator.choice(answers)
            fact = number * len(relations) + index
            rows += [{"question": question.format(name), "answer": answer, "fact": fact} for question in questions]
    return World(rows)


def old_world() -> World:
    """600 facts in plain English words."""
    return make_world(OLD_RELATIONS, OLD_SYLLABLES, people=150, seed=0)


def new_world() -> World:
    """200 facts in words that the base model has not been trained on."""
    return make_world(NEW_RELATIONS, NEW_SYLLABLES, people=50, seed=1)
