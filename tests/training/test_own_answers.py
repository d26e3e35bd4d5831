"""Sampled continuations: by their cumulative probabilities, the same whatever the batch; files under a fingerprint. Greedy: tests/recipes/test_probes.py."""

import pytest
import torch
from helpers.runs import llama_args
from torchtune.models.llama2 import llama2

from finch.data.loader import EvalSettings
from finch.data.prompts import Prompts
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.training import own_answers
from finch.training.chunked_loss import TokenLoss

PARALLEL = Parallel(torch.device("cpu"))
PROMPTS = [[1, 5, 9], [1], [1, 7, 3, 3, 8], [1, 2]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TokenLoss(llama2(**llama_args())).double()


def generate(model, temperature, stop_tokens=(), number=6):
    draws = own_answers._draws(len(PROMPTS), number, 0)
    options = {"max_new_tokens": number, "dtype": torch.float64, "parallel": PARALLEL}
    return own_answers.generate(model, PROMPTS, draws, temperature, stop_tokens, **options), draws


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
        collate = lambda rows: {  # noqa: E731
            "tokens": torch.nn.utils.rnn.pad_sequence([torch.tensor(row["tokens"]) for row in rows], True),
            "labels": torch.nn.utils.rnn.pad_sequence(
                [torch.tensor([*row["labels"][1:], -100]) for row in rows], True, -100
            ),
        }
        self.own.generate(model, EvalSettings(PARALLEL, lambda samples: collate, 2), torch.float64)
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
        assert sample["reference_log_probs"].shape == (number, 9)
    assert len({tuple(sample["tokens"][:6]) for sample in samples}) == 3


def test_another_run_reads_the_answers_from_the_cache(model, tmp_path):
    first = Answers(tmp_path / "one", cache=tmp_path / "cache")
    first.load()
    samples = first.generate(model)
    for other in (Answers(tmp_path / "one"), Answers(tmp_path / "two", cache=tmp_path / "cache"), Answers(tmp_path / "two")):
        assert other.load()  # the last one from what the second has left in its own folder
        for sample, expected in zip(other.own.samples, samples, strict=True):
            assert sample.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(sample[key]), torch.as_tensor(value)), key
    assert not Answers(tmp_path / "two", cache=tmp_path / "cache", temperature=0.5).load()


def test_only_empty_answers_are_an_error(model, tmp_path):
    answers = Answers(tmp_path, stop_tokens=range(llama_args()["vocab_size"]))
    answers.load()
    with pytest.raises(UserError, match="self_replay: the pretrained model answers none of the prompts; give other ones"):
        answers.generate(model)
