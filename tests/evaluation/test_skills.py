"""The skills of a pretrained and a tuned model, against transformers and plain torch in float64 on the same folders."""

import html
import json
import shutil

import pytest
import torch
from helpers.runs import finch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finch.base.errors import UserError
from finch.data.skills import skill_rows
from finch.evaluation import skills
from finch.evaluation.loading import is_one_vocabulary
from finch.evaluation.model_folders import find_base, find_tuned
from finch.evaluation.results import SuiteResult, TaskResult, write_result
from finch.evaluation.skill_changes import Skill, as_json, beyond, compare, table
from finch.evaluation.skills import read_skills
from finch.evaluation.skills_page import write_page

ROWS = [
    *(
        {"skill": "code", "question": f"Who has {word}?", "choices": [word, "a bird", "the sea", "no one"], "answer": word}
        for word in ("a cat", "a dog", "a hat", "a box", "a ball", "the key", "the cake", "the boat", "a tree")
    ),
    {"skill": "talk", "question": "Once upon a time"},
    {"skill": "talk", "messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Who is Tom?"}]},
]  # fmt: skip


@pytest.fixture
def folders(shared_data, tmp_path, monkeypatch):
    """stories260k, and a copy whose weights are a little off."""
    monkeypatch.setattr(skills, "skill_rows", lambda number=None: ROWS[:number])
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    for folder in (base, tuned):
        shutil.copytree(shared_data / "stories260k", folder)
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: each + 0.2 * each.std() * torch.randn(each.shape, generator=generator) for name, each in weights.items()
    }
    save_file(noisy, tuned / "model.safetensors", {"format": "pt"})
    return base, tuned


def measure(base, *tuned, out, by_text=False):
    base_folder = find_base(base)
    options = {"limit": None, "dtype": "fp32", "device": torch.device("cpu"), "trust": False, "by_text": by_text}
    found = [find_tuned(each, base_folder, of_any_size=by_text) for each in tuned]
    return [compare(output) for output in skills.measure(base_folder, found, out=out, **options)]


def log_probs(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)


def test_measures_equal_plain_torch(folders, tmp_path):
    base, tuned = folders
    one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    (found,) = measure(base, tuned, out=tmp_path / "out")
    rows = read_skills(find_base(base), None)
    divergences, right = {"code": [], "talk": []}, {"base": [], "tuned": []}
    for row, prompt, samples in zip(ROWS, rows.prompts, rows.choices, strict=True):
        answer = one.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=2, pad_token_id=0
        )[0].tolist()
        p, q = (log_probs(model, answer)[len(prompt) - 1 :] for model in (one, other))
        divergences[row["skill"]].append((p.exp() * (p - q)).sum(-1).mean().item())
        for name, model in (("base", one), ("tuned", other)) if samples else ():
            scores = []
            for choice, sample in zip(row["choices"], samples, strict=True):
                start = next(index for index, label in enumerate(sample["labels"]) if label != -100)
                assert sample["tokens"][:start] == prompt
                losses = log_probs(model, sample["tokens"]).gather(1, torch.tensor(sample["tokens"][1:])[:, None])[
                    start - 1 :
                ]
                scores.append(losses.sum().item() / len(choice))
            right[name].append(row["choices"][scores.index(max(scores))] == row["answer"])
    by_name = {each.skill: each for each in found}
    for name, values in divergences.items():
        assert by_name[name].kl == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert by_name[name].n == len(values)
    assert by_name["code"].before == pytest.approx(sum(right["base"]) / 9)
    assert by_name["code"].after == pytest.approx(sum(right["tuned"]) / 9)
    assert by_name["talk"].before is None
    assert [each.kl for each in found] == sorted((each.kl for each in found), reverse=True)


def test_a_model_has_not_moved_from_itself_and_results_are_reused(folders, tmp_path, caplog, monkeypatch):
    base, tuned = folders
    shutil.copytree(base, tmp_path / "same")
    (same,) = measure(base, tmp_path / "same", out=tmp_path / "out")
    assert [(each.kl, each.change) for each in same] == [(0, 0), (0, None)]
    loaded = []
    monkeypatch.setattr(
        skills,
        "load_model",
        lambda folder, *rest, load=skills.load_model: loaded.append(folder.path) or load(folder, *rest),
    )
    both = measure(base, tmp_path / "same", tuned, out=tmp_path / "out")
    assert both[0] == same
    assert loaded == [tuned]
    (answers,) = (tmp_path / "out").glob("base-*/skills.answers.safetensors")
    answers.unlink()
    shutil.rmtree(next((tmp_path / "out").glob("tuned-*")))
    assert measure(base, tuned, out=tmp_path / "out") == both[1:]
    assert loaded == [tuned, base, tuned]
    # A run's results lie in its folder, whatever it is compared with.
    run = tmp_path / "run"
    shutil.copytree(tuned, run / "epoch_0")
    (run / "config.yaml").write_text("seed: 0\n")
    moved = [measure(each, run, out=tmp_path / "out")[0][0].kl for each in (base, tuned)]
    assert moved[0] > moved[1] == 0


def test_another_tokenizers_model_is_compared_by_text(folders, tmp_path):
    """Equal weights behind other token numbers: the texts cost the same. A model that is a little off: what plain torch says."""
    base, tuned = folders
    other = shutil.copytree(base, tmp_path / "other")
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    one, two = "\u2581day", "\u2581play"
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(text))
    weights = load_file(other / "model.safetensors")
    rows = [vocabulary[one], vocabulary[two]]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name][rows] = weights[name][rows[::-1]].clone()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert not is_one_vocabulary(find_base(base), [find_tuned(other, find_base(base))])
    same, moved = measure(base, other, tuned, out=tmp_path / "out", by_text=True)
    assert [each.kl for each in same] == pytest.approx([0, 0], abs=1e-5)
    rows = read_skills(find_base(base), None)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    rises = {"code": [], "talk": []}
    for row, prompt in zip(ROWS, rows.prompts, strict=True):
        answer = models[0].generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0)
        text = rows.tokenizer.decode(answer[0, len(prompt) :].tolist())
        tokens = prompt + rows.tokenizer.encode(text)
        before, after = (
            -log_probs(model, tokens).gather(1, torch.tensor(tokens[1:])[:, None])[len(prompt) - 1 :].sum().item()
            for model in models
        )
        rises[row["skill"]].append((after - before) / len(text))
    for each in moved:
        assert each.kl == pytest.approx(sum(rises[each.skill]) / len(rises[each.skill]), abs=1e-5)


def test_answers_that_moved_most_are_kept_and_shown(folders, tmp_path):
    base, tuned = folders
    (found,) = measure(base, tuned, out=tmp_path / "out")
    (output,) = (tmp_path / "out").glob("tuned-*")
    samples = [json.loads(line) for line in (output / "skills.code.jsonl").read_text().splitlines()]
    top = sorted(samples, key=lambda one: -one["score"])[:2]
    code = next(each for each in found if each.skill == "code")
    questions = [ROWS[one["doc_id"]]["question"] for one in top]
    assert {each["prompt"] for each in code.moved} == {*questions}
    rows, model = read_skills(find_base(base), None), AutoModelForCausalLM.from_pretrained(tuned)
    for each in code.moved:
        prompt = rows.prompts[next(i for i, row in enumerate(ROWS) if row.get("question") == each["prompt"])]
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert each["after"] == rows.tokenizer.decode(answer[0, len(prompt) :].tolist()) != each["before"]
    page = write_page(output, "<tuned>", found, by_text=False).read_text()
    assert "What &lt;tuned&gt; forgot" in page
    assert page.count("<blockquote>") == 2 * (2 + 2)
    assert code.moved[0]["after"] in html.unescape(page)


def test_numbers_that_are_not_finite_are_refused(folders, tmp_path):
    base, tuned = folders
    weights = load_file(tuned / "model.safetensors")
    save_file(
        {name: each * float("nan") for name, each in weights.items()}, tuned / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserError, match="has numbers that are not finite"):
        measure(base, tuned, out=tmp_path / "out")


def test_out_that_cannot_be_written_is_named(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(skills, "load_model", lambda *_: pytest.fail("weights were loaded"))
    out = tmp_path / "rows.jsonl/out"
    out.parent.touch()
    with pytest.raises(UserError, match=rf"--out={out} cannot be written \(Not a directory\); give another folder"):
        measure(*folders, out=out)


FOUND = [
    Skill("code", 0.5, 0.4, 0.6, 32, 0.75, 0.5, -0.25, -0.4, -0.1, 32, 0.01),
    Skill("reading", 0.2, 0.05, 0.4, 32, 0.5, 0.53, 0.03, -0.1, 0.2, 32),
    Skill("languages", 0.1, 0.08, 0.12, 20, 0.5, 0.5, 0.0, None, None, 20),
    Skill("talk", 0.1, 0.05, 0.2, 20),
]


def test_command_prints_tables_or_json_and_is_a_gate(folders, tmp_path, capsys, monkeypatch):
    base, tuned = folders
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)  # as where the tests' settings are not
    given = ("evaluate", "--base", str(base), "--tuned", str(tuned), "--out", str(tmp_path / "out"))
    code, out, err = finch(capsys, *given)
    assert code == 0, err
    assert "Loading weights" not in err
    lines = [line.split() for line in out.splitlines()]
    assert lines[1:3] == [
        ["tuned"],
        [
            "skill",
            "KL,",
            "nats",
            "per",
            "token",
            "[95%]",
            "n",
            "right",
            "before",
            "after",
            "change,",
            "points",
            "[95%]",
            "n",
        ],
    ]
    assert sorted(line[0] for line in lines[3:5]) == ["code", "talk"]
    assert out.splitlines()[5].startswith("Caution: fewer than 100 documents, so rough intervals: ")
    assert out.splitlines()[6].endswith("skills.html")
    code, out, err = finch(capsys, *given, "--json", "--max-kl", "0.001", "--max-drop", "100")
    (model,) = json.loads(out)
    assert code == 3
    assert err.splitlines()[-1].startswith("tuned: ")
    assert "is above --max-kl=0.001" in err
    kl = {each["skill"]: each["kl"] for each in model["skills"]}
    assert kl.keys() == {"code", "talk"}
    assert min(kl.values()) > 0.001
    for options, problem in (
        (("--suite", "forgetting", "--json"), "--json is for skills; leave out --suite and --tasks, or --json"),
        (("--max-drop", "-1"), "--max-drop=-1.0 must be at least 0"),
        (("--limit", "7"), "--limit=7 must be at least 8"),
        (("--nproc_per_node", "2"), "--nproc_per_node=2 is for suites; skills are measured by one process"),
        (("--batch-size", "4"), "--batch-size=4 is for suites; give --suite or --tasks, or leave it out"),
    ):
        code, _, err = finch(capsys, *given, *options)
        assert (code, problem in err) == (1, True), err
    code, _, err = finch(capsys, *given[:3])
    assert (code, "--tuned is missing; give the model to compare with --base" in err) == (1, True), err


def test_table_says_what_is_shown():
    _, code, reading, languages, talk = table(FOUND)
    assert code == ["code", "0.500 [0.400, 0.600]", "32", "75.0", "50.0", "-25.0 [-40.0, -10.0]", "32"]
    assert reading[5] == "+3.0 [-10.0, +20.0] no change can be shown (exact test: p = 1.00)"
    assert languages[5] == "no row changed"
    assert talk[3:] == ["-", "", "", ""]


def test_gates_look_at_whole_intervals():
    assert beyond(FOUND, None, None) == []
    assert beyond(FOUND, 0.1, None) == ["code: KL 0.500 [0.400, 0.600] is above --max-kl=0.1"]
    assert beyond(FOUND, None, 3) == ["code: accuracy fell by 25.0 points [10.0, 40.0], more than --max-drop=3"]
    assert beyond(FOUND, None, 12) == []


def test_a_skill_that_all_rows_lost_is_beyond(tmp_path):
    """Their paired differences are equal, which gives no interval by resampling; 3 of 8 may be chance."""
    for folder, num_right in (("base", 8), ("lost", 0), ("kept", 8), ("few", 5)):
        samples = [{"doc_id": n, "doc_hash": "", "score": 0.1 * n, "right": float(n < num_right)} for n in range(8)]
        task = TaskResult("old", "kl", "", 0.35, 8, "skills.math.jsonl", others={"accuracy": num_right / 8})
        base = None if folder == "base" else "../base/skills.json"
        result = SuiteResult("skills", folder, "", base is None, base, {}, {}, {"math": task})
        write_result(tmp_path / folder, result, {"math": samples})
    [lost], [kept], [few] = (compare(tmp_path / folder) for folder in ("lost", "kept", "few"))
    assert few.change_high < -0.1
    assert few.p_value == 0.25
    assert beyond([few], None, 5) == []
    assert table([few])[1][5].endswith("no change can be shown (exact test: p = 0.25)")
    assert beyond([lost], None, 5) == ["math: accuracy fell by 100.0 points [100.0, 100.0], more than --max-drop=5"]
    assert [table([each])[1][5] for each in (lost, kept)] == ["-100.0 [-100.0, -100.0]", "no row changed"]


def test_rows_are_finchs_own(shared_data):
    rows = read_skills(find_base(shared_data / "stories260k"), 3)
    assert len(rows.rows) == len(rows.prompts) == 3 * len(rows.skills) == 36
    assert len(skill_rows()) > 36


def test_json_has_the_models_labels():
    (model,) = as_json(["x"], [FOUND])
    assert (model["model"], model["measure"]) == ("x", "KL, nats per token")
    assert as_json(["x"], [FOUND], by_text=True)[0]["measure"] == "rise of the loss, nats per character"
    assert json.loads(json.dumps(model))["skills"][0]["change_high"] == -0.1
