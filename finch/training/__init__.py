"""The training step of the recipes and what surrounds it: model and sharding, loss, schedule and optimizer, hooks, checks, the run's folder."""
