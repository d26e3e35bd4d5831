"""The GPU hours and the disk that the paper's grids take, computed from shapes alone: nothing here was measured.

Training a token costs 6 floating-point operations a parameter, forward and backward (Kaplan et al., arXiv 2001.08361); a pass over
the training rows with the pretrained weights, which FINCH, FLOW and STM need once, costs 2. Loading, validation, saving and evaluation
are not counted; adapters are counted as full fine-tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finch.config.methods import split_name
from finch.sweep.cells import METHOD, RUN, Cell

PEAK_FLOPS = 989e12
"""Of an H100 SXM in dense bf16, by its data sheet."""
SHARE_OF_PEAK = 0.4
"""That training reaches: an assumption, usual for models of this size on one GPU. Less with short rows in small micro-batches."""
EPOCHS = 5
_NEED_PRETRAINED = {"finch", "flow", "stm"}


@dataclass(frozen=True)
class TrainingRows:
    """A task's training rows.

    Attributes:
        number: how many.
        tokens: of a row on average, prompt and answer.
        origin: of both numbers.
    """

    number: int
    tokens: int
    origin: str


TASKS = {
    "knowledge": TrainingRows(
        3600, 83, "90% of TOFU's 4,000 rows; tokens counted on them with SmolLM2's tokenizer and chat template"
    ),
    "science": TrainingRows(
        1680,
        257,
        "70% of 2,400 rows; tokens counted on them with SmolLM2's tokenizer and chat template, with plain answers: solutions are longer",
    ),
    "language": TrainingRows(
        36400,
        150,
        "70% of Alpaca's 52,002 rows; tokens estimated: about 390 characters a row at 3 a token, and a chat template",
    ),
}

PARAMETERS = {"qwen3_4B": 4.02e9, "llama3_8B": 8.03e9}


def gpu_hours(cells: Sequence[Cell], parameters: float, rows: TrainingRows) -> float:
    """Hours of one GPU for the training of all cells."""
    trained = [cell for cell in cells if cell.kind == RUN]
    passes = sum(
        6 * EPOCHS + (2 if _NEED_PRETRAINED & set(split_name(str(cell.values.get(METHOD, "sft")))) else 0)
        for cell in trained
    )
    return passes * parameters * rows.number * rows.tokens / (SHARE_OF_PEAK * PEAK_FLOPS) / 3600


def disk_terabytes(cells: Sequence[Cell], parameters: float) -> float:
    """Of all cells in bf16: the folders of the epochs at 2 bytes a parameter, and the last checkpoint with AdamW's states at 6."""
    trained = sum(cell.kind == RUN for cell in cells)
    derived = sum(cell.kind == "wise_ft" for cell in cells)
    return (trained * (2 * EPOCHS + 6) + derived * 2) * parameters / 1e12


def header(cells: Sequence[Cell], model: str, task: str) -> list[str]:
    """The lines of a grid's header about its cost."""
    parameters, rows = PARAMETERS[model], TASKS[task]
    trained = sum(cell.kind == RUN for cell in cells)
    return [
        f"GPU hours, computed, not measured: {gpu_hours(cells, parameters, rows):.1f} on an H100, for {trained} runs of {EPOCHS} epochs: 6 operations a",
        f"parameter ({parameters:.3g}) and token ({rows.number:,} rows x {rows.tokens}), at {SHARE_OF_PEAK:.0%} of the peak of {PEAK_FLOPS / 1e12:.0f} TFLOP/s in bf16. Loading, saving,",
        "validation and evaluation are not counted; with runs as short as these they take longer than the training.",
        f"Rows: {rows.origin}.",
        f"Disk, computed: {disk_terabytes(cells, parameters):.1f} TB, as every run keeps its {EPOCHS} epochs and its last checkpoint. In an evaluated cell",
        "checkpoints/ and all epochs but the one that `best` links can be removed.",
    ]
