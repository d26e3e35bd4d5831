"""The study's losses and divergences against transformers, row by row."""

import json

import pytest
import torch
import transformers
from helpers.models import save
from helpers.tokenizers import write_tokenizer
from torch.nn import functional as F

from benchmarks.tiny_text import WORDS
from finch.evaluation.results import base_path, read_result, read_samples
from studies.smollm2_tofu.score import MAX_NEW_TOKENS, TASKS, Scorer, score_sweep

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PROMPTS = ["the bird sings", "a small old red fox runs near the tree, quietly", "never again"]
QUESTIONS = [
    {"question": "where is the old bird?", "answer": "under the stone"},
    {"question": "who sings?", "answer": "a small red fox often sings near the river"},
    {"question": "what runs over the river near the old tree?", "answer": "nothing"},
]
STORIES = ["the fox sleeps. the bird sings.", "a stone", "never again the river runs quietly under the old tree"]

ENDINGS = [
    {"activity_label": "the fox", "ctx": "the bird sings", "endings": ["a stone", "the river runs."], "label": 1},
    {"activity_label": "tree", "ctx": "a stone under the", "endings": ["old tree", "fox"], "label": "0"},
]


def prompt_text(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """BASE, a changed model of it, and the study's rows. BASE's config has another end of a turn than its tokenizer:
    a token that its answer to the first prompt has."""
    root = tmp_path_factory.mktemp("scores")
    base, tuned, data = root / "base", root / "tuned", root / "data"
    tokens = ["<|im_start|>", "<|im_end|>"]
    write_tokenizer(base, WORDS, bos=None, eos="<|endoftext|>", special=tokens, template=CHATML)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    prompt = tokenizer(prompt_text(PROMPTS[0]), return_tensors="pt")
    free = save("smollm2", base, **size, eos_token_id=None).generate(**prompt, do_sample=False, max_new_tokens=5)
    model = save("smollm2", base, **size, eos_token_id=int(free[0, -1]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tuned)
    data.mkdir()
    rows = {
        "prompts": [{"prompt": text} for text in PROMPTS],
        "stories": [{"text": text} for text in STORIES],
        "paraphrases": QUESTIONS,
        "held_out": QUESTIONS[:1],
        "train": QUESTIONS[1:],
        "hellaswag/validation": ENDINGS,
    }
    (data / "hellaswag").mkdir()
    for name, lines in rows.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return base, tuned, data


@pytest.fixture(scope="module")
def scorer(folders):
    base, _, data = folders
    return Scorer(base, data, batch_tokens=80)  # several batches, with padding


@pytest.fixture(scope="module")
def models(folders):
    return [transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in folders[:2]]


@pytest.fixture(scope="module")
def rows(folders, models):
    """(tokens before the targets, targets) of each row of each task, made here."""
    base = models[0]
    tokenizer, end = transformers.AutoTokenizer.from_pretrained(folders[0]), base.config.eos_token_id
    assert end not in (None, tokenizer.eos_token_id)

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer(text):
        prompt = torch.tensor([encode(prompt_text(text))])
        tokens = base.generate(prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=0)
        return prompt[0].tolist(), tokens[0, prompt.shape[1] :].tolist()

    pairs = [(encode(prompt_text(row["question"])), [*encode(row["answer"]), end]) for row in QUESTIONS]
    stories = [[*encode(text), end] for text in STORIES]
    return {
        "paraphrases": pairs,
        "held_out": pairs[:1],
        "train": pairs[1:],
        "own_answers": [answer(text) for text in PROMPTS],
        "stories": [(tokens[:1], tokens[1:]) for tokens in stories],
        "endings": [
            (encode("the fox: the bird sings"), encode(" the river runs.")),
            (encode("tree: a stone under the"), encode(" old tree")),
        ],
    }


@torch.no_grad()
def log_probs(model, prompt, targets):
    """[targets, vocabulary] in float64."""
    logits = model(torch.tensor([[*prompt, *targets]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("which", [0, 1])
def test_losses_are_those_of_single_rows(which, scorer, folders, models, rows):
    found = scorer.score_base() if which == 0 else scorer.score(folders[1])
    for name, pairs in rows.items():
        mean_targets = sum(len(targets) for _, targets in pairs) / len(pairs)
        assert len(found[name]) == len(pairs)
        for sample, (prompt, targets) in zip(found[name], pairs, strict=True):
            loss = F.nll_loss(log_probs(models[which], prompt, targets), torch.tensor(targets)).item()
            assert sample["tokens"] == len(targets)
            assert sample["nats"] / len(targets) == pytest.approx(loss, abs=1e-6, rel=1e-6)
            assert sample["score"] == sample["nats"] / mean_targets


def test_kl_is_the_sum_over_the_vocabulary(scorer, folders, models, rows):
    found = scorer.score(folders[1])["own_answers_kl"]
    for sample, pair in zip(found, rows["own_answers"], strict=True):
        before, after = (log_probs(model, *pair) for model in models)
        kl = (before.exp() * (before - after)).sum().item()
        assert kl > 0.1
        assert sample["nats"] == pytest.approx(kl, rel=1e-5)


def test_kl_of_the_base_is_zero(scorer):
    assert [sample["nats"] for sample in scorer.score_base()["own_answers_kl"]] == [0, 0, 0]


def test_own_answers_are_those_to_single_prompts(scorer, models, rows):
    answers = [row.tokens[-row.num_targets :] for row in scorer._rows["own_answers"]]
    assert answers == [targets for _, targets in rows["own_answers"]]
    assert answers[0][-1] == models[0].config.eos_token_id  # not the tokenizer's
    assert len(answers[0]) <= 5


def test_sweep_is_scored_once(scorer, folders, tmp_path):
    _, tuned, _ = folders
    statuses = {"done": "finished", "evaluated": "evaluated", "halfway": "running", "removed": "finished"}
    for name, status in statuses.items():
        cell = tmp_path / name
        (cell / "epoch_1").mkdir(parents=True)
        (cell / "cell.json").write_text(json.dumps({"values": {"method": "sft"}, "status": status}))
        files = tuned.glob("*.json") if name == "removed" else tuned.iterdir()
        for file in files:
            (cell / "epoch_1" / file.name).symlink_to(file)
    assert score_sweep(tmp_path, scorer) == 2
    assert not list(tmp_path.glob("halfway/evaluation")) + list(tmp_path.glob("removed/evaluation"))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("losses*")}
    assert score_sweep(tmp_path, scorer) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("losses*")} == written

    path = tmp_path / "done" / "evaluation" / "losses.json"
    result = read_result(path)
    base_file = base_path(path, result)
    assert base_file == tmp_path / "base_losses" / "losses.json"
    base = read_result(base_file)
    assert (base.is_base, result.is_base, base.weights != result.weights) == (True, False, True)
    assert result.tasks.keys() == base.tasks.keys() == TASKS.keys()
    for name, task in result.tasks.items():
        samples, before = read_samples(path.parent, task), read_samples(base_file.parent, base.tasks[name])
        tokens = sum(sample["tokens"] for sample in samples)
        assert (task.role, task.is_higher_better, task.unit) == (TASKS[name][0], False, "nats")
        assert task.score == pytest.approx(sum(sample["nats"] for sample in samples) / tokens)
        assert [one["doc_hash"] for one in samples] == [one["doc_hash"] for one in before]
