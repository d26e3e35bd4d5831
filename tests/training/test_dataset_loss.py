"""The mean loss over a dataset: each sample once, on ranks with unequal counts too."""

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import on_ranks
from helpers.runs import llama_args, make_config, write_rows
from omegaconf import OmegaConf
from torchtune.config import instantiate
from torchtune.data import padded_collate_sft
from torchtune.models.llama2 import llama2

from finch.data.dataset import load_dataset
from finch.data.loader import EvalLoader, collator
from finch.data.stats import collect_stats
from finch.distributed import fsdp, parallel
from finch.training.chunked_loss import TokenLoss
from finch.training.reference import dataset_loss


def float64_mean(config):
    """One sample at a time, no padding, plain torch."""
    torch.manual_seed(0)
    model = llama2(**llama_args())
    samples = instantiate(config.dataset, instantiate(config.tokenizer))
    total = count = 0
    with torch.no_grad():
        for sample in samples:
            labels = torch.tensor(sample["labels"])[1:]
            logits = model(torch.tensor(sample["tokens"])[None])[0, :-1].double()
            total += float(F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100))
            count += int((labels != -100).sum())
    return total / count


@pytest.fixture
def config(base_folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, 401)
    return OmegaConf.create(make_config(base_folder, rows, tmp_path / "run"))


def mean_loss(config, ranks, batch_size):
    tokenizer = instantiate(config.tokenizer)
    samples = load_dataset(config, "dataset", tokenizer)
    if batch_size > 1:
        collect_stats(samples, 0, 1)  # the lengths are known
    torch.manual_seed(0)
    model = TokenLoss(llama2(**llama_args())).train()
    fsdp.shard_model(model, model.decoder.layers, ranks)
    state = torch.get_rng_state()
    loader = EvalLoader(samples, collator(samples, tokenizer, padded_collate_sft), ranks, batch_size)
    result = dataset_loss(model, loader)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)  # no random number of the training's is used up
    return result


@pytest.mark.parametrize("batch_size", [1, 16])
def test_dataset_loss_equals_the_float64_mean(config, batch_size):
    result = mean_loss(config, parallel.Parallel(torch.device("cpu")), batch_size)
    assert result == pytest.approx(float64_mean(config), rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_dataset_loss_on_several_ranks(config, tmp_path, ranks):
    OmegaConf.save(config, tmp_path / "config.yaml")
    code = """
        from omegaconf import OmegaConf
        from training.test_dataset_loss import mean_loss
        from finch.distributed import parallel
        tell(mean_loss(OmegaConf.load(folder.parent / "config.yaml"), parallel.start(device, shard=False), 4))
        parallel.stop()
    """
    results = on_ranks(ranks, code, tmp_path / "ranks")
    assert len(set(results)) == 1  # bit for bit the same on every rank
    assert results[0] == pytest.approx(float64_mean(config), rel=1e-6)
