"""One pass with the pretrained model: each row's most likely tokens, whatever the batch, kept and read again."""

import pytest
import torch
from helpers.runs import make_config, write_rows
from omegaconf import OmegaConf
from torchtune.config import instantiate
from torchtune.data import padded_collate_sft
from torchtune.models.llama2 import llama2

from benchmarks.tiny_job import llama_args
from finch.data.dataset import load_dataset
from finch.data.loader import EvalLoader, collator, loader
from finch.data.order import EMPTY, GlobalOrder
from finch.distributed.parallel import Parallel
from finch.training.chunked_loss import TokenLoss
from finch.training.reference import ReferenceFile, ReferenceTopK, compute_reference_top_k

TOP_K = 4


@pytest.fixture
def samples(base_folder, tmp_path):
    write_rows(tmp_path / "rows.jsonl", 11)
    config = OmegaConf.create(make_config(base_folder, tmp_path / "rows.jsonl", tmp_path / "run"))
    tokenizer = instantiate(config.tokenizer)
    samples = load_dataset(config, "dataset", tokenizer)
    return samples, collator(samples, tokenizer, padded_collate_sft)


def small_model():
    torch.manual_seed(0)
    return TokenLoss(llama2(**llama_args()).double(), num_chunks=3)


def by_hand(samples):
    """One row at a time, no padding, plain torch: probabilities of the most likely tokens, and of the rest."""
    model = small_model()
    rows = []
    with torch.no_grad():
        for index in range(len(samples)):
            tokens, labels = (torch.tensor(samples.data[index][name]) for name in ("tokens", "labels"))
            hidden = model.decoder.norm(model.decoder(tokens[None])[0, :-1])[labels[1:] != -100]
            top = model.decoder.output(hidden).softmax(-1).topk(TOP_K)
            rows.append((torch.cat([top.values, 1 - top.values.sum(-1, keepdim=True)], -1), top.indices))
    return rows


def compute(samples, collate, batch_size):
    return compute_reference_top_k(
        small_model(), EvalLoader(samples, collate, Parallel(torch.device("cpu")), batch_size), TOP_K
    )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_reference_top_k_of_each_row(samples, batch_size):
    result = compute(*samples, batch_size)
    assert result.tokens.dtype == torch.int32
    assert result.num_bytes == len(result.tokens) * (8 * (TOP_K + 1) + 4 * TOP_K)
    samples, collate = samples
    expected = by_hand(samples)
    order = GlobalOrder(11, micro_batch=3, ranks=2, seed=3)  # shuffled; rank 1 ends with an empty row
    for rank in (0, 1):
        for rows, batch in zip(order.micro_batches(rank), loader(samples, order, collate, rank=rank), strict=True):
            found = result.add_to(batch, rows)
            assert found.keys() == batch.keys() | {"reference_log_probs", "reference_tokens"}
            parts = [expected[index] for index in rows if index != EMPTY]
            for name, values in zip(
                ("reference_log_probs", "reference_tokens"), zip(*parts, strict=True), strict=False
            ):
                values = torch.cat(values)
                one = found[name].exp() if name == "reference_log_probs" else found[name].long()
                torch.testing.assert_close(one, values, rtol=0, atol=1e-12)
            assert len(found["reference_tokens"]) == len(batch["targets"])


def test_reference_top_k_is_kept_bit_for_bit(samples, tmp_path):
    samples, collate = samples
    parallel = Parallel(torch.device("cpu"))
    result = compute_reference_top_k(small_model(), EvalLoader(samples, collate, parallel, 4), TOP_K)
    file = ReferenceFile(tmp_path / "top_k.safetensors", "a")
    file.save(vars(result))
    again = ReferenceTopK(**file.load(parallel))
    for name in ("log_probs", "tokens", "ends"):
        assert torch.equal(getattr(again, name), getattr(result, name))
