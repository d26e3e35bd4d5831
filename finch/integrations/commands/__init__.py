"""This room's commands, one a module: ``add_arguments`` and ``main``."""
