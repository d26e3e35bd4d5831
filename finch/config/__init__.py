"""From the command line and a YAML file to a checked config: the keys and their types (schema), parsing and merging (parser),
validation, the methods by name, building components (instantiate), and the resolved config saved next to a run.

schema, key_search, methods and instantiate load without torch; methods and instantiate with the standard library only.
"""
