"""The public path of :class:`finch.optim.cosine.cosine_with_warmup`, which configs and saved runs name."""

from finch.optim.cosine import cosine_with_warmup

__all__ = ["cosine_with_warmup"]
