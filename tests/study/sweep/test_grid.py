"""Grids: what is read, which cells they have, and which line a mistake gets."""

import pytest
import yaml

from finch.base.errors import UserError
from finch.study.sweep.grid import WAITING, cells_of, read_cell, read_grid, write_cell

BASE = {"config": "qwen3/4B_sft", "out": "/out/mine"}


REPLAY = {"method": ["lr_replay"], "lr_scheduler.log": [{"cell": {"method": "finch"}}]}


@pytest.fixture
def read(tmp_path):
    def read_content(*overrides, **content):
        file = tmp_path / "grid.yaml"
        file.write_text(yaml.safe_dump({**BASE, **content}, sort_keys=False))
        return read_grid(str(file), overrides)

    return read_content


@pytest.fixture
def cells(read):
    """The cells of a grid's mappings, by name."""
    return lambda *mappings, **content: {cell.name: cell for cell in cells_of(read(grid=list(mappings), **content))}


def test_cells_are_the_product_of_the_values(cells):
    found = cells({"method": ["finch", "sft"], "optimizer.lr": [2e-5, 1e-4], "seed": [0, 1]})
    assert list(found)[:3] == ["finch_lr2e-5_seed0", "finch_lr2e-5_seed1", "finch_lr0.0001_seed0"]
    assert len(found) == 8
    cell = found["finch_lr2e-5_seed1"]
    assert cell.values == {"method": "finch", "optimizer.lr": 2e-5, "seed": 1}
    assert " ".join(cell.overrides()) == f"method=finch optimizer.lr=2e-05 seed=1 output_dir=/out/mine/{cell.name}"


def test_cells_of_several_mappings_are_their_union(cells):
    found = cells(
        {"method": ["sft", "finch"], "optimizer.lr": [1e-5]},
        {"method": ["finch"], "optimizer.lr": [1e-5, 2e-5]},
        {"method": ["lora"], "optimizer.lr": [2e-4]},
    )
    assert list(found) == ["sft_lr1e-5", "finch_lr1e-5", "finch_lr2e-5", "lora_lr0.0002"]


def test_names_are_unique_and_free_of_special_characters(cells):
    found = cells(
        {"loss._component_": ["finch.objectives.DFT"], "batch_size": [4]},
        {"method": ["finch+talr"], "dataset.source": ["some where/else, = 1"]},
        {"probes.a.weight": [1], "dataset.weight": [2]},
        {"probes.a.weight": [2], "dataset.weight": [1]},
    )
    assert list(found) == ["loss-DFT_batch_size4", "finch+talr_source-else-1", "weight1_weight2", "weight2_weight1"]


def test_wise_ft_needs_its_sft_run_which_is_added(cells):
    wise = {"method": ["wise_ft"], "seed": [0, 1], "alpha": [0.3, 0.7]}
    found = cells(wise, {"method": ["sft", "finch+wise_ft"], "seed": [0]})
    assert list(found)[:3] == ["sft_seed0", "sft_seed1", "finch_seed0"]  # what others wait for comes first
    cell = found["wise_ft_seed1_alpha0.3"]
    assert (cell.kind, cell.source) == ("wise_ft", found["sft_seed1"].folder)
    assert found["finch+wise_ft_seed0"].source == found["finch_seed0"].folder
    assert len(found) == 8


def test_lr_replay_needs_the_cell_described(cells):
    log = [{"cell": {"method": "finch", "seed": 1}}]
    of_one = {**REPLAY, "lr_scheduler.log": log, "lr_scheduler.shape": ["curve", "mean"], "seed": [0]}
    found = cells({**REPLAY, "seed": [0, 1]}, of_one, {"method": ["finch"], "seed": [0, 1]})
    assert list(found)[:2] == ["finch_seed0", "finch_seed1"]
    assert found["lr_replay_log-finch_seed1"].source == found["finch_seed1"].folder
    for shape in ("curve", "mean"):
        other = found[f"lr_replay_log-finch-seed1_shape-{shape}_seed0"]
        assert other.source == found["finch_seed1"].folder
        assert {"lr_scheduler.log=/out/mine/finch_seed1", f"lr_scheduler.shape={shape}"} < set(other.overrides())


CONSTANT = {"label": "constant", "method": ["sft"], "lr_scheduler": [None], "optimizer.lr": [5e-5], "seed": [0, 1]}


def test_labelled_cells_are_cells_of_their_own(cells, tmp_path):
    plain = {key: values for key, values in CONSTANT.items() if key != "label"}
    found = cells(plain, CONSTANT, CONSTANT, out=str(tmp_path))
    names = [f"{name}_lr_scheduler-None_lr5e-5_seed{seed}" for name in ("sft", "constant") for seed in (0, 1)]
    assert list(found) == names
    without, cell = found[names[0]], found[names[2]]
    assert cell.values == {key: values if key == "label" else values[0] for key, values in CONSTANT.items()}
    assert cell.overrides()[:-1] == without.overrides()[:-1]  # all but the folder: the run gets no label
    write_cell(cell, task=None, status=WAITING)
    assert read_cell(cell.folder)["values"] == cell.values


def test_wise_ft_prefers_the_source_without_a_label(cells):
    wise = {"method": ["wise_ft"], "optimizer.lr": [5e-5], "seed": [0]}
    found = cells(CONSTANT, wise, {"label": "mixed", **wise})
    for name in ("wise_ft_lr5e-5_seed0", "mixed_lr5e-5_seed0"):
        assert found[name].source == found["sft_lr5e-5_seed0"].folder
    found = cells(CONSTANT, {**wise, "lr_scheduler": [None]})
    assert len(found) == 3  # the labelled cell has all values of the source: nothing is trained twice
    assert found["wise_ft_lr5e-5_seed0_lr_scheduler-None"].source.name == "constant_lr_scheduler-None_lr5e-5_seed0"


def test_lr_replay_names_the_label_of_its_source(cells):
    log = [{"cell": {"label": "cap", "method": "finch", "seed": 1}}]
    mappings = [
        {"method": ["finch"], "seed": [0, 1]},
        {"label": "cap", "method": ["finch"], "lr_scheduler.eta_max": [1e-4], "seed": [0, 1]},
        {**REPLAY, "seed": [0]},
        {"label": "replayed", **REPLAY, "lr_scheduler.log": log, "seed": [0]},
    ]
    found = cells(*mappings)
    assert found["lr_replay_log-finch_seed0"].source.name == "finch_seed0"
    assert found["replayed_log-cap-finch-seed1_seed0"].source.name == "cap_eta_max0.0001_seed1"
    with pytest.raises(UserError, match=r"no cell of the grid has {method: finch}; give values that one cell has, and"):
        cells(*mappings[1:3])


def test_small_lr_stands_on_evaluated_sft_runs(cells):
    mappings = [
        {"method": ["sft"], "optimizer.lr": [1e-5, 2e-5], "batch_size": [4, 8], "seed": [0, 1]},
        {"method": ["small_lr"], "batch_size": [8], "seed": [1]},
        {"label": "constant", "method": ["sft"], "optimizer.lr": [9e-5], "batch_size": [8], "seed": [1]},
    ]
    cell = cells(*mappings, evaluate={"suites": ["forgetting"]})["small_lr_batch_size8_seed1"]
    names = {path.name for path in cell.dependencies}
    assert names == {f"sft_lr{lr}_batch_size8_seed{seed}" for lr in ("1e-5", "2e-5") for seed in (0, 1)}
    without = cells(*mappings)["small_lr_batch_size8_seed1"]  # the methods' stand-in
    assert (without.kind, without.dependencies) == ("run", ())


def test_command_line_overrides_runs_and_evaluation(read):
    grid = read(
        "epochs=1",
        "evaluate.limit=10",
        grid={"seed": [0]},
        overrides={"epochs": 3, "compile": False, "probes": None},
        evaluate={"suites": ["science"]},
    )
    assert grid.overrides == ("epochs=3", "compile=false", "probes=null", "epochs=1")
    assert (grid.evaluation.limit, grid.task) == (10, "science")
    assert grid.evaluation.results() == {"science": {"sciknoweval"}}


@pytest.mark.parametrize(
    ("given", "suites", "tasks"),
    [
        ({"suites": ["knowledge", "forgetting"]}, ("knowledge", "forgetting", "knowledge_validation"), ()),
        ({"tasks": ["tofu"]}, (), ("tofu", "tofu_validation")),
        (
            {"suites": ["knowledge"], "tasks": ["tofu"]},
            ("knowledge", "knowledge_validation"),
            ("tofu", "tofu_validation"),
        ),
    ],
)
def test_suite_that_chooses_epochs_is_evaluated_too(read, given, suites, tasks):
    grid = read(grid={"seed": [0]}, evaluate={**given, "select_by": "knowledge_validation"})
    assert (grid.evaluation.suites, grid.evaluation.tasks, grid.task) == (suites, tasks, "knowledge")
    assert grid.evaluation.results()["knowledge_validation"] == {"tofu_validation"}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"seed": 0}, "grid.seed=0 must be a list of values, such as [0]"),
        ({"seed": [0, 1, 0]}, "grid.seed=[0, 1, 0] has 0 twice, which is one cell"),
        ([], "grid is missing"),
        ({"method": ["fnch"]}, "method=fnch is not known, did you mean finch?"),
        ({"output_dir": ["x"]}, "grid.output_dir: each cell has its own folder in out"),
        ({"method": ["sft"], "alpha": [0.5]}, "grid.alpha is WiSE-FT's"),
        ({"method": ["wise_ft"], "alpha": [2]}, "grid.alpha=2 must be a number in [0, 1]"),
        ({"label": ["a"], "method": ["sft"]}, "grid.label=['a'] must be one name of letters, digits, _, -"),
        ({"label": "a b", "method": ["sft"]}, "grid.label=a b must be one name of letters, digits, _, -"),
        ({"label": "finch", "method": ["sft"]}, "grid.label=finch has another meaning in reports"),
        ({"label": "a", "method": ["sft", "dft"]}, "grid.label=a has several methods (dft, sft); give"),
        ([{"label": "a", "method": [name]} for name in ("sft", "dft")], "grid.label=a has several methods (dft, sft)"),
        (REPLAY, "grid.lr_scheduler.log: no cell of the grid has {method: finch}"),
    ],
)
def test_mistakes_in_a_grid_are_one_line(read, grid, message):
    with pytest.raises(UserError) as error:
        cells_of(read(grid=grid))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "override", "message"),
    [
        ({"grids": {}}, "", "grids is not a key of a grid, did you mean grid?"),
        ({}, "seed=1", "seed=1: the grid has values of seed"),
        ({}, "keep=best", "keep=best: keep is a key of the grid, not of its runs"),
        ({"grid": {"label": "a", "seed": [0]}}, "label=b", "label=b: the grid has values of label"),
        ({"recipe": "finch_fll_finetune"}, "", "did you mean finch_full_finetune?"),
        ({"evaluate": {"suite": "x"}}, "", "evaluate.suite is not a key of a grid, did you mean"),
        ({"evaluate": {"suites": ["sciense"]}}, "", "evaluate.suites=sciense is unknown, did you mean science?"),
        (
            {"evaluate": {"suites": ["forgetting"], "tasks": ["tofu"]}},
            "",
            "tasks=tofu is not in evaluate.suites=forgetting",
        ),
        ({"keep": "bst"}, "", "keep=bst is not known; give all, best, last"),
        ({"evaluate": {}}, "", "evaluate needs suites or tasks"),
        (
            {"evaluate": {"suites": ["science"], "select_by": "knowledge_validation"}},
            "",
            "select_by=knowledge_validation has no validation rows of the task science; give science_validation",
        ),
        (
            {"evaluate": {"suites": ["language"], "select_by": "language_validation"}},
            "",
            "leave it out: only knowledge_validation, science_validation can choose an epoch",
        ),
        (
            {"evaluate": {"suites": ["science"]}, "keep": "last"},
            "evaluate.select_by=science_validation",
            "keep=last removes the epochs that evaluate.select_by chooses from; give best or all",
        ),
        ({"evaluate": {"tasks": "x"}}, "evaluate.limit=0", "evaluate.limit=0 must be a number"),
    ],
)
def test_other_mistakes_are_refused(read, content, override, message):
    with pytest.raises(UserError) as error:
        read(*filter(None, [override]), **{"grid": {"seed": [0]}, **content})
    assert message in str(error.value)


def test_broken_yaml_names_its_line(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text("config: x\ngrid: [\n")
    with pytest.raises(UserError, match=r"cannot be read as YAML \(.* in line 3"):
        read_grid(str(file))
