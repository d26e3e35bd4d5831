"""SmolLM2-135M-Instruct by `--config auto`: FINCH's steps equal a plain transformers loop, and the exported model chats."""

import shutil

import pytest
import torch
import yaml
from helpers.causal_lm import train_plainly
from helpers.rows import write_lines
from helpers.runs import finished
from transformers import AutoModelForCausalLM, AutoTokenizer

from finch.config.instantiate import find_config

pytestmark = pytest.mark.slow

ROWS = [
    ("Who wrote the novel?", "Jaime Vasquez wrote it."),
    ("When was he born?", "On the 25th of February 1958."),
    ("Where was he born?", "In Santiago, Chile."),
    ("What does he write?", "True crime, for the most part."),
    ("Who is his father?", "Lorenzo Vasquez, a noted chef."),
    ("Does he have a prize?", "Yes, the Edgar Allan Poe Award."),
]
BATCH, ETA_BASE, ETA_MAX = 2, 2e-5, 5e-5


@pytest.fixture(scope="module")
def run(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    rows = write_lines(folder / "rows.jsonl", *({"question": q, "answer": a} for q, a in ROWS))
    config = yaml.safe_load(find_config("auto").read_text())
    config |= {"model_dir": str(smollm2), "data_files": rows, "device": "cpu"}
    config |= {"epochs": 1, "batch_size": BATCH, "gradient_accumulation_steps": 1, "shuffle": False}
    config["self_replay"], config["optimizer"]["lr"] = None, ETA_BASE
    yield finished(folder, config)
    shutil.rmtree(folder)  # gigabytes


@pytest.fixture(scope="module")
def reference(smollm2):
    """The same steps by transformers, with Section 3.3 in plain Python, and the tuned model."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    rows = []
    for question, answer in ROWS:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
        text = tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n")  # ends with <|im_end|>
        ids = tokenizer(text, add_special_tokens=False).input_ids
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        rows.append({"input_ids": ids, "labels": [-100] * start + ids[start:]})
    return train_plainly(model, rows, BATCH, ETA_BASE, ETA_MAX), model.eval()


def reply(model, tokenizer):
    prompt = [{"role": "user", "content": "Where was Jaime Vasquez born?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :])


def test_auto_on_smollm2_equals_transformers(run, reference):
    # In fp32: 1.1e-5 apart on one kind of CPU, below 1e-5 on another.
    for column in ("loss", "ema_loss"):
        assert run.column(column) == pytest.approx(reference[0][column], rel=3e-5)


def test_auto_on_smollm2_exports_a_model_that_chats_alike(run, reference):
    folder = run.folder / "epoch_0"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answer = reply(AutoModelForCausalLM.from_pretrained(folder), tokenizer)
    assert answer == reply(reference[1], tokenizer)
    assert len(answer.split()) > 2
