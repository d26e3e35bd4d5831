"""Probes in the recipes: what they measure equals transformers, and the training does not notice them."""

import textwrap

import pytest
import scipy.stats
import torch
from helpers.evaluation import read_lines
from helpers.rows import write_lines
from helpers.runs import LORA, LORA_MODEL, assert_same_weights, finished, make_config, run_broken
from sentencepiece import SentencePieceProcessor
from torchtune.datasets import instruct_dataset
from torchtune.models.llama2 import llama2_tokenizer
from transformers import AutoModelForCausalLM

from finch.base import run_files
from finch.data.skills import skill_rows
from finch.objectives.divergence import scale

NAMES = ("texts", "facts", "choices", "own", "grouped")
GROUPS = {"a": slice(0, 9), "b_c": slice(9, 13)}


@pytest.fixture(scope="module")
def probe_rows(rows_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes")
    rows = read_lines(rows_file)
    answers = [row["answer"] for row in rows]
    choices = [
        {
            "ctx": rows[index]["question"],
            "endings": answers[index : index + 3],
            "label": str(index % 3),
            "topic": index < 4,
        }
        for index in range(11)
    ]
    grouped = [{"prompt": row["question"], "skill": "a" if index < 9 else "b/c"} for index, row in enumerate(rows[:13])]
    write_lines(folder / "texts.jsonl", *({"text": f"{row['question']} {row['answer']}"} for row in rows[:9]))
    write_lines(folder / "choices.jsonl", *choices)
    write_lines(folder / "grouped.jsonl", *grouped)
    return folder


@pytest.fixture(scope="module")
def config(base_folder, rows_file, probe_rows, tmp_path_factory):
    """6 steps per epoch; the probes every 4 steps and at the ends of epochs."""
    changes = {"batch_size": 8, "epochs": 2, "checkpoint": {"every_n_steps": 2, "async": False, "keep_last": 9}}
    config = make_config(base_folder, rows_file, tmp_path_factory.mktemp("config") / "run", **changes)
    config["probes_every_n_steps"] = 4
    config["probes"] = {
        "texts": {"data_files": str(probe_rows / "texts.jsonl")},
        "facts": {"data_files": str(rows_file), "split": "train[:7]", "kind": "question_answer"},
        "choices": {"data_files": str(probe_rows / "choices.jsonl"), "task": True, "group_by": "topic"},
        "own": {"data_files": str(rows_file), "kind": "self", "rows": 5, "max_new_tokens": 6},
        "grouped": {"data_files": str(probe_rows / "grouped.jsonl"), "kind": "self", "max_new_tokens": 6},
    }
    return config


def probed(run):
    """Evaluations by their step, without their time."""
    lines = [line for line in run.lines() if "probe_seconds" in line]
    return {line["step"]: {key: value for key, value in line.items() if key != "probe_seconds"} for line in lines}


@pytest.fixture(scope="module")
def straight(config, trained):
    return trained(config)


def test_probes_are_evaluated_at_their_steps(straight):
    lines = probed(straight)
    assert list(lines) == [0, 4, 6, 8, 12]
    values = {"probe/choices/accuracy", "probe/own/kl", "probe/grouped/kl", *(f"probe/{name}/loss" for name in NAMES)}
    values |= {f"probe/choices/{metric}/{group}" for metric in ("loss", "accuracy") for group in ("True", "False")}
    # Of groups of fewer than 8 rows there is no interval.
    values |= {f"probe/grouped/{key}" for key in ("kl_low", "kl_high", "kl/a", "kl_low/a", "kl_high/a", "kl/b_c")}
    assert lines[0].keys() == {"step", "epoch", *values}
    for step in (4, 12):
        assert lines[step]["epoch"] == (0 if step == 4 else 1)
        for key in ("texts/loss", "facts/loss", "own/loss", "choices/accuracy"):
            change = lines[step][f"probe/{key}"] - lines[0][f"probe/{key}"]
            assert lines[step][f"probe/{key}_change"] == pytest.approx(change, abs=1e-12)
    assert "probes took" in straight.output
    assert f"probe/own/kl: {lines[12]['probe/own/kl']:+.4f} at step 12" in straight.output


def test_training_does_not_notice_probes(config, straight, trained):
    plain = trained({key: value for key, value in config.items() if not key.startswith("probes")})
    names = ("step", "loss", "ema_loss", "lr", "grad_norm", "num_target_tokens")
    assert straight.columns(*names) == plain.columns(*names)
    for name in ("epoch_0", "epoch_1"):
        assert_same_weights(straight.folder / name, plain.folder / name)


def token_losses(model, tokens, start):
    """[targets] the losses of the tokens from ``start`` on, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1].double()
    return -logits.log_softmax(-1).gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]


@pytest.mark.parametrize(("step", "folder"), [(0, None), (6, "epoch_0"), (12, "epoch_1")])
def test_probes_equal_transformers_on_the_exported_folder(step, folder, straight, config, base_folder, probe_rows):
    model = AutoModelForCausalLM.from_pretrained(base_folder if folder is None else straight.folder / folder)
    line, pieces = probed(straight)[step], SentencePieceProcessor(str(base_folder / "tokenizer.model"))
    texts = read_lines(probe_rows / "texts.jsonl")
    losses = [token_losses(model, [1, *pieces.encode(row["text"]), 2], 1) for row in texts]
    assert line["probe/texts/loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)

    data = instruct_dataset(
        llama2_tokenizer(str(base_folder / "tokenizer.model"), max_seq_len=64, prompt_template=None),
        source="json",
        data_files=config["probes"]["facts"]["data_files"],
        column_map={"input": "question", "output": "answer"},
        split="train[:7]",
    )
    losses = [token_losses(model, row["tokens"], sum(label == -100 for label in row["labels"])) for row in data]
    assert line["probe/facts/loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)

    right, losses = [], []
    rows = read_lines(probe_rows / "choices.jsonl")
    for row in rows:
        start = len(pieces.encode(row["ctx"])) + 1
        found = [token_losses(model, [1, *pieces.encode(f"{row['ctx']} {ending}")], start) for ending in row["endings"]]
        scores = [-loss.sum().item() / len(ending) for loss, ending in zip(found, row["endings"], strict=True)]
        right.append(scores.index(max(scores)) == int(row["label"]))
        losses.append(found[int(row["label"])])
    assert line["probe/choices/accuracy"] == pytest.approx(sum(right) / 11)
    assert line["probe/choices/accuracy/True"] == pytest.approx(sum(right[:4]) / 4)
    assert 0 < sum(right) < 11
    assert line["probe/choices/loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    assert line["probe/choices/loss/False"] == pytest.approx(torch.cat(losses[4:]).mean().item(), abs=1e-5)


@pytest.mark.parametrize(("step", "folder"), [(0, None), (12, "epoch_1")])
def test_own_answers_equal_transformers_generate(step, folder, straight, rows_file, base_folder):
    """Answers, their loss and the KL over the full vocabulary, which has fewer tokens than top_k."""
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    tuned = base if folder is None else AutoModelForCausalLM.from_pretrained(straight.folder / folder)
    tokenizer = llama2_tokenizer(str(base_folder / "tokenizer.model"), prompt_template=None)
    losses, divergences = [], []
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    for row in read_lines(rows_file)[:13]:
        prompt = tokenizer.encode(row["question"], add_eos=False)
        tokens = base.generate(torch.tensor([prompt]), **greedy)[0]
        with torch.no_grad():
            log_p0, log_p = (
                model(tokens[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for model in (base, tuned)
            )
        losses.append(-log_p.gather(1, tokens[len(prompt) :, None])[:, 0])
        divergences.append((log_p0.exp() * (log_p0 - log_p)).sum(-1))
    line = probed(straight)[step]
    assert line["probe/own/loss"] == pytest.approx(torch.cat(losses[:5]).mean().item(), abs=1e-5)
    assert line["probe/own/kl"] == pytest.approx(torch.cat(divergences[:5]).mean().item(), abs=1e-5)
    assert (line["probe/own/kl"] == 0) == (step == 0)
    for group, part in GROUPS.items():
        assert line[f"probe/grouped/kl/{group}"] == pytest.approx(torch.cat(divergences[part]).mean().item(), abs=1e-5)
    if step > 0:
        pairs = [(each.sum().item(), len(each)) for each in divergences[GROUPS["a"]]]
        interval = scipy.stats.bootstrap(
            tuple(zip(*pairs, strict=True)),
            lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
            paired=True,
            method="percentile",
        ).confidence_interval
        for end, expected in zip(("low", "high"), interval, strict=True):
            assert line[f"probe/grouped/kl_{end}/a"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("ranks", [None, 2])
def test_last_lines_have_both_models_answers(ranks, config, base_folder, tmp_path):
    probes = {"own": {"kind": "self", "rows": 24, "max_new_tokens": 6}}
    run = finished(tmp_path, {**config, "epochs": 1, "batch_size": 4, "probes": probes}, ranks=ranks)
    tokenizer = llama2_tokenizer(str(base_folder / "tokenizer.model"), prompt_template=None)
    greedy: dict = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    for skill in ("knowledge", "mathematics", "instructions"):
        question = next(row["question"] for row in skill_rows() if row["skill"] == skill)
        prompt = torch.tensor([tokenizer.encode(question, add_eos=False)])
        greedy["attention_mask"] = torch.ones_like(prompt)  # its unknown characters are the padding's token
        answers = []
        for folder in (base_folder, run.folder / "epoch_0"):
            tokens = AutoModelForCausalLM.from_pretrained(folder).generate(prompt, **greedy)[0, prompt.shape[1] :]
            answers.append(
                textwrap.shorten(
                    tokenizer.decode([t for t in tokens.tolist() if t != 2 and t < tokenizer.vocab_size]),
                    70,
                    placeholder=" ...",
                )
            )
        assert f'{question} Pretrained: "{answers[0]}" Tuned: "{answers[1]}"' in run.output
    assert f"{scale(probed(run)[list(probed(run))[-1]]['probe/own/kl'])}\n" in run.output


def test_kl_starts_at_zero_in_mixed_precision(config, tmp_path):
    """FSDP2 would round its root's inputs to bf16, the pretrained model's log-probabilities among them."""
    run = finished(tmp_path, {**config, "epochs": 1, "probes": {"own": config["probes"]["own"]}}, "dtype=bf16_mixed")
    assert probed(run)[0]["probe/own/kl"] == 0
    assert probed(run)[6]["probe/own/kl"] > 1e-3


@pytest.mark.parametrize("step", [4, 7])
def test_resumed_run_has_the_same_curves(step, config, straight, tmp_path, monkeypatch):
    """Killed right after an evaluation, and in the second epoch between two; the steps since the last checkpoint are done again."""
    run_broken(tmp_path, {**config, "output_dir": str(tmp_path / "run")}, monkeypatch, step)
    resumed = finished(tmp_path, config, "resume_from_checkpoint=True")
    assert "answers are read from" in resumed.output
    assert probed(resumed) == probed(straight)
    assert resumed.column("loss") == straight.column("loss")


def test_longer_answers_of_a_resumed_run_have_a_start_of_their_own(config, tmp_path, monkeypatch):
    run = {**config, "output_dir": str(tmp_path / "run"), "probes": {"own": config["probes"]["own"]}}
    run_broken(tmp_path, run, monkeypatch, 4)
    longer = {**run, "probes": {"own": {**run["probes"]["own"], "max_new_tokens": 9}}}
    last = probed(finished(tmp_path, longer, "resume_from_checkpoint=True"))[12]
    fresh = probed(finished(tmp_path / "fresh", {**longer, "epochs": 1}))[0]
    assert last["probe/own/loss"] - last["probe/own/loss_change"] == pytest.approx(fresh["probe/own/loss"], rel=1e-6)


def test_probe_added_to_a_resumed_run_starts_at_the_pretrained_model(config, straight, tmp_path, monkeypatch):
    run = {**config, "output_dir": str(tmp_path / "run"), "probes": {"own": config["probes"]["own"]}}
    run_broken(tmp_path, run, monkeypatch, 4)
    (tmp_path / "run" / "own_answers_own.safetensors").unlink()
    resumed = finished(tmp_path, config, "resume_from_checkpoint=True")
    assert probed(resumed)[12] == probed(straight)[12]


def test_probes_on_two_ranks_equal_one(config, straight, tmp_path):
    """5 prompts and 9 texts: one rank has an empty row."""
    run = finished(tmp_path, {**config, "batch_size": 4}, ranks=2)
    assert list(probed(run)) == list(probed(straight))
    for step, line in probed(run).items():
        assert line == pytest.approx(probed(straight)[step], rel=1e-6, abs=1e-6)


def test_selection_and_named_validation_sets(config, rows_file, tmp_path):
    near, far = ({**config["dataset"], "split": split} for split in ("train[:7]", "train[30:]"))
    sets = {"near": near, "far": far}
    run = finished(tmp_path, {**config, "dataset_validation": sets}, "select_by=probe/facts/loss", "~probes.own")
    lines = [line for line in run.lines() if "validation/near/loss" in line]
    assert [line["step"] for line in lines] == [0, 6, 12]
    assert all("validation/far/loss" in line and "validation_loss" not in line for line in lines)
    facts = {epoch: probed(run)[step]["probe/facts/loss"] for epoch, step in enumerate((6, 12))}
    best = min(facts, key=facts.get)
    assert (run.folder / "best").readlink().name == f"epoch_{best}"
    assert f"best epoch: {best + 1} of 2, probe/facts/loss {facts[best]:.4f} nats" in run.output


def test_dft_selects_by_the_task_probe(config, tmp_path):
    run = finished(tmp_path, {**config, "epochs": 1}, "method=finch+dft", "~probes.own")
    assert "best epoch: 1 of 1, probe/choices/accuracy 0." in run.output


def test_probes_of_adapters_start_at_the_base(config, straight, tmp_path, monkeypatch):
    """The adapters begin as the base model, and a resumed run continues with its values at step 0."""
    config = {**config, "model": LORA_MODEL, "output_dir": str(tmp_path / "run")}
    config["forgetting_budget"] = {"probe": "own", "max_increase": 99}
    rates = ("optimizer.lr=2e-2", "lr_scheduler.eta_max=5e-2")
    run_broken(tmp_path, config, monkeypatch, 5, *rates, recipe=LORA)
    assert (tmp_path / "run" / "within_budget").readlink().name == "within_budget_step_4"
    assert (tmp_path / "run" / "within_budget_step_4_adapter").is_dir()
    run = finished(tmp_path, config, *rates, "resume_from_checkpoint=True", recipe=LORA)
    lines = probed(run)
    assert lines[0] == pytest.approx(probed(straight)[0], abs=1e-6)
    assert lines[12]["probe/own/kl"] > 1e-3
    assert not list(run.folder.glob("within_budget_step*"))
    assert (run.folder / "within_budget").readlink().name == "epoch_1"


def budget_between(run, inside, outside, **settings):
    """A limit of the divergence that a run without budget is beyond at the second step and not at the first; and the budget."""
    low, high = (probed(run)[step]["probe/own/kl"] for step in (inside, outside))
    assert low < high
    limit = (low + high) / 2
    return limit, {"probe": "own", "metric": "kl", "max_increase": limit, **settings}


def test_budget_of_one_group(config, straight, tmp_path):
    values = [line["probe/grouped/kl/b_c"] for line in probed(straight).values()]
    budget = {"probe": "grouped", "metric": "kl/b_c", "max_increase": values[1] / 2, "action": "stop"}
    light = ("select_by=probe/grouped/kl/a", "save_best_only=True")
    run = finished(tmp_path, {**config, "forgetting_budget": budget}, *light)
    assert "to continue" not in run.output  # nothing is left to go on from
    assert list(probed(run)) == [0, 4]
    assert f"probe/grouped/kl/b_c {values[1]:+.4f} at step 4 is outside" in run.output


def test_budget_stops_the_run(config, straight, tmp_path):
    """Outside at step 8; the last model inside is that of step 6, the end of the first epoch."""
    limit, budget = budget_between(straight, 6, 8, action="stop")
    run = finished(tmp_path, {**config, "forgetting_budget": budget})
    assert list(probed(run)) == [0, 4, 6, 8]
    assert (run.folder / "within_budget").readlink().name == "epoch_0"
    assert not list(run.folder.glob("within_budget_step_*"))
    assert f"at step 8 is outside {limit:g}; {run.folder}/within_budget is epoch_0" in run.output
    assert "the last model inside forgetting_budget, which has ended the run" in run.output
    assert run_files.chosen_model(run.folder) == run.folder / "within_budget"
    again = finished(tmp_path, {**config, "forgetting_budget": budget}, "resume_from_checkpoint=True")
    assert "was stopped by forgetting_budget; raise max_increase to continue" in again.output
    assert list(probed(again)) == [0, 4, 6, 8]
    assert run_files.chosen_model(run.folder) == run.folder / "within_budget"
    budget["max_increase"] = 99
    more = finished(tmp_path, {**config, "forgetting_budget": budget}, "resume_from_checkpoint=True")
    assert probed(more) == probed(straight)
    assert (run.folder / "within_budget").readlink().name == "epoch_1"
    assert run_files.chosen_model(run.folder).name != "within_budget"


def test_another_budget_forgets_what_was_inside(config, straight, tmp_path):
    """A resumed run judges no old value by a new limit, and keeps no model that was inside another probe's."""
    _, budget = budget_between(straight, 4, 6)
    run_of = {**config, "forgetting_budget": budget, "epochs": 1}
    run = finished(tmp_path, run_of)
    assert (run.folder / "within_budget").is_symlink()
    other = {"probe": "grouped", "metric": "kl/b_c", "max_increase": 1e-9}
    more = finished(tmp_path, {**run_of, "forgetting_budget": other, "epochs": 2}, "resume_from_checkpoint=True")
    assert not (run.folder / "within_budget").is_symlink()
    assert "is outside 1e-09; no evaluation was inside" in more.output


@pytest.mark.parametrize("save", ["evaluations", "epochs"])
def test_budget_with_the_last_epoch_only(save, config, straight, tmp_path):
    """An epoch inside that has no folder is exported; one that is outside and ends the run has its folder and state."""
    _, budget = budget_between(straight, 6, 8, action="stop", save=save)
    config = {**config, "save_last_epoch_only": True, "forgetting_budget": budget}
    run = finished(tmp_path, config)
    assert [path.name for path in run.folder.glob("epoch_*")] == ["epoch_1"]  # where it stopped
    assert (run.folder / "within_budget").readlink().name == "within_budget_step_6"
    assert_same_weights(run.folder / "within_budget", straight.folder / "epoch_0")
    assert f"{run.folder}/within_budget is within_budget_step_6" in run.output
    changes = ("forgetting_budget.max_increase=99", "forgetting_budget.action=note", "resume_from_checkpoint=True")
    more = finished(tmp_path, config, *changes)
    assert (more.folder / "within_budget").readlink().name == "epoch_1"
    assert [path.name for path in more.folder.glob("*_[0-9]*")] == ["epoch_1"]
    if save == "epochs":
        budget["max_increase"] = probed(straight)[6]["probe/own/kl"] / 2
        stopped = finished(tmp_path, config, "overwrite=True", "probes_every_n_steps=99", "checkpoint.every_n_steps=99")
        assert list(probed(stopped)) == [0, 6]
        assert [path.name for path in stopped.folder.glob("*_[0-9]*")] == ["epoch_0"]
        assert [path.name for path in (stopped.folder / "checkpoints").iterdir()] == ["step_6"]


def test_budget_exports_between_epoch_ends(config, straight, tmp_path):
    limit, budget = budget_between(straight, 4, 6)
    assert limit < min(line["probe/own/kl"] for step, line in probed(straight).items() if step > 6)
    run = finished(tmp_path, {**config, "forgetting_budget": budget})
    assert probed(run) == probed(straight)  # action: note
    assert (run.folder / "within_budget").readlink().name == "within_budget_step_4"
    short = finished(tmp_path / "short", {**config, "epochs": 1, "max_steps_per_epoch": 4})
    assert_same_weights(run.folder / "within_budget", short.folder / "epoch_0")
