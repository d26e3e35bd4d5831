"""The ``finch`` command: its table of commands, `run` and `slurm`, and the lists of what a config may say. Torch is imported only where
a command needs it, so that ``finch --help`` answers at once.
"""
