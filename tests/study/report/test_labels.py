"""Labels of a sweep's grid: separate methods in a report, whatever the run was trained with."""

import csv
import html
import re

import pytest
from helpers.evaluated_runs import make_base, make_run, make_sweep
from helpers.runs import finch

from finch.study.report.front import compare_fronts, group_settings, trade_off
from finch.study.report.measures import compare
from finch.study.report.report import write_report
from finch.study.report.runs import read_runs, sort_runs

RATES = (3e-5, 1e-4)
METHODS = ["sft", "finch", "dft", "Cap", "constant"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A sweep with sft, finch and dft, and two arms: ``constant``, trained as sft, and ``Cap``, as finch."""
    folder = tmp_path_factory.mktemp("labelled")
    make_sweep(folder, rates=RATES, seeds=(0,), n=30)
    for label, method in (("constant", "sft"), ("Cap", "finch")):
        for rate in RATES:
            make_run(folder / f"{label}-{rate:g}", method, rate, 0, cell={"label": label}, n=30)
    return folder


def test_labels_are_methods_after_the_known_ones(labelled):
    runs = sort_runs(read_runs([labelled]))
    assert {(run.method, run.label, run.values["method"]) for run in runs} == {
        *((method, None, method) for method in METHODS[:3]),
        ("Cap", "Cap", "finch"),
        ("constant", "constant", "sft"),
    }
    comparison = compare(runs)
    settings = group_settings(comparison)
    assert [setting.method for setting in settings] == [method for method in METHODS for _ in RATES]
    assert all("label" not in setting.values for setting in settings)
    front = compare_fronts(trade_off(comparison, settings), resolution=0.1, order=METHODS)
    assert (list(front.methods), front.reference) == (METHODS, "sft")


def test_paper_has_no_numbers_for_a_label(tmp_path, undrawn):
    """Also where it is the name of a known method."""
    make_base(tmp_path / "base", n=20)
    model = {"_component_": "finch.models.qwen3.qwen3_4b"}
    run = make_run(tmp_path / "run", "finch", 2e-5, n=20, cell={"label": "wise_ft"}, config={"model": model})
    write_report([run], tmp_path / "out")
    rows = [line for line in (tmp_path / "out" / "report.md").read_text().splitlines() if "| paper |" in line]
    assert [row.split("|")[1].strip() for row in rows] == ["pretrained"]


def test_labels_are_shown_as_they_are(tmp_path):
    """Neither TeX, nor a spreadsheet's formula, nor Markdown."""
    labels = [r"$\frac$", "$x^$", "=1", "# <b>|_a_|`"]
    runs = [
        make_run(tmp_path / str(number), "sft", 1e-4, base=None, cell={"label": label})
        for number, label in enumerate(labels)
    ]
    write_report(runs, tmp_path / "out")
    svg = (tmp_path / "out" / "figures" / "loss.svg").read_text()
    markdown = (tmp_path / "out" / "report.md").read_text()
    for label in labels:
        assert html.escape(label, quote=False) in svg
        assert label not in markdown or not set("|_`<") & set(label)
        assert label in re.sub(r"\\([\\|_`*<\[\]#=])", r"\1", markdown)
    with (tmp_path / "out" / "summary.csv").open(newline="") as file:
        assert {row["method"] for row in csv.DictReader(file)} <= {
            f"'{each}" if each[0] == "=" else each for each in labels
        }


def test_control_characters_of_names_are_shown_escaped(tmp_path, capsys):
    name = "a\x1b]0;x\x07\x9b\u202e"
    run = make_run(tmp_path / name, "sft", 1e-4, base=None, cell={"label": name})
    assert finch(capsys, "report", str(run), "--out", str(tmp_path / "out"))[0] == 0
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file() and file.suffix != ".png":
            assert not set("\x1b\x07\x9b\u202e") & set(file.read_text()), file
    assert r"a\x1b]0;x\x07\x9b\u202e" in (tmp_path / "out" / "summary.csv").read_text()
