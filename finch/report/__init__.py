"""What runs have learned and what they have forgotten, as one report: Markdown, HTML, CSV and figures.

May import everything below cli; reads the folders of runs and the results of evaluations, and loads no weights.
"""
