"""The ``finch`` command and its subcommands. May import everything; nothing imports it. torch is imported only where a subcommand needs
it, so that ``finch --help`` answers at once.
"""
