"""How far an evaluation is, over all of its models and tasks."""

from __future__ import annotations

from finch.base.progress import Progress


class EvaluationProgress(Progress):
    """The requests of an evaluation, over all of its models and tasks.

    Args:
        estimates: about how many requests each task will have; corrected when it starts.
        is_shown: whether this process shows it.
    """

    def __init__(self, estimates: list[int], *, is_shown: bool) -> None:
        super().__init__(sum(estimates), is_shown=is_shown)
        self._estimates, self._estimate = list(estimates), 0

    def start_task(self, title: str) -> None:
        """The next task; ``title`` names it and its model."""
        self.set_title(title)
        self._estimate = self._estimates.pop(0) if self._estimates else 0

    def expect(self, number: int) -> None:
        """The task has this number of requests; in several calls where it has several kinds of them."""
        # The estimate is of all kinds of requests together, so that only the first call takes it back.
        self._total += number - self._estimate
        self._estimate = 0
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()

    def advance(self, number: int, *, is_free: bool = False) -> None:
        super().advance(number, is_free=is_free)
        if self.is_line_due():
            self.log(f"{self._title}: {self._done / self._total:.0%} of all requests, {self.time_left()} left")
