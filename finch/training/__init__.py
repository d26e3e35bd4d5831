"""What the recipes are made of: the model that returns token losses, its sharding, the loss over a dataset, the pretrained model's losses,
schedule and optimizer from the config, checks before weights are loaded, the run's folder, and export.

May import everything but cli.
"""
