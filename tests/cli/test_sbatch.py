"""What is read from and written into an sbatch script."""

import pytest

from finch.cli.sbatch import fill_in, options_of, seconds_of, value_of
from finch.errors import UserError


def test_filling_in_a_script_of_ones_own():
    script = "#!/bin/sh\n#SBATCH --time=1\n# why\n#SBATCH --gpus-per-node=1\necho\nA=1 # a\nA=2\n"
    filled = fill_in(script, {"time": "2", "gpus-per-node": None, "comment": "a b"}, {"A": r"'\1'"})
    assert filled == "#!/bin/sh\n#SBATCH --time=2\n# why\n#SBATCH --comment='a b'\necho\nA='\\1'\nA=2\n"
    with pytest.raises(UserError, match="no line B="):
        fill_in(script, {}, {"B": "1"})
    with pytest.raises(UserError, match="no #SBATCH lines"):
        fill_in("echo\n", {}, {})


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:05:30", 3930),
        ("2-3", 183600),
        ("2-3:04", 183840),
        ("2-3:04:05", 183845),
        ("0", None),
        ("UNLIMITED", None),
    ],
)
def test_slurms_time_limits(limit, seconds):
    assert seconds_of(limit) == seconds


def test_reading_a_script():
    script = "#SBATCH -N 4 -t5 --comment='a b' # c\n#SBATCH --requeue\n#SBATCH --mem 3G\nA='x y'z # no\nA=2\nB=$C/d\n"
    assert options_of(script) == {"nodes": "4", "time": "5", "comment": "a b", "requeue": "", "mem": "3G"}
    assert (value_of(script, "A"), value_of(script, "B"), value_of(script, "C")) == ("x yz", "$C/d", "")
    assert value_of(script, "A", quoted=True) == "'x y'z"
