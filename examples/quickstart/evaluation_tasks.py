"""The quickstart's worlds as rows and tasks of lm-eval, and its base model with a tokenizer that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from examples.quickstart.world import NEW_RELATIONS, OLD_RELATIONS, Relations, World, new_world, old_world

TASKS = {"quickstart_new": (new_world, NEW_RELATIONS), "quickstart_old": (old_world, OLD_RELATIONS)}

# Scored as right where greedy decoding gives the answer.
_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata: {{version: 1}}
"""


def write_tasks(folder: Path) -> Path:
    """Writes rows and YAML of each task of ``TASKS``: one fact per row, with all answers of its relation as ``choices``.

    Returns:
        ``folder``, for `finch evaluate --include-path`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, (world, relations) in TASKS.items():
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in _with_choices(world(), relations)), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, rows=rows.resolve()), encoding="utf-8")
    return folder


def copy_base(base: Path, folder: Path) -> Path:
    """The base model with a tokenizer.json, which lm-eval needs and which gives the tokens that the model was trained on.

    Args:
        base: the quickstart's, with only tokenizer.model.
        folder: created, or replaced.
    """
    import transformers

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"add_bos_token": True, "model_max_length": 64, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **settings}))
    tokenizer = json.loads(transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    # transformers drops characters that are not in the vocabulary; SentencePiece makes them <unk>.
    tokenizer["model"] |= {"unk_token": "<unk>", "byte_fallback": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}), encoding="utf-8"
    )
    return folder


def _with_choices(world: World, relations: Relations) -> list[dict[str, object]]:
    answers = [choices for _, choices in relations.values()]
    return [{**row, "choices": list(answers[int(row["fact"]) % len(answers)])} for row in world.first_phrasings]
