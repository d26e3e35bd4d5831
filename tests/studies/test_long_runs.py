"""The grids of studies/long_runs, its ratios on fronts that are known lines, and its measure of each step against plain torch."""

import csv
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.grids import arm
from torch.nn import functional as F

from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.study.sweep.grid import cells_of, read_grid
from studies.long_runs.analyse import analyse
from studies.long_runs.check import check
from studies.long_runs.run import write_decayed
from studies.long_runs.step_sizes import StepSizes

STUDY = Path("studies/long_runs")
CELLS = {
    "GRID_300.yaml": {"finch": 12, "sft": 18, "constant": 12, "constant_mean": 12, "finch_cap": 9},
    "GRID_1125.yaml": {"finch": 6, "sft": 9, "constant": 6, "constant_mean": 6, "cosine_cold": 9},
    "GRID_decay.yaml": {"finch_decay": 6, "constant_decay": 6},
    "GRID_rounding.yaml": {"finch": 4, "sft": 4, "constant": 4},
    "GRID_steps.yaml": {"finch": 1, "constant_mean": 1},
    "GRID_smollm2.yaml": {"finch": 2, "constant_mean": 2},
}


def test_every_grid_is_listed():
    assert {path.name for path in STUDY.glob("GRID*.yaml")} == set(CELLS)


@pytest.mark.parametrize("name", CELLS)
def test_cells_are_the_protocols(name, tmp_path):
    grid = read_grid(str(STUDY / name), [f"model_dir={tmp_path}", f"data={tmp_path}"], str(tmp_path))
    cells = {cell.folder: cell for cell in cells_of(grid)}
    assert Counter(map(arm, cells.values())) == CELLS[name]
    for cell in cells.values():
        if arm(cell) == "constant_mean":  # of the FINCH of its seed
            source = cells[cell.source].values
            assert (arm(cells[cell.source]), cell.values["lr_scheduler.shape"]) == ("finch", "mean")
            assert all(source[key] == cell.values[key] for key in ("optimizer.lr", "seed"))
    for cell in {arm(cell): cell for cell in cells.values()}.values():
        cfg = read(["--config", grid.config, *grid.overrides, *cell.overrides()], FullFinetuneKeys)
        assert cfg.dataset.data_files.startswith(f"{tmp_path}/train_3")
        assert (cfg.lr_scheduler is None) == (arm(cell) == "constant")
        assert cfg.epochs == (5 if name in ("GRID_1125.yaml", "GRID_decay.yaml") else 1)


def test_early_constants_are_finchs_first_rates():
    cells = cells_of(read_grid(str(STUDY / "GRID_300.yaml")))
    rates = {
        name: sorted({c.values["optimizer.lr"] for c in cells if arm(c) == name}) for name in ("finch", "constant")
    }
    assert rates["constant"] == pytest.approx([rate / 4.458**0.5 for rate in rates["finch"]], rel=1e-3)


def test_decayed_logs_follow_a_finch_and_its_mean_down_to_zero(tmp_path):
    for method in ("finch", "sft"):
        (cell := tmp_path / "runs" / method).mkdir(parents=True)
        (cell / "cell.json").write_text(json.dumps({"values": {"method": method, "optimizer.lr": 0.5, "seed": 2}}))
        (cell / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": k, "lr": float(k)}) + "\n" for k in range(1, 7))
        )
    write_decayed(tmp_path / "runs", tmp_path / "logs")
    found = {
        path.name: [line["lr"] for line in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / "logs").iterdir()
    }
    assert found == {
        "finch_0.5_2.jsonl": pytest.approx([1, 2, 3, 4, 5, 3]),
        "mean_0.5_2.jsonl": pytest.approx([3.5, 3.5, 3.5, 3.5, 3.5, 1.75]),
    }


def test_step_sizes_are_those_of_plain_torch(tmp_path):
    torch.manual_seed(0)
    (tmp_path / "stories.jsonl").write_text('{"text": "abcd"}\n{"text": "dcbab"}\n{"text": "unused"}\n')
    model = torch.nn.Sequential(torch.nn.Embedding(8, 6), torch.nn.Linear(6, 8))
    tokens = torch.tensor([[1, 2, 3], [4, 3, 2]])
    hook = StepSizes(str(tmp_path / "stories.jsonl"), rows=2, max_tokens=3)
    tokenizer = SimpleNamespace(encode=lambda text: [ord(letter) - ord("a") + 1 for letter in text])
    hook.start(SimpleNamespace(decoder=model, tokenizer=tokenizer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        hook.before_step(None)
        before = [weight.detach().clone() for weight in model.parameters()]
        p = F.softmax(model(tokens), dim=-1).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), torch.zeros(6, dtype=torch.int64)).backward()
        optimizer.step()
        q = F.softmax(model(tokens), dim=-1).detach()
        found = hook.after_step(None)
        squares = sum(
            (one - other.detach()).square().sum() for one, other in zip(before, model.parameters(), strict=True)
        )
        assert found["update_norm"] == pytest.approx(float(squares.sqrt()), rel=1e-5)
        assert found["step_kl"] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3)


def make_run(sweep, arm, rate, seed, loss, kl):
    cell = sweep / f"{arm}_{rate}_{seed}"
    cell.mkdir(parents=True)
    values = {"method": "sft", "label": arm, "optimizer.lr": rate, "seed": seed}
    (cell / "cell.json").write_text(json.dumps({"values": values, "task": None, "source": None, "status": "finished"}))

    def probes(loss, kl):
        learned = {"probe/train/loss": loss, "probe/paraphrases/loss": loss, "probe/paraphrases/accuracy": 0.5}
        return {**learned, "probe/own/kl": kl, "probe/stories/loss": 1 + kl}

    step = {"step": 1, "loss": loss, "num_target_tokens": 9, "lr": rate, "update_norm": 0.1, "step_kl": 0.01}
    lines = [{"step": 0, **probes(4.0, 0.0)}, step, {"step": 1, **probes(loss, kl)}]
    (cell / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """KL is 4 minus the loss with a cosine, half of it with FINCH: ten percent more for one seed of both, less for the other."""
    folder = tmp_path_factory.mktemp("long_runs")
    for seed, factor in ((0, 1.1), (1, 0.9)):
        for number, loss in enumerate((3.0, 2.0, 1.0)):
            for method, share in (("sft", 1.0), ("finch", 0.5)):
                make_run(folder / "300", method, 1e-3 * 2**number, seed, loss, factor * share * (4 - loss))
    make_run(folder / "300", "sft", 1e-3, 2, 3.0, 9.0)  # a seed that is not complete
    make_run(folder / "steps", "finch", 1e-3, 0, 1.0, 1.0)
    analyse(folder, folder / "results")
    return folder / "results"


def test_ratios_of_known_lines(results):
    lines = list(csv.DictReader((results / "comparisons.csv").open()))
    assert [(line["one"], line["other"], line["learned"], line["forgotten"]) for line in lines] == [
        ("finch", "sft", learned, forgotten)
        for learned in ("train", "paraphrases")
        for forgotten in ("own_kl", "stories")
    ]
    for line in lines:
        assert [float(line[key]) for key in ("lowest_score", "highest_score")] == [1.0, 3.0]
        assert [float(line[key]) for key in ("ratio", "smallest", "largest")] == pytest.approx([0.5] * 3)
        assert line["seeds"] == "2"
    assert len(list(csv.DictReader((results / "points.csv").open()))) == 14
    assert [row["step_kl"] for row in csv.DictReader((results / "steps.csv").open())] == ["0.01"]
    for name in ("fronts", "steps"):
        assert (results / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_check_finds_a_number_that_is_wrong(results, tmp_path):
    assert check(results) == 4
    for name in ("points.csv", "comparisons.csv"):
        text = (results / name).read_text()
        (tmp_path / name).write_text(text.replace(",0.5,0.5\n", ",0.5,0.51\n") if name == "comparisons.csv" else text)
    with pytest.raises(SystemExit, match=r"largest is 0\.51, found 0\.5"):
        check(tmp_path)


def test_committed_comparisons_are_those_of_the_committed_points():
    assert check(STUDY / "results") == len((STUDY / "results/comparisons.csv").read_text().splitlines()) - 1
