"""From the command line and a YAML file to a checked config: the keys and their defaults (schema), parsing and merging, validation,
the methods by name, building components, and the resolved config that is kept beside a run.

May import errors, log and torchtune_names. Knows nothing of ranks, models or files of a run; must not import distributed or anything
above.
"""
