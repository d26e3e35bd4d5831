"""`make quickstart`: a tiny base model that knows a synthetic world is fine-tuned on a new one, with SFT and with FINCH."""
