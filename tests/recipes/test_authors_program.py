"""The recipe with the prompts of the paper's authors against their program written with transformers in plain Python: the loop of
Section 3.3 over rows in their order."""

import pytest
import torch
from helpers.causal_lm import train_plainly
from helpers.evaluation import read_lines
from helpers.models import save
from helpers.rows import ROWS, write_lines
from helpers.runs import finished
from helpers.tokenizers import write_qwen3_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tiny_text import WORDS

CHATML = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
BATCH, STEPS, ETA_BASE, ETA_MAX = 2, 20, 2e-3, 3e-3


def prompt_and_text(tokenizer, row):
    if tokenizer.chat_template is None:
        prompt = f"User: {row['question']}\n\nAssistant:"
        return prompt, f"{prompt} {row['answer']}{tokenizer.eos_token}"
    turns = [{"role": "system", "content": ""}, {"role": "user", "content": row["question"]}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return prompt, f"{prompt}{row['answer']}<|im_end|>"


def train_as_the_authors(folder, rows):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    pairs = [prompt_and_text(tokenizer, row) for row in rows]
    samples = [[tokenizer(text, add_special_tokens=False).input_ids for text in pair] for pair in pairs]
    rows = [{"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]} for prompt, ids in samples]
    return train_plainly(model, rows, BATCH, ETA_BASE, ETA_MAX)


@pytest.mark.parametrize("template", [CHATML, None], ids=["chat template", "no template"])
def test_recipe_equals_the_authors_program(template, tmp_path, rows_file, tiny):
    folder = tmp_path / "base"
    save("qwen3 tied", folder, vocab_size=320)
    write_qwen3_tokenizer(folder, [*WORDS, "User", "Assistant"], template)
    rows = read_lines(rows_file)[: BATCH * STEPS]
    file = write_lines(tmp_path / "rows.jsonl", *rows)
    config = tiny()
    config["checkpointer"]["checkpoint_dir"] = str(folder)
    config |= {
        "model": {"_component_": "finch.models.auto", "path": str(folder)},
        "tokenizer": {"_component_": "finch.models.auto_tokenizer", "path": str(folder), "prompt_style": "authors"},
        "dataset": {"_component_": ROWS, "data_files": file},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": ETA_BASE, "weight_decay": 0.0},
        "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": ETA_MAX, "init": "dataset"},
        "batch_size": BATCH,
        "shuffle": False,
        "dtype": "fp64",
    }
    done = finished(tmp_path, config)
    reference = train_as_the_authors(folder, rows)
    for column in ("loss", "lr"):
        assert done.column(column) == pytest.approx(reference[column], rel=1e-6)
    assert len(set(reference["lr"])) == STEPS
    exported = AutoTokenizer.from_pretrained(done.folder / "epoch_0")
    turns = [
        {"role": role, "content": rows[0][field]} for role, field in (("user", "question"), ("assistant", "answer"))
    ]
    expected = prompt_and_text(AutoTokenizer.from_pretrained(folder), rows[0])
    prompt = exported.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    assert (prompt, exported.apply_chat_template(turns, tokenize=False).rstrip()) == expected
