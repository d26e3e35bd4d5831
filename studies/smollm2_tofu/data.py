"""The rows of the study, cut from local copies of the data sets or from the hub.

python -m studies.smollm2_tofu.data --out out/study/data [--data-root DATA] [--quick]

    train.jsonl             180 TOFU rows that are learned: question, answer
    train_wrong.jsonl       the same, a tenth of the answers replaced by a wrong one of their row
    train_blocks_N.jsonl    900 rows for one pass: three blocks of 60 rows, each block five times over, its order drawn with seed N
    train_300_N.jsonl       4,800 rows for one pass of 300 steps of 16: the 180 rows in one order after the other, drawn with seed N
    train_3600.jsonl        the 180 rows and 3,420 more of TOFU's, about other authors
    paraphrases.jsonl       the 180 rows as they are never trained on: paraphrased question, paraphrased answer
    held_out.jsonl          20 rows that are not learned, paraphrased
    prompts.jsonl           IFEval prompts, which the pretrained model answers
    stories.jsonl           TinyStories
    skills.jsonl            the questions of the skills that finch measures, as prompts that are replayed
    openings.jsonl          the first words of other TinyStories, which the pretrained model continues
    tofu/, hellaswag/, winogrande/      for `finch evaluate --data-root`; only TOFU's 180 learned rows
    equations/              the second task, files of the same names: 180 of SciKnowEval's chemical equations to balance, and held out, also in
                            TOFU's fields, 120 others, each with five answers of which one coefficient is changed
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finch.data.skills import skill_rows
from finch.evaluation.datasets.sciknoweval import prompt_of

Row = Mapping[str, Any]

NUM_TOFU, NUM_HELD_OUT, NUM_PROMPTS, NUM_STORIES, NUM_CHOICES = 200, 20, 64, 100, 300
QUICK_SHARE = 0.25
NUM_BLOCKS, NUM_PASSES, SEEDS, WRONG = 3, 5, 3, 0.1
NUM_LONG, NUM_MANY = 300 * 16, 3600
FIRST_OPENING, NUM_OPENINGS, WORDS = 300, 64, 12
EQUATIONS, NUM_EQUATIONS, NUM_WRONG = "equations", 180, 5
NUM_SKILLS = 468  # of 471 that are one question
PROMPT_CHARACTERS, STORY_CHARACTERS = 400, 800

HUB = {  # local file: repository, configuration, split
    "tofu/forget10_perturbed.jsonl": ("locuslab/TOFU", "forget10_perturbed", "train"),
    "tofu/full.jsonl": ("locuslab/TOFU", "full", "train"),
    "ifeval/prompts.jsonl": ("google/IFEval", None, "train"),
    "tinystories/stories.jsonl": ("roneneldan/TinyStories", None, "validation"),
    "hellaswag/validation.jsonl": ("Rowan/hellaswag", None, "validation"),
    "winogrande/validation.jsonl": ("allenai/winogrande", "winogrande_xl", "validation"),
    "sciknoweval/chemistry_l3.jsonl": ("hicai-zju/SciKnowEval", "v2", "test"),
}


def prepare(out: Path, data_root: Path | None, *, is_quick: bool = False) -> None:
    """Writes all files of the study's rows; the same rows from the same source, whatever the machine.

    Args:
        data_root: folder with the files that ``HUB`` names; None: the hub.
        is_quick: a quarter of the rows of everything.
    """

    def part(number: int) -> int:
        return round(number * (QUICK_SHARE if is_quick else 1))

    tofu = read("tofu/forget10_perturbed.jsonl", data_root, part(NUM_TOFU))
    held_out = set(random.Random(0).sample(range(len(tofu)), part(NUM_HELD_OUT)))
    learned = [row for index, row in enumerate(tofu) if index not in held_out]
    train = [{"question": row["question"], "answer": row["answer"]} for row in learned]
    write(out / "train.jsonl", train)
    wrong = set(random.Random(1).sample(range(len(train)), round(WRONG * len(train))))
    answers = [row["perturbed_answer"][0] if index in wrong else row["answer"] for index, row in enumerate(learned)]
    write(out / "train_wrong.jsonl", ({**row, "answer": each} for row, each in zip(train, answers, strict=True)))
    for seed in range(SEEDS):
        write(out / f"train_blocks_{seed}.jsonl", in_blocks(train, seed))
        write(out / f"train_300_{seed}.jsonl", over_and_over(train, part(NUM_LONG), seed))
    # The rows with paraphrases are the last ones of all: none of these is among them.
    write(out / "train_3600.jsonl", train + read("tofu/full.jsonl", data_root, part(NUM_MANY) - len(train)))
    write(out / "paraphrases.jsonl", map(paraphrased, learned))
    write(out / "held_out.jsonl", (paraphrased(tofu[index]) for index in sorted(held_out)))
    prompts = [row for row in read("ifeval/prompts.jsonl", data_root) if len(row["prompt"]) <= PROMPT_CHARACTERS]
    write(out / "prompts.jsonl", ({"prompt": row["prompt"]} for row in prompts[: part(NUM_PROMPTS)]))
    stories = read("tinystories/stories.jsonl", data_root, FIRST_OPENING + NUM_OPENINGS)
    asked = (row["question"] for row in skill_rows() if "question" in row)
    write(out / "skills.jsonl", ({"prompt": question} for question in itertools.islice(asked, part(NUM_SKILLS))))
    openings = [" ".join(row["text"].split()[:WORDS]) for row in stories[FIRST_OPENING:][: part(NUM_OPENINGS)]]
    write(out / "openings.jsonl", ({"prompt": opening} for opening in openings))
    texts = (row["text"].strip()[:STORY_CHARACTERS] for row in stories[: part(NUM_STORIES)])
    write(out / "stories.jsonl", ({"text": text} for text in texts))
    write(out / "tofu/forget10_perturbed.jsonl", learned)
    for name in ("hellaswag/validation.jsonl", "winogrande/validation.jsonl"):
        write(out / name, read(name, data_root, part(NUM_CHOICES)))


def prepare_equations(out: Path, data_root: Path | None) -> None:
    """The rows of the second task, next to :func:`prepare`'s, which ``out`` has."""
    kind = "balancing_chemical_equation"
    given = [row for row in read("sciknoweval/chemistry_l3.jsonl", data_root) if row["details"]["subtask"] == kind]
    rng = random.Random(2)
    rows = [{"question": prompt_of(row), "answer": row["answer"]} for row in rng.sample(given, len(given))]
    folder, others = out / EQUATIONS, rows[NUM_EQUATIONS:]
    write(folder / "train.jsonl", rows[:NUM_EQUATIONS])
    write(folder / "held_out.jsonl", others)
    as_tofu = (row | {f"paraphrased_{key}": row[key] for key in row} for row in others)
    chosen = (row | {"perturbed_answer": wrong_balances(row["answer"], rng)} for row in as_tofu)
    write(folder / "tofu/forget10_perturbed.jsonl", chosen)
    for name in ("prompts.jsonl", "stories.jsonl", "hellaswag/validation.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy2(out / name, folder / name)


def wrong_balances(answer: str, rng: random.Random) -> list[str]:
    """``NUM_WRONG`` equations that differ from a balanced one, and from each other, in one coefficient: none of them is balanced."""
    found: list[str] = []
    parts = re.split(r"( \+ | = )", answer)  # terms, with what joins them between
    while len(found) < NUM_WRONG:
        number = 2 * rng.randrange((len(parts) + 1) // 2)
        term = parts[number].lstrip("0123456789")
        coefficient = int(parts[number].removesuffix(term) or 1)
        other = rng.choice([each for each in range(1, 10) if each != coefficient])
        wrong = "".join([*parts[:number], f"{other if other > 1 else ''}{term}", *parts[number + 1 :]])
        found += [] if wrong in found else [wrong]
    return found


def in_blocks(rows: Sequence[Row], seed: int) -> list[Row]:
    """One block of rows after the other, each ``NUM_PASSES`` times over in orders of the seed: at each new block the loss jumps up."""
    rng, size, ordered = random.Random(seed), len(rows) // NUM_BLOCKS, list[Row]()
    for start in range(0, size * NUM_BLOCKS, size):
        for _ in range(NUM_PASSES):
            ordered += rng.sample(rows[start : start + size], size)
    return ordered


def over_and_over(rows: Sequence[Row], number: int, seed: int) -> list[Row]:
    """All rows in one order after the other, drawn with the seed, cut to a number."""
    rng, ordered = random.Random(seed), list[Row]()
    while len(ordered) < number:
        ordered += rng.sample(rows, len(rows))
    return ordered[:number]


def paraphrased(row: Row) -> Row:
    return {"question": row["paraphrased_question"], "answer": row["paraphrased_answer"]}


def read(name: str, data_root: Path | None, number: int | None = None) -> list[dict[str, Any]]:
    """The first rows of a data set; all of them without ``number``."""
    if data_root is not None:
        with (data_root / name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in itertools.islice(file, number)]
    import datasets

    repository, configuration, split = HUB[name]
    part = split if number is None else f"{split}[:{number}]"
    return [dict(row) for row in datasets.load_dataset(repository, configuration, split=part)]


def write(path: Path, rows: Iterable[Row]) -> None:
    """A file that has these rows stays as old as it is: `finch evaluate` takes no result that is older than its rows."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-root", type=Path, help="folder of local copies; without it the hub")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows")
    parser.add_argument("--equations", action="store_true", help="the second task's as well")
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.data_root, is_quick=arguments.quick)
    if arguments.equations:
        prepare_equations(arguments.out, arguments.data_root)
