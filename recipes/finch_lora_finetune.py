"""LoRA fine-tuning with FINCH's loss-adaptive learning rate: finch_full_finetune's loop on torchtune's LoRA modules.

tune run finch_lora_finetune --config qwen3/4B_finch method=finch+lora
tune run --nproc_per_node 2 finch_lora_finetune --config my_lora.yaml
"""

from __future__ import annotations

from finch_full_finetune import FinchFullFinetune
from omegaconf import DictConfig

from finch.config.instantiate import component_of
from finch.config.parser import parse
from finch.config.schema import LORA_FINETUNE
from finch.errors import exit_without_teardown
from finch.models.lora import (
    adapter_parameters,
    check_adapters,
    check_lora_settings,
    initialize_adapters,
    merged,
    train_adapters_only,
)
from finch.training.config_checks import check_lora_combinations
from finch.training.run_recipe import run
from finch.weights.peft import PeftFolder


class FinchLoRAFinetune(FinchFullFinetune):
    """Trains the LoRA (or DoRA) layers of a torchtune decoder; everything else is :class:`FinchFullFinetune`.

    Each epoch ends with RUN/epoch_N_adapter in PEFT's format and, unless ``save_adapter_weights_only``, the merged model in
    RUN/epoch_N, which ``best`` links. A checkpoint holds the adapters alone; frozen weights come from the pretrained folder.
    Adapters start from the same values on any number of ranks.

    Args:
        cfg: a config that :func:`finch.config.parser.parse` has checked.

    Raises:
        UserError: a model without LoRA layers, or an option that has no meaning for adapters.
    """

    options = LORA_FINETUNE
    saves_all_weights = False

    def __init__(self, cfg: DictConfig) -> None:
        check_lora_combinations(cfg)
        super().__init__(cfg)

    def _build_decoder(self, cfg: DictConfig) -> None:
        check_lora_settings(cfg.model)
        super()._build_decoder(cfg)
        check_adapters(self._decoder, component_of(cfg.model) or "")
        self._adapter = PeftFolder(self._decoder, self._base)
        train_adapters_only(self._decoder)

    def _load_base(self) -> None:
        super()._load_base()
        initialize_adapters(self._model.decoder, self._seed)

    def _export(self, name: str) -> None:
        dtype = self._export_dtype
        decoder, is_writer = self._model.decoder, self._parallel.is_rank_zero
        self._adapter.write(decoder, self._run / f"{name}_adapter", is_writer=is_writer, dtype=dtype)
        if not self._cfg.save_adapter_weights_only:
            adapters = adapter_parameters(decoder)
            like = {key: tensor for key, tensor in decoder.state_dict().items() if key not in adapters}
            self._base.write(merged(decoder, dtype), self._run / name, is_writer=is_writer, dtype=dtype, like=like)

    def _exported(self, name: str) -> str:
        return f"{name}_adapter" if self._cfg.save_adapter_weights_only else name


@parse(LORA_FINETUNE)
def recipe_main(cfg: DictConfig) -> None:
    run(FinchLoRAFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
