"""How an average is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from finch.base.errors import UserError


@dataclass(frozen=True)
class Choice:
    """How alpha is chosen: as given; the smallest that keeps a share of what was learned; the largest that forgets at most ``budget``; or, with
    none of them, the knee."""

    alpha: float | None = None
    keep: float | None = None
    budget: float | None = None

    def check(self) -> None:
        """Raises UserError for a number out of range."""
        for name, value in (("alpha", self.alpha), ("keep", self.keep)):
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"--{name}={value:g} must be in [0, 1]")
        if self.budget is not None and not self.budget > 0:
            raise UserError(f"--budget={self.budget:g} must be above 0, in nats per token")
