"""One pass with the pretrained model: each row's losses and most likely tokens, on any number of ranks, packed or not, kept in a file."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import on_ranks
from helpers.runs import llama_args, make_config, write_rows
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torchtune.config import instantiate
from torchtune.data import padded_collate_sft
from torchtune.models.llama2 import llama2

from finch.base.errors import UserError
from finch.data.dataset import load_dataset
from finch.data.loader import EvalLoader, collator, load_batches, model_inputs
from finch.data.order import EMPTY, GlobalOrder
from finch.data.stats import collect_stats
from finch.data.training_data import TrainingData
from finch.distributed import fsdp, parallel
from finch.training.chunked_loss import TokenLoss
from finch.training.reference import (
    ReferenceFile,
    ReferenceLosses,
    compute_reference_losses,
    compute_reference_top_k,
    dataset_loss,
    fingerprint_of,
    model_settings,
)


@pytest.fixture
def config(base_folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, 41)
    return OmegaConf.create(make_config(base_folder, rows, tmp_path / "run"))


ONE_PROCESS = parallel.Parallel(torch.device("cpu"))
TOP_K = 4


def small_model():
    torch.manual_seed(0)
    return TokenLoss(llama2(**llama_args()), num_chunks=3)


def evaluation(config, batch_size=4, ranks=ONE_PROCESS):
    """The rows of a config in batches, the rows, and how they become a batch."""
    tokenizer = instantiate(config.tokenizer)
    samples = load_dataset(config, "dataset", tokenizer)
    collate = collator(samples, tokenizer, padded_collate_sft)
    if batch_size > 1:
        collect_stats(samples, 0, 1)  # the lengths are known
    return EvalLoader(samples, collate, ranks, batch_size), samples, collate


def compute(config, batch_size=4, ranks=ONE_PROCESS):
    """``dataset_loss`` takes the same pass."""
    loader, samples, collate = evaluation(config, batch_size, ranks)
    model = small_model().train()
    fsdp.shard_model(model, model.decoder.layers, ranks)
    result, state = compute_reference_losses(model, loader), torch.get_rng_state()
    assert dataset_loss(model, loader) == pytest.approx(result.mean, rel=1e-6)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)  # no random number of the training's is used up
    return result, samples, collate


def by_hand(samples, model):
    """One row at a time, no padding, plain torch: the log-probabilities at its target tokens, and these."""
    with torch.no_grad():
        for index in range(len(samples)):
            tokens, labels = (torch.tensor(samples.data[index][name]) for name in ("tokens", "labels"))
            model.decoder.unembed = lambda hidden: model.decoder.output(model.decoder.norm(hidden))
            log_probs = model.decoder(tokens[None])[0, :-1].log_softmax(-1)
            yield log_probs[labels[1:] != -100], labels[1:][labels[1:] != -100]


@pytest.mark.parametrize("batch_size", [1, 16])
def test_reference_losses_of_each_row(config, batch_size):
    result, samples, _ = compute(config, batch_size)
    expected = [F.nll_loss(*row, reduction="none") for row in by_hand(samples, small_model())]
    for index, losses in enumerate(expected):
        torch.testing.assert_close(result.row(index), losses, rtol=0, atol=2e-6)
    assert result.row(EMPTY).numel() == 0
    assert result.mean == pytest.approx(float(torch.cat(expected).double().mean()), rel=1e-6)
    means = torch.stack([row.mean() for row in expected])
    torch.testing.assert_close(result.sequence_losses.sort().values, means.sort().values, rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_mixture", [False, True])
def test_rows_that_are_repeated_are_read_once(config, is_mixture):
    rows = Path(config.dataset.data_files).read_text().splitlines(keepends=True)
    Path(config.dataset.data_files).write_text("".join(rows[index] for index in (0, 1, 0, 2, 3, 1, 0, 4)))
    loader, samples, _ = evaluation(config)
    if is_mixture:
        draws = torch.tensor([2, 1, 0, 1, 0, 3, 1, 1])
        samples.draws, samples.rows = draws, draws.nonzero().flatten().tolist()
        collect_stats(samples, 0, 1)
    once = replace(loader, is_once=True)
    expected_rows = [0, 1, 3, 7] if is_mixture else [0, 1, 3, 4, 7]
    assert sorted(index for rows in once.micro_batches for index in rows) == expected_rows
    expected, found = (compute_reference_losses(small_model(), each) for each in (replace(loader), once))
    assert torch.equal(found.ends, expected.ends)
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=2e-6)
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)
    values = (each.sequence_losses.sort().values for each in (found, expected))
    torch.testing.assert_close(*values, rtol=0, atol=2e-6)
    top = [compute_reference_top_k(small_model(), each, TOP_K) for each in (replace(loader), once)]
    torch.testing.assert_close(top[1].log_probs, top[0].log_probs, rtol=0, atol=2e-6)


def test_rows_carry_their_losses_in_any_order(config):
    result, samples, collate = compute(config)
    samples.reference_losses = result.row
    order = GlobalOrder(41, micro_batch=3, ranks=2, seed=3)  # shuffled; rank 1 ends with an empty row
    seen = 0
    for rank in (0, 1):
        indices = list(order.micro_batches(rank))
        for rows, batch in zip(indices, load_batches(samples, indices, collate), strict=True):
            losses = batch["pretrained_token_loss"]
            assert (losses[batch["labels"] == -100] == 0).all()
            for index, row, labels in zip(rows, losses, batch["labels"], strict=True):
                assert torch.equal(row[labels != -100], result.row(index))
                seen += int((labels != -100).sum())
    assert seen == result.losses.numel()


def test_packed_rows_give_the_same_losses(config):
    plain, _, _ = compute(config)
    config.dataset.packed = True
    packed, samples, _ = compute(config, batch_size=2)
    assert len(samples) < 41 == packed.sequence_losses.numel()
    torch.testing.assert_close(packed.losses, plain.losses, rtol=0, atol=2e-6)
    values = (each.sequence_losses.sort().values for each in (packed, plain))
    torch.testing.assert_close(*values, rtol=0, atol=2e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reference_losses_on_several_ranks_equal_one(ranks, config, tmp_path):
    """41 rows: they are never shared evenly."""
    OmegaConf.save(config, tmp_path / "config.yaml")
    code = """
        from omegaconf import OmegaConf
        from training.test_reference import compute
        from finch.distributed import parallel
        ranks = parallel.start(device, shard=False)
        result, _, _ = compute(OmegaConf.load(folder / "config.yaml"), ranks=ranks)
        tell([result.mean, result.losses.tolist(), result.ends.tolist(), sorted(result.sequence_losses.tolist())])
    """
    alone, _, _ = compute(config)
    found = on_ranks(ranks, code, tmp_path)
    assert found == found[:1] * ranks  # bit for bit the same on every rank
    mean, losses, ends, sequence_losses = found[0]
    assert ends == alone.ends.tolist()
    assert [mean, *losses] == pytest.approx([alone.mean, *alone.losses.tolist()], abs=2e-6)
    assert sequence_losses == pytest.approx(sorted(alone.sequence_losses.tolist()), abs=2e-6)


def test_rows_without_targets_raise(config):
    config.tokenizer.max_seq_len = 2
    with pytest.raises(UserError, match=r"has a target token within tokenizer\.max_seq_len"):
        compute(config)


@pytest.mark.parametrize("packed", [False, True])
def test_mixture_reads_the_rows_it_draws_and_weighs_them(packed, config, tmp_path):
    """29 rows of a task and 60% of a file that is longer than its draws, or shorter: the first epoch's samples, evaluated one by one."""
    config.batch_size = 1
    rows = tmp_path / "others.jsonl"
    write_rows(rows, 80)
    task, others = dict(config.dataset), {**config.dataset, "data_files": str(rows)}
    few = {**others, "split": "train[:9]"}
    config.dataset = [{**task, "split": "train[:29]"}, {**others, "weight": 1.0}, few]
    for entry, weight in zip(config.dataset, (1.0, 0.5, 1.0), strict=True):
        entry.update(weight=weight, packed=packed)
    config.update(collate_fn="torchtune.data.padded_collate_sft", gradient_accumulation_steps=1, epochs=3)
    config.update(shuffle=True, drop_last=False, dataset_validation=None, check_dataset=True, num_workers=0)
    data = TrainingData(config, instantiate(config.tokenizer), ONE_PROCESS, seed=5, needs_stats=True)
    result = compute_reference_losses(small_model(), data.eval_loader(data.samples, ""))

    first = data.order.permutation(0)
    drawn = {index for epoch in range(3) for index in data.order.permutation(epoch)}
    assert set(data.samples.rows) == drawn
    assert packed or (len(set(first)) < len(drawn) < len(data.samples) == 118)
    assert all((result.row(index).numel() > 0) == (index in drawn) for index in range(len(data.samples)))
    if not packed:
        expected = torch.stack([result.row(index).mean() for index in first])
        torch.testing.assert_close(result.sequence_losses.sort().values, expected.sort().values)
    samples = load_batches(data.samples, [*data.order.micro_batches(0)], data.collator(data.samples))
    model = small_model().eval()
    with torch.no_grad():
        sums = [(float(model(model_inputs(batch))["loss"].sum()), batch["targets"].numel()) for batch in samples]
    assert result.mean == pytest.approx(sum(loss for loss, _ in sums) / sum(number for _, number in sums), rel=1e-6)
    file = ReferenceFile(tmp_path / "kept", "a")
    file.save(result.tensors())
    kept = ReferenceLosses(**file.load(ONE_PROCESS))
    assert all(torch.equal(kept.tensors()[name], tensor) for name, tensor in result.tensors().items())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_reference_top_k_of_each_row(batch_size, config):
    """Probabilities of the most likely tokens, and of the rest."""
    loader_, samples, collate = evaluation(config, batch_size)
    result = compute_reference_top_k(small_model().double(), loader_, TOP_K)
    assert (result.log_probs.dtype, result.tokens.dtype) == (torch.float64, torch.int32)
    assert (result.log_probs.shape[1], result.tokens.shape[1]) == (TOP_K + 1, TOP_K)
    tops = [row.exp().topk(TOP_K) for row, _ in by_hand(samples, small_model().double())]
    rest = [1 - top.values.sum(-1, keepdim=True) for top in tops]
    order = GlobalOrder(41, micro_batch=3, ranks=2, seed=3)  # shuffled; rank 1 ends with an empty row
    for rank in (0, 1):
        indices = list(order.micro_batches(rank))
        for rows, batch in zip(indices, load_batches(samples, indices, collate), strict=True):
            found = result.add_to(batch, rows)
            assert found.keys() == batch.keys() | {"reference_log_probs", "reference_tokens"}
            assert len(found["reference_tokens"]) == len(batch["targets"])
            rows = [index for index in rows if index != EMPTY]
            values = torch.cat([torch.cat([tops[index].values, rest[index]], -1) for index in rows])
            torch.testing.assert_close(found["reference_log_probs"].exp(), values, rtol=0, atol=1e-12)
            assert torch.equal(found["reference_tokens"].long(), torch.cat([tops[index].indices for index in rows]))


def test_file_counts_only_complete_and_under_its_fingerprint(tmp_path):
    path = tmp_path / "reference.safetensors"
    file = ReferenceFile(path, "a")
    assert file.load(ONE_PROCESS) is None
    tensors = {"losses": torch.randn(7), "ends": torch.tensor([3, 7])}
    file.save(tensors)
    again = ReferenceFile(path, "a").load(ONE_PROCESS)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert ReferenceFile(path, "b").load(ONE_PROCESS) is None
    path.write_bytes(path.read_bytes()[:-8])
    assert file.load(ONE_PROCESS) is None


def test_a_file_that_was_changed_is_computed_again_and_one_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    file = ReferenceFile(tmp_path / "caches" / "reference.safetensors", "a")
    tensors = {"losses": torch.randn(7).bfloat16(), "tokens": torch.arange(3).int()}
    file.save(tensors)
    assert [path.name for path in file.path.parent.iterdir()] == ["reference.safetensors"]
    content = file.path.read_bytes()
    for change in ("flip", "others", "none"):
        if change == "flip":
            file.path.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
        else:  # right names, shapes and fingerprint, as of an earlier finch, or by hand
            digest = {} if change == "none" else {"digest": "0" * 64}
            save_file({**tensors, "losses": torch.randn(7)}, file.path, {"fingerprint": "a", **digest})
        caplog.clear()
        assert not file.exists
        assert file.load(ONE_PROCESS) is None
        assert "is not as it was written; it is computed again" in caplog.text
    file.path.unlink()
    for make in (os.mkfifo, os.mkdir):
        make(file.path)
        assert file.load(ONE_PROCESS) is None
        file.save(tensors)  # takes the place of a pipe
        assert file.exists == (make is os.mkfifo)
        if make is os.mkfifo:
            file.path.unlink()
    assert "cannot be saved (Is a directory); the next start computes it again" in caplog.text


def test_fingerprint_covers_weights_rows_and_settings(tmp_path):
    file, moved, tuned = (tmp_path / name / "model.safetensors" for name in ("", "elsewhere", "tuned"))
    for path, value in ((file, 0.0), (moved, 0.0), (tuned, 1.0)):
        path.parent.mkdir(exist_ok=True)
        save_file({"a": torch.full((1000, 2500), value)}, path)
    settings = {"dtype": "bf16"}
    one = fingerprint_of([file], 1, settings)
    assert one == fingerprint_of([file], 1, settings) == fingerprint_of([moved], 1, settings)
    others = {fingerprint_of([tuned], 1, settings), fingerprint_of([file], 2, settings)}
    others |= {fingerprint_of([file], 1, {"dtype": "fp32"}), fingerprint_of([file, moved], 1, settings)}
    assert len({one, *others}) == 5


def test_a_models_folder_counts_by_its_config(tmp_path):
    found = []
    for name, theta in (("here", 1e4), ("elsewhere", 1e4), ("other", 1e6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": theta}))
        model = {"_component_": "finch.models.auto", "path": str(tmp_path / name)}
        found.append(model_settings(OmegaConf.create({"model": model, "dtype": "fp32"})))
    assert found[0] == found[1] != found[2]


def test_fingerprint_covers_each_tensor(tmp_path):
    """A merged adapter may have changed one of them, between the pieces that are read of a file."""
    tensors = {f"layer.{index}": torch.zeros(500, 500) for index in range(40)} | {"scale": torch.zeros(())}
    save_file(tensors, tmp_path / "model.safetensors")
    found = {fingerprint_of([tmp_path / "model.safetensors"], 1, {})}
    for name in ("layer.3", "layer.20", "scale"):
        save_file({**tensors, name: tensors[name] + 1}, tmp_path / "model.safetensors")
        found.add(fingerprint_of([tmp_path / "model.safetensors"], 1, {}))
    assert len(found) == 4
