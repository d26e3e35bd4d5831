"""Greedy answers against transformers' generate; sampled ones by their cumulative probabilities; files under a fingerprint."""

import pytest
import torch
from helpers import models
from helpers.ranks import on_ranks
from helpers.runs import llama_args
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.models.llama2 import llama2

from finch.base.errors import UserError
from finch.data.prompts import Prompts
from finch.distributed.parallel import Parallel
from finch.objectives.replay import uniform_draws
from finch.training import own_answers
from finch.training.chunked_loss import TokenLoss

PARALLEL = Parallel(torch.device("cpu"))
PROMPTS = [[3, 7, 11], [40, 41, 42, 43, 44, 45, 46, 47], [5], [60, 3, 9, 60, 3]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TokenLoss(llama2(**llama_args())).double()


def generate(model, temperature, stop_tokens=(), number=6, dtype=torch.float64):
    draws = uniform_draws(len(PROMPTS), number, 0)
    options = {"max_new_tokens": number, "dtype": dtype, "parallel": PARALLEL}
    found = own_answers.generate(model, PROMPTS, draws, temperature, stop_tokens, **options)
    return [answer["tokens"] for answer in found], draws


@pytest.mark.parametrize("family", ["llama", "llama 3.2", "mistral", "qwen2", "qwen3 tied", "gemma", "gemma2", "phi3"])
def test_greedy_answers_equal_transformers(family, tmp_path, monkeypatch):
    """Prompts of unequal lengths in batches of three; the stop tokens are two that some answers have."""
    monkeypatch.setattr(own_answers, "BATCH_ROWS", 3)
    reference = models.save(family, tmp_path)
    _, decoder = models.load(family, tmp_path)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [reference.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    stops = {expected[0][4], expected[1][8]}
    for answer in expected:
        first = next((index for index, token in enumerate(answer) if token in stops), len(answer))
        del answer[first + 1 :]
    model = TokenLoss(decoder).train()
    assert generate(model, 0.0, stops, 12, torch.float32)[0] == expected
    assert min(map(len, expected)) < 12
    assert model.training
    assert not decoder.caches_are_setup()


@torch.no_grad()
def by_definition(model, temperature, draws):
    """One prompt at a time, without a cache."""
    decoder, found = model.decoder, []
    for prompt, row in zip(PROMPTS, draws, strict=True):
        tokens = list(prompt)
        for draw in row:
            hidden = decoder.tok_embeddings(torch.tensor([tokens]))
            for layer in decoder.layers:
                hidden = layer(hidden)
            weights = (decoder.output(decoder.norm(hidden))[0, -1] / temperature).exp()
            tokens.append(int((weights.cumsum(0) / weights.sum() <= draw).sum()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("rows", [32, 3])
def test_continuations_are_sampled_one_seed_per_prompt(temperature, rows, model, monkeypatch):
    monkeypatch.setattr(own_answers, "BATCH_ROWS", rows)
    found, draws = generate(model, temperature)
    assert found == by_definition(model, temperature, draws)
    assert len({tuple(answer) for answer in found}) == len(PROMPTS)


def test_a_stop_token_ends_an_answer(model):
    every, _ = generate(model, 1.0)
    stop = every[0][2]
    found, _ = generate(model, 1.0, {stop})
    assert found == [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in every]


class Answers:
    """Answers to prompts that the model writes itself."""

    def __init__(self, folder, **options):
        options = {"stop_tokens": [2], "max_new_tokens": 4, "top_k": 8, "temperature": 1.0, **options}
        prompts = Prompts([[1, 5]] * 3, [6, 7])
        self.own = own_answers.OwnAnswers("self_replay", folder / "run" / "answers.safetensors", prompts, **options)

    def load(self):
        return self.own.load([], {}, PARALLEL)

    def generate(self, model):
        self.own.generate(model, PARALLEL, torch.float64)
        return self.own.samples


def test_own_prompts_are_user_turns_and_what_follows_them(model, tmp_path):
    answers = Answers(tmp_path)
    assert not answers.load()
    samples = answers.generate(model)
    for sample in samples:
        number = sum(label != -100 for label in sample["labels"])
        prompt = sample["tokens"][:-number]
        assert prompt[:2] == [1, 5]
        assert prompt[-2:] == [6, 7]
    assert len({tuple(sample["tokens"][:6]) for sample in samples}) == 3


def test_references_are_the_distributions_of_a_forward_pass_over_the_answer(model, tmp_path, monkeypatch):
    """Two prompts at a time, of which the first to end leaves the batch."""
    monkeypatch.setattr(own_answers, "BATCH_ROWS", 2)
    monkeypatch.setattr(own_answers, "KEPT_SHARE", 0.5)
    answers = Answers(tmp_path, stop_tokens=range(0, llama_args()["vocab_size"], 5), max_new_tokens=12, temperature=0.5)
    answers.load()
    samples = answers.generate(model.eval())
    numbers = [sum(label != -100 for label in sample["labels"]) for sample in samples]
    assert len(set(numbers)) == 3
    for sample, number in zip(samples, numbers, strict=True):
        tokens = torch.tensor([sample["tokens"]])
        expected = model.decoder.output(model.decoder.norm(model.decoder(tokens)))[0, -number - 1 : -1].log_softmax(-1)
        top = expected.topk(8)
        assert torch.equal(sample["reference_tokens"].long(), top.indices)
        rest = (1 - top.values.exp().sum(-1, keepdim=True)).log()
        torch.testing.assert_close(sample["reference_log_probs"], torch.cat([top.values, rest], 1))


def test_another_run_reads_the_answers_from_the_cache(model, tmp_path):
    first = Answers(tmp_path / "one", cache=tmp_path / "cache")
    first.load()
    samples = first.generate(model)
    for other in (
        Answers(tmp_path / "one"),
        Answers(tmp_path / "two", cache=tmp_path / "cache"),
        Answers(tmp_path / "two"),
    ):
        assert other.load()  # the last one from what the second has left in its own folder
        for sample, expected in zip(other.own.samples, samples, strict=True):
            assert sample.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(sample[key]), torch.as_tensor(value)), key
    assert not Answers(tmp_path / "two", cache=tmp_path / "cache", temperature=0.5).load()


def test_only_empty_answers_are_an_error(model, tmp_path):
    answers = Answers(tmp_path, stop_tokens=range(llama_args()["vocab_size"]))
    answers.load()
    with pytest.raises(
        UserError, match="self_replay: the pretrained model answers none of the prompts; give other ones"
    ):
        answers.generate(model)


class DeviceReads(TorchDispatchMode):
    """Counts what waits for a device to read a number off it."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


def test_no_layer_reads_the_device(model):
    with DeviceReads() as reads:
        generate(model, 0.0)
    assert reads.number == 0


GENERATE = """
    from torch.utils._python_dispatch import TorchDispatchMode
    from finch.distributed import fsdp, parallel
    from finch.training import own_answers
    from finch.training.chunked_loss import TokenLoss
    from helpers.runs import llama_args
    from torchtune.models.llama2 import llama2
    class Gathers(TorchDispatchMode):
        number = 0
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function is torch.ops.c10d._allgather_base_.default
            return function(*args, **(kwargs or {}))
    ranks = parallel.start(device, shard=True)
    torch.manual_seed(0)
    model = TokenLoss(llama2(**llama_args())).double()
    options = {"max_new_tokens": 6, "dtype": torch.float64, "parallel": ranks}
    prompts = [[3, 7, 11], [40, 41, 42, 43], [5], [60, 3, 9]]
    draws, batch = torch.zeros(4, 6), {"tokens": torch.tensor([[3, 7]]), "labels": torch.tensor([[7, 3]])}
    alone = own_answers.generate(model, prompts, draws, 0.0, [], **{**options, "parallel": parallel.Parallel(device)})
    fsdp.shard_model(model, model.decoder.layers, ranks)
    def gathers(compute):
        with Gathers() as found:
            compute()
        return found.number
    def train():
        model(batch)["loss"].sum().backward()
    def answer():
        assert own_answers.generate(model, prompts, draws, 0.0, [], **options) == alone
    counts = [gathers(train), gathers(answer), gathers(train)]
    fsdp.free_memory = lambda device: 0 if ranks.rank else None
    counts += [gathers(answer), gathers(train)]
    tell(counts)
"""


def test_weights_are_gathered_once_for_all_tokens_where_every_rank_has_room(tmp_path):
    groups = llama_args()["num_layers"] + 1
    train, once, after, each, after_each = on_ranks(2, GENERATE, tmp_path)[0]
    assert once == groups
    assert each == 6 * groups
    assert train == after == after_each > groups
