"""What `finch doctor` says of an environment's packages."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement

from finch.plan.commands import doctor


def installed_by(text: str, found: set[tuple[str, str]]) -> None:
    """Adds what pip installs for a requirement, by the metadata of what is installed here."""
    requirement = Requirement(text)
    for extra in ("", *requirement.extras):
        if (requirement.name, extra) in found:
            continue
        found.add((requirement.name, extra))
        try:
            needed = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue
        for each in map(Requirement, needed):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                installed_by(str(each), found)


@pytest.mark.parametrize("extras", ["", "torchtune", "torchtune,evaluate", "torchtune,evaluate,report", "hf", "openai"])
def test_an_environment_of_an_install_line_has_no_problem(monkeypatch, capsys, extras):
    found: set[tuple[str, str]] = set()
    installed_by(f"finch-finetune[{extras}]" if extras else "finch-finetune", found)
    names = {name.lower().replace("_", "-") for name, _ in found}
    version = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: version(name) if name.lower().replace("_", "-") in names else None
    )
    lines: list[str] = []
    assert list(doctor._package_problems(lines)) == []
    used = {line.split()[0] for line in lines if " installed " in line}
    assert used >= set(filter(None, extras.split(",")))
    names.discard("torchao")
    assert bool(list(doctor._package_problems([]))) == ("torchtune" in extras)
