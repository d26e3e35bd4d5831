"""Single bytes of a checkpoint changed at random: each change must be found before the checkpoint is used."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from finch.checkpoint.reader import find_resume_candidates, latest_valid
from finch.distributed.parallel import Parallel


@dataclass(frozen=True)
class Flip:
    """Attributes:
    file: its name in the checkpoint's folder.
    place: the byte, from 0.
    mask: what it is exclusive-ored with, 1 to 255.
    """

    file: str
    place: int
    mask: int

    def apply(self, folder: Path) -> None:
        """Changes the byte; a second time changes it back."""
        with (folder / self.file).open("r+b") as file:
            file.seek(self.place)
            byte = file.read(1)[0]
            file.seek(self.place)
            file.write(bytes([byte ^ self.mask]))


def draw(folder: Path, number: int, drawn: random.Random) -> list[Flip]:
    """Flips in every file of the folder once, and from then on in files drawn by their size."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = [path.stat().st_size for path in files]
    chosen = list(range(len(files)))
    chosen += drawn.choices(chosen, weights=sizes, k=max(0, number - len(files)))
    return [Flip(files[which].name, drawn.randrange(sizes[which]), drawn.randint(1, 255)) for which in chosen[:number]]


def is_detected(run: Path, flip: Flip) -> bool:
    """Whether a start that goes on with ``run`` would name the file and take the checkpoint before, and take the last one again
    once the byte is as it was.

    Args:
        run: holds two whole checkpoints.
    """
    found = find_resume_candidates(run, "auto")
    alone = Parallel(torch.device("cpu"))
    flip.apply(found[0])
    try:
        taken, damages = latest_valid(found, alone)
    finally:
        flip.apply(found[0])
    is_found = taken == found[1] and len(damages) == 1 and f"{found[0]} is damaged ({flip.file}" in damages[0]
    return is_found and latest_valid(found, alone) == (found[0], [])
