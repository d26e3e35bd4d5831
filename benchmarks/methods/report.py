"""Table and figure of benchmarks.methods."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.methods.results import PRETRAINED, Results, Row, select_table_rows

# Label and colour
STYLES = {
    "sft": ("SFT", "#b5533c"),
    "finch": ("FINCH", "#1f6f9f"),
    "flow": ("FLOW", "#3f8f5b"),
    "dft": ("DFT", "#8a6fb0"),
    "talr": ("TALR", "#c9a227"),
    "stm": ("STM", "#d16ba5"),
    "l2": ("L2", "#6b6b6b"),
    "lora": ("LoRA", "#2aa198"),
    "small_lr": ("SFT, small lr", "#e0a08f"),
    "wise_ft": ("WiSE-FT", "#7a2f1d"),
    "lr_replay": ("FINCH replayed", "#7fbfe0"),
}


def write_report(out: Path, results: Results) -> str:
    """Writes table.md, front.csv and front.png; returns the table."""
    text = make_table(results)
    (out / "table.md").write_text(text, encoding="utf-8")
    best = pareto_front(list(results.rows.values()))
    with (out / "front.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["method", "learning_rate", "seed", "story_loss", "accuracy", "on_front"])
        for row in sorted(results.rows.values(), key=lambda row: row.story_loss):
            writer.writerow([row.method, row.learning_rate, row.seed, row.story_loss, row.accuracy, row in best])
    draw(results, out / "front.png")
    return text


def make_table(results: Results) -> str:
    """Markdown table: mean and standard deviation over the seeds."""
    [base] = results.select(PRETRAINED)
    lines = [
        "| method | learning rate | accuracy, % | story loss, nats | its rise | validation loss, nats |",
        "|---|---|---|---|---|---|",
        f"| pretrained | | {100 * base.accuracy:.1f} | {base.story_loss:.3f} | | |",
    ]
    for method, rows in select_table_rows(results).items():
        story, accuracy = _coordinates(rows)
        losses = [row.validation_loss for row in rows if row.validation_loss is not None]
        lines.append(
            f"| {STYLES[method][0]} | {rows[0].learning_rate:g} | {format_mean(accuracy, 1)} | {format_mean(story, 3)} "
            f"| {statistics.mean(story) - base.story_loss:+.3f} | {format_mean(losses, 3) if losses else ''} |"
        )
    return "\n".join(lines) + "\n"


def format_mean(values: Sequence[float], digits: int) -> str:
    """Mean and sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """The runs that no other run beats in accuracy at the same or a lower story loss, by rising story loss."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.story_loss, -row.accuracy)):
        if not best or row.accuracy > best[-1].accuracy:
            best.append(row)
    return best


def draw(results: Results, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.4), layout="constrained")
    [base] = results.select(PRETRAINED)
    for method, rows in select_table_rows(results).items():
        label, colour = STYLES[method]
        if method not in ("small_lr", "lr_replay"):  # small_lr's runs are SFT's, lr_replay has one rate
            curve = _coordinates(sorted(results.select(method, seed=0), key=lambda row: row.learning_rate))
            axes.plot(*curve, ".-", color=colour, markersize=6, linewidth=0.9, alpha=0.6)
        story, accuracy = _coordinates(rows)
        axes.scatter(story, accuracy, s=9, color=colour, linewidths=0)
        axes.errorbar(
            statistics.mean(story),
            statistics.mean(accuracy),
            xerr=_deviation(story),
            yerr=_deviation(accuracy),
            fmt="o",
            markersize=9,
            color=colour,
            markeredgecolor="white",
            elinewidth=1.2,
            zorder=3,
            label=f"{label}, {rows[0].learning_rate:g}",
        )
    axes.plot(base.story_loss, 100 * base.accuracy, "*", color="black", markersize=13, zorder=4, label="pretrained")
    axes.axhline(100 / 6, color="#999999", linewidth=0.8, linestyle=":")
    axes.text(
        0.995, 100 / 6 + 0.6, "chance", color="#777777", ha="right", fontsize=8, transform=axes.get_yaxis_transform()
    )
    axes.set(
        xlabel="loss on 200 of the stories it was pretrained on, nats a token",
        ylabel="six-way accuracy on paraphrased questions, %",
        title="Lines: one seed over the grid of learning rates. Large dots: chosen rate, mean and standard deviation of three seeds",
        xscale="log",
    )
    axes.title.set_fontsize(9.5)
    axes.set_xticks(ticks := [1.5, 2, 2.5, 3, 4, 5, 6], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), title="method, learning rate")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(file, dpi=160)
    plt.close(figure)


def _coordinates(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Story losses in nats a token, accuracies in percent."""
    return [row.story_loss for row in rows], [100 * row.accuracy for row in rows]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
