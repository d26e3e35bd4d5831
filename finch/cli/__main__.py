"""`python -m finch.cli` is the `finch` command."""

from finch.cli.main import main

main()
