"""Before the first step: a config from a folder and rows (auto), what a run would take (check, estimate), and whether a machine computes right
(doctor). A room: it imports the core, and nothing imports it.
"""
