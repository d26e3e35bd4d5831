"""LoRA fine-tuning with FINCH's loss-adaptive learning rate: finch_full_finetune's loop on torchtune's LoRA modules.

finch run qwen3/4B_finch method=finch+lora
finch run --nproc_per_node 2 my_lora.yaml
"""

from __future__ import annotations

from finch_full_finetune import FinchFullFinetune
from omegaconf import DictConfig

from finch.base.errors import exit_without_teardown
from finch.config import parser, schema
from finch.training.config_checks import check_lora_combinations
from finch.training.run import run_recipe


class FinchLoRAFinetune(FinchFullFinetune):
    """Trains the LoRA (or DoRA) layers of a torchtune decoder; everything else is :class:`FinchFullFinetune`.

    Each epoch ends with RUN/epoch_N_adapter in PEFT's format and, unless ``save_adapter_weights_only``, the merged model in
    RUN/epoch_N, which ``best`` links. A checkpoint holds only the adapters; frozen weights come from the pretrained folder.
    Adapters start from the same values on any number of ranks.

    Args:
        cfg: a config that :func:`finch.config.parser.parse` has checked.

    Raises:
        UserError: a model without LoRA layers, or an option that has no meaning for adapters.
    """

    options = schema.LoraFinetuneKeys
    trains_adapters = True

    def __init__(self, cfg: DictConfig) -> None:
        check_lora_combinations(cfg)
        super().__init__(cfg)


@parser.parse(schema.LoraFinetuneKeys)
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(FinchLoRAFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
