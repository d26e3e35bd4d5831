"""The rows of the paper's tasks. Configs name them as ``finch.data.tofu``, ``finch.data.sciknoweval`` and ``finch.data.galician_alpaca``."""
