"""Folders of pretrained and tuned weights: formats, each family's names and layouts, PEFT adapters, and WiSE-FT."""
