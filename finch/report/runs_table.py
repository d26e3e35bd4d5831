"""The table of the runs: where each one stands."""

from __future__ import annotations

from finch.report.formatting import NONE
from finch.report.measures import Comparison
from finch.report.runs import BATCH_SIZE, Run
from finch.report.tables import LONG, Names, Table, seed_cell


def runs_table(comparison: Comparison, names: Names) -> Table:
    """Where each run stands."""
    rows = []
    for position, run in enumerate(comparison.runs):
        steps = run.steps
        seen = sorted(run.results)
        probes = [one.step for one in comparison.outcomes[position].values() if one.step is not None]
        rows.append(
            [
                names.run(run),
                seed_cell(run),
                NONE if run.values.get(BATCH_SIZE) is None else str(run.values[BATCH_SIZE]),
                str(steps[-1]["step"]) if steps else NONE,
                epochs_text(run),
                NONE if run.best_epoch is None else str(run.best_epoch + 1),
                str(probes[0]) if probes else NONE,
                ", ".join(seen) or "none",
                run.status or NONE,
                str(run.folder),
            ]
        )
    return Table(
        "Runs",
        ["run", "seed", "batch", "steps", "epochs", "best epoch", "probes at step", "evaluated", "status", "folder"],
        rows,
        text_columns=(0, 7, 8, 9),
        is_long=len(rows) > LONG,
    )


def epochs_text(run: Run) -> str:
    """Finished epochs of those planned."""
    epochs = run.config.get("epochs")
    if epochs is None:
        return NONE
    return f"{run.finished_epochs} of {epochs}"
