"""One optimizer step is the same on every layout, and equals a few lines of plain torch in float64."""

import json
import math

import pytest
import torch
from helpers.runs import llama_args, make_config, relative_l2, tune_run, weights, write_rows

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_step_equals_plain_float64_torch_on_every_layout(ranks, micro_batches, tmp_path, base_folder):
    """Invariance of docs: loss and update equal in float64 to 1e-12, micro-batches without any target token included."""
    import random

    random.seed(5)
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, 30)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for index in (0, 1, 7):
        lines[index]["question"] = (
            "the old red fox sings near a stone " * 12
        )  # longer than max_seq_len: no target token
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {
        "dtype": "fp64",
        "batch_size": 2,
        "gradient_accumulation_steps": micro_batches,
        "shuffle": False,
        "epochs": 2,
    }
    config = make_config(base_folder, rows, tmp_path / "run", **changes)
    run = tune_run(tmp_path, config, ranks=None if ranks == 1 else ranks)
    assert run.returncode == 0, run.output[-3000:]
    assert "3 of 30 samples have no target token" in run.output
    reference = _float64_reference(base_folder, config)
    for name, expected in reference.items():
        if name != "weights":
            assert run.column(name) == pytest.approx(expected, rel=1e-12), name
    result = weights(run.folder / "epoch_1")
    assert relative_l2(result, reference["weights"]) < 1e-12


def _float64_reference(base, config):
    """The same training in a few lines of plain torch: one batch a step, AdamW, the equation of Section 3.3."""
    import torch.nn.functional as F
    from omegaconf import OmegaConf
    from torchtune.config import instantiate
    from torchtune.models.convert_weights import tune_to_hf
    from torchtune.models.llama2 import llama2
    from torchtune.training import set_default_dtype

    from finch.models.rotary import use_complex_product
    from finch.weights.huggingface import HuggingFaceFolder

    with set_default_dtype(torch.float64):
        model = llama2(**llama_args())
    use_complex_product(model)  # torchtune's own rotates in fp32
    model.load_state_dict(dict(HuggingFaceFolder(str(base)).weights()))
    cfg = OmegaConf.create(config)
    samples = list(instantiate(cfg.dataset, instantiate(cfg.tokenizer)))

    def sums(rows):
        total, count = 0, 0
        for row in rows:  # one sample at a time: no padding
            tokens, labels = torch.tensor(row["tokens"]), torch.tensor(row["labels"])
            hidden = model.norm(_hidden(model, tokens[None]))
            total = total + F.cross_entropy(
                model.output(hidden)[0, :-1], labels[1:], reduction="sum", ignore_index=-100
            )
            count += int((labels[1:] != -100).sum())
        return total, count

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    with torch.no_grad():
        total, count = sums(samples)
    average = float(total / count)
    found = {"loss": [], "ema_loss": [], "lr": [], "grad_norm": []}
    for _ in range(2):
        for start in range(0, len(samples), 8):
            total, count = sums(samples[start : start + 8])
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            average = 0.9 * average + 0.1 * float(loss)
            optimizer.param_groups[0]["lr"] = min(2e-3 / math.sqrt(average + 1e-8), 5e-3)
            optimizer.step()
            for name, value in (
                ("loss", float(loss)),
                ("ema_loss", average),
                ("lr", optimizer.param_groups[0]["lr"]),
                ("grad_norm", float(norm)),
            ):
                found[name].append(value)
    size = llama_args()
    found["weights"] = tune_to_hf(model.state_dict(), size["num_heads"], size["num_kv_heads"], size["embed_dim"])
    return found


def _hidden(model, tokens):
    hidden = model.tok_embeddings(tokens)
    for layer in model.layers:
        hidden = layer(hidden)
    return hidden
