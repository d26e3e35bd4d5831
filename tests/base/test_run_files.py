"""What finch writes in a run's folder."""

import os

import pytest

from finch.base import run_files
from finch.base.errors import UserError


@pytest.mark.parametrize("kind", ["link", "loop", "pipe", "file", "folder"])
@pytest.mark.parametrize("is_file", [True, False])
def test_what_finch_writes_in_a_run_is_in_nothing_elses_place(kind, is_file, tmp_path):
    place, text = tmp_path / "run" / "place", "file" if is_file else "folder"
    place.parent.mkdir()
    (tmp_path / "outside").touch() if is_file else (tmp_path / "outside").mkdir()
    assert run_files.inside(place.parent, "place", is_file=is_file) == place
    make = {
        "link": lambda: place.symlink_to(tmp_path / "outside"),
        "loop": lambda: place.symlink_to("place"),
        "pipe": lambda: os.mkfifo(place),
        "file": place.touch,
        "folder": place.mkdir,
    }
    make[kind]()
    message = f"{place} is no {text}, and finch writes a {text} there; remove it"
    for is_own in (False, True):
        if kind == text or (kind == "link" and is_own):
            assert run_files.inside(place.parent, "place", is_file=is_file, is_own=is_own) == place
        else:
            with pytest.raises(UserError) as error:
                run_files.inside(place.parent, "place", is_file=is_file, is_own=is_own)
            assert str(error.value) == message
