"""LoRA fine-tuning with FINCH's loss-adaptive learning rate: finch_full_finetune's loop on torchtune's LoRA modules.

finch run --config qwen3/4B_finch method=finch+lora
finch run --nproc_per_node 2 --config my_lora.yaml
"""

from __future__ import annotations

from finch_full_finetune import FinchFullFinetune
from omegaconf import DictConfig

from finch.base.errors import exit_without_teardown
from finch.config import parser, schema
from finch.config.instantiate import component_of
from finch.models import lora
from finch.training.config_checks import check_lora_combinations
from finch.training.run import run_recipe
from finch.weights.peft import PeftFolder


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
    saves_all_weights = False

    def __init__(self, cfg: DictConfig) -> None:
        check_lora_combinations(cfg)
        super().__init__(cfg)

    def build_decoder(self) -> None:
        lora.check_lora_settings(self.cfg.model)
        super().build_decoder()
        lora.train_adapters_only(self.decoder, component_of(self.cfg.model) or "")
        self.adapter = PeftFolder(self.decoder, self.base)

    def load_base(self) -> None:
        super().load_base()
        # After the base weights, whose rows' norms DoRA starts from.
        lora.initialize_adapters(self.model.decoder, self.seed)

    def write_weights(self, name: str) -> None:
        decoder, is_writer, dtype = self.model.decoder, self.parallel.is_rank_zero, self.export_dtype
        self.adapter.write(decoder, self.run.path / f"{name}_adapter", is_writer=is_writer, dtype=dtype)
        if not self.cfg.save_adapter_weights_only:
            adapters = lora.adapter_parameters(decoder)
            like = {key: tensor for key, tensor in decoder.state_dict().items() if key not in adapters}
            merged = lora.merged(decoder, dtype)
            self.base.write(merged, self.run.path / name, is_writer=is_writer, dtype=dtype, like=like)

    def exported(self, name: str) -> str:
        return f"{name}_adapter" if self.cfg.save_adapter_weights_only else name


@parser.parse(schema.LoraFinetuneKeys)
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(FinchLoRAFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
