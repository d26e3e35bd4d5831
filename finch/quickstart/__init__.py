"""The embedded example: a tiny base model that knows a synthetic world, and two ways to teach it a new one."""
