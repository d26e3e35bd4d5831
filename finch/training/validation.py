"""The losses over the held-out rows of a run, one set or several with names."""

from __future__ import annotations

from torch import nn

from finch.data.training_data import TrainingData
from finch.log import logger
from finch.metrics import MetricsLog
from finch.training.dataset_loss import dataset_loss


def validate(
    model: nn.Module, data: TrainingData, metrics_log: MetricsLog, *, step: int, epoch: int, epochs: int
) -> dict[str, float]:
    """Mean loss over each set of ``dataset_validation`` in nats, by its name in the metrics, where it is written; a collective."""
    losses = {
        key: dataset_loss(model, data.eval_loader(samples, "validation")) for key, samples in data.validations.items()
    }
    if losses:
        metrics_log.write_event({"step": step, "epoch": epoch, **losses})
        texts = ", ".join(f"{key.replace('_', ' ')} {loss:.4f}" for key, loss in losses.items())
        logger.info(f"epoch {epoch + 1}/{epochs}, step {step}: {texts}")
        metrics_log.reset_timer()
    return losses
