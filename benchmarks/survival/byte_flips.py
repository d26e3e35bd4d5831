"""Single bytes of a checkpoint changed at random: every change must be detected before the checkpoint is used."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from finch.checkpoint.reader import latest_valid, list_checkpoints
from finch.distributed.parallel import Parallel


@dataclass(frozen=True)
class Flip:
    """Attributes:
    file: its name in the checkpoint's folder.
    position: of the byte, from 0.
    mask: XORed with the byte, 1 to 255.
    """

    file: str
    position: int
    mask: int

    def apply(self, folder: Path) -> None:
        """Changes the byte; a second call restores it."""
        with (folder / self.file).open("r+b") as file:
            file.seek(self.position)
            byte = file.read(1)[0]
            file.seek(self.position)
            file.write(bytes([byte ^ self.mask]))


def draw(folder: Path, number: int, rng: random.Random) -> list[Flip]:
    """Flips in every file of the folder once, and then in files drawn by their size."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = [path.stat().st_size for path in files]
    chosen = list(range(len(files)))
    chosen += rng.choices(chosen, weights=sizes, k=max(0, number - len(files)))
    return [Flip(files[index].name, rng.randrange(sizes[index]), rng.randint(1, 255)) for index in chosen[:number]]


def is_detected(run: Path, flip: Flip) -> bool:
    """Whether a resume of ``run`` would name the file and use the checkpoint before, and use the last one again once the byte is restored.

    Args:
        run: holds two complete checkpoints.
    """
    checkpoints = list_checkpoints(run)
    one_process = Parallel(torch.device("cpu"))
    flip.apply(checkpoints[0])
    try:
        used, damages = latest_valid(checkpoints, one_process)
    finally:
        flip.apply(checkpoints[0])
    is_named = len(damages) == 1 and f"{checkpoints[0]} is damaged ({flip.file}" in damages[0]
    return used == checkpoints[1] and is_named and latest_valid(checkpoints, one_process) == (checkpoints[0], [])
