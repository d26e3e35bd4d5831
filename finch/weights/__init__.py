"""Folders of pretrained and tuned weights: formats, each family's names and layouts, PEFT adapters, and WiSE-FT.

May import models and what is below it; must not import checkpoint, data or training.
"""
