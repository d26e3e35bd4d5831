"""The public path of :class:`finch.optim.torch_lr.cosine_with_warmup`, which configs and saved runs name."""

from finch.optim.torch_lr import cosine_with_warmup

__all__ = ["cosine_with_warmup"]
