"""Models for torchtune that it does not have (Qwen3) or has differently (Gemma 2, Phi-4), LoRA layers, and a tokenizer that renders a
folder's own chat template.

May import distributed and config and what is below them; must not import weights, data or training.
"""
