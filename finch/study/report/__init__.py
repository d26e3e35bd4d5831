"""What runs have learned and what they have forgotten, as one report: Markdown, HTML, CSV and figures."""
