"""docs/forgetting.md: its blocks are configs, and the metrics it names are those that are written."""

import re

import yaml
from helpers.runs import MINIMAL, ROOT
from omegaconf import OmegaConf

from finch.config.schema import Budget, FullFinetuneKeys
from finch.config.validation import check
from finch.data.row_files import validation_sets
from finch.probes.probes import check_probes, read_probes

PAGE = (ROOT / "docs" / "forgetting.md").read_text()


def test_blocks_of_the_page_are_configs():
    blocks = {}
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        blocks |= yaml.safe_load(text)
    for select_by in re.findall(r"select_by=(\S+)", PAGE):
        cfg = check(OmegaConf.create({**MINIMAL, **blocks, "select_by": select_by}), FullFinetuneKeys)
        check_probes(cfg)
    assert read_probes(cfg)["own_answers"].kind == "self"
    assert Budget.of(cfg.forgetting_budget).key == "probe/own_answers/kl"
    assert list(validation_sets(cfg.dataset_validation)) == ["validation/task/loss", "validation/general/loss"]
