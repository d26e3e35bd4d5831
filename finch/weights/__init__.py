"""Folders of pretrained and tuned weights: Hugging Face, Meta and torchtune formats, names and layouts of each family, the check of a
model against its config.json, PEFT adapters, and WiSE-FT's interpolation between two folders.

May import models and what is below it; must not import checkpoint, data or training.
"""
