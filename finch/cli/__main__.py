"""`python -m finch.cli` is the `finch` command."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files would count before all modules

from finch.cli.main import main

main()
