"""The harness's model: log-likelihoods and texts against plain transformers, batches, memory, and numbers that are not finite."""

import random
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.tiny_text import WORDS
from finch.base.errors import UserError
from finch.distributed.parallel import Parallel
from finch.evaluation.language_model import (
    AnswerCache,
    LanguageModel,
    Limits,
    Row,
    count_requests,
    form_batches,
    group_rows,
    logits_to_keep,
)
from finch.evaluation.loading import on_prompt_day
from finch.evaluation.progress import EvaluationProgress


@pytest.fixture
def model(base_folder):
    return AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32).eval()


@pytest.fixture
def make(base_folder, model):
    def make_model(batch_size="auto", **options):
        return LanguageModel(
            model,
            AutoTokenizer.from_pretrained(base_folder, **options),
            name="--base=here",
            batch_size=batch_size,
            ranks=Parallel(torch.device("cpu")),
            progress=EvaluationProgress([], is_shown=False),
        )

    return make_model


def instances(kind, arguments):
    """Requests of one task, a document each."""
    return [Instance(kind, {}, each, 0, ("some_task", number, 1)) for number, each in enumerate(arguments)]


def log_likelihoods(lm, requests):
    return [value for value, _ in lm.loglikelihood(instances("loglikelihood", requests))]


def generate(lm, *prompts, until=(), max_gen_toks):
    settings = {"until": list(until), "max_gen_toks": max_gen_toks, "do_sample": False}
    return lm.generate_until(instances("generate_until", [(prompt, settings) for prompt in prompts]))


def pairs(number, seed=0):
    rng = random.Random(seed)
    return [
        (" ".join(rng.choices(WORDS, k=rng.randint(1, 6))), " " + " ".join(rng.choices(WORDS, k=rng.randint(1, 4))))
        for _ in range(number)
    ]


def reference(model, tokenizer, context, continuation):
    """One sequence at a time, as transformers computes it."""
    length = len(tokenizer(context).input_ids)
    tokens = torch.tensor(tokenizer(context + continuation).input_ids)
    with torch.no_grad():
        log_probabilities = model(tokens[None]).logits[0].float().log_softmax(-1)
    scored = log_probabilities[length - 1 : -1].gather(1, tokens[length:, None])
    return scored.sum().item()


def test_log_likelihoods_equal_transformers(make, model):
    letters = [("the fox", f" {letter}") for letter in "abcdabcd"]  # choices that share a row
    requests = pairs(40) + letters
    lm = make()
    expected = [reference(model, lm.tokenizer, *request) for request in requests]
    assert log_likelihoods(lm, requests) == pytest.approx(expected, abs=1e-4)


def test_output_layer_runs_only_on_scored_positions(make, model):
    sizes = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape[1]))
    log_likelihoods(make(), [(" ".join(WORDS[:8]), " fox")])
    assert sizes[0] < 5


def test_texts_equal_transformers_greedy(make, model):
    lm, prompts = make(), [context for context, _ in pairs(9)]
    for text, prompt in zip(generate(lm, *prompts, until=["\n"], max_gen_toks=7), prompts, strict=True):
        tokens = torch.tensor([lm.tok_encode(prompt)])
        with torch.no_grad():
            answer = model.generate(tokens, max_new_tokens=7, do_sample=False, pad_token_id=0)[0, tokens.shape[1] :]
        assert text == lm.tok_decode(answer.tolist()).split("\n")[0]


@pytest.mark.parametrize(
    "folders",
    [
        {"max_length": 3, "max_new_tokens": 2},
        {"min_new_tokens": 9},
        {"repetition_penalty": 5.0},
        {"num_beams": 3, "no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(10, 40))},
    ],
)
def test_settings_of_the_folder_do_not_count(make, model, folders):
    prompts, own = [context for context, _ in pairs(9)], model.generation_config
    expected = generate(make(), *prompts, max_gen_toks=7)
    model.generation_config = GenerationConfig(**own.to_dict() | folders)
    assert generate(make(), *prompts, max_gen_toks=7) == expected


PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize ~ ': ' ~ m.content }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"
)


def test_space_before_an_answer_is_the_templates(make, model):
    """It is scored with an answer, as it was trained, and left to the model where that writes the answer."""
    lm = make(chat_template=PLAIN)
    prompt, bare = lm.apply_chat_template([{"role": "user", "content": "the fox"}]), "User: the fox\nAssistant:"
    [value] = log_likelihoods(lm, [(prompt, "bird")])
    assert value == pytest.approx(reference(model, lm.tokenizer, bare, " bird"), abs=1e-4)
    assert generate(lm, prompt, max_gen_toks=7) == generate(make(), bare, until=["\nUser:"], max_gen_toks=7)


def test_a_template_that_does_not_end_for_a_row_is_refused(make, monkeypatch):
    monkeypatch.setattr("finch.models.chat_environment.CPU_SECONDS", 0.5)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    lm = make(chat_template="{% if messages[0].content | length > 3 %}" + endless + "{% endif %}")
    with pytest.raises(UserError, match="its chat template does not end well"):
        lm.apply_chat_template([{"role": "user", "content": "the fox"}])


def test_an_answer_ends_with_the_templates_token_and_with_the_models_own(make, model, base_folder):
    """A base model's own end is not that of its turns; one that was tuned knows both, and they are compared."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    closing = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<s>\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
    lm = make(chat_template=closing)
    assert lm.model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.bos_token_id]
    prompt = torch.tensor([lm.tok_encode("the red bird")])
    free = lm.model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1)[0, prompt.shape[1] :]
    lm.model.generation_config.eos_token_id[1] = int(free[3])  # as if the model had written it
    [text] = generate(lm, "the red bird", max_gen_toks=8)
    assert text == lm.tok_decode(free[: list(free).index(free[3]) + 1].tolist())


@pytest.mark.parametrize(("template", "ends"), [(PLAIN, ["\nUser:"]), (PLAIN.replace("': '", "'\n'"), [])])
def test_answer_ends_where_a_plain_user_turn_begins(make, monkeypatch, template, ends):
    lm, seen = make(chat_template=template), []
    monkeypatch.setattr(lm, "_generate", lambda rows, requests: seen.extend(requests.values()) or [""])
    generate(lm, "the fox", until=["."], max_gen_toks=7)
    assert [request.args[1]["until"] for request in seen] == [[".", *ends]]


def test_an_answer_ends_with_a_token_that_decoding_keeps(make, monkeypatch):
    tokenizer_class = type(make().tokenizer)
    closing = {0: SimpleNamespace(content="<|end|>", special=False)}
    monkeypatch.setattr(tokenizer_class, "added_tokens_decoder", closing)
    lm, seen = make(chat_template=PLAIN.replace("m.content", "m.content ~ '<|end|>'")), []
    monkeypatch.setattr(lm, "_generate", lambda rows, requests: seen.extend(requests.values()) or [""])
    generate(lm, "the fox", max_gen_toks=7)
    assert "<|end|>" in seen[0].args[1]["until"]


def test_the_templates_day_is_always_the_same(make):
    template = on_prompt_day("{{ strftime_now('%d %b %Y') }}" + PLAIN)
    assert (
        make(chat_template=template).apply_chat_template([{"role": "user", "content": "a"}]).startswith("26 Jul 2024")
    )


def test_short_context_limits_the_answer(make, caplog):
    lm = make()
    [text] = generate(lm, "the fox", max_gen_toks=1280)
    assert len(lm.tokenizer(text, add_special_tokens=False).input_ids) <= 40
    assert "end after 32 tokens in place of 1280: the model's context has 64" in caplog.text


def test_long_requests_are_counted(make, caplog):
    log_likelihoods(make(), [(" ".join(WORDS * 5), " fox"), ("the", " fox")])
    assert "1 of 2 requests are longer than the model's 64 tokens" in caplog.text


def test_numbers_that_are_not_finite_are_refused(make, model):
    with torch.no_grad():
        model.lm_head.weight[3] = float("inf")
    document = "^--base=here: task some_task, document 0: the "
    with pytest.raises(UserError, match=f"{document}log-likelihood .* is nan; check"):
        log_likelihoods(make(), pairs(1))
    with pytest.raises(UserError, match=f"{document}logits after the prompt are not finite"):
        generate(make(), "the fox", max_gen_toks=4)


def test_perplexity_is_refused(make):
    with pytest.raises(UserError, match="measures perplexity"):
        make().loglikelihood_rolling(instances("loglikelihood_rolling", [("the fox",)]))


def test_batch_is_halved_where_memory_is_short(make, model, monkeypatch):
    expected, forward = log_likelihoods(make(), pairs(20)), model.forward

    def limited(input_ids, **options):
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(input_ids, **options)

    monkeypatch.setattr(model, "forward", limited)
    lm = make()
    lm._can_keep_logits = True
    assert log_likelihoods(lm, pairs(20)) == pytest.approx(expected, abs=1e-4, rel=0)


def test_automatic_batch_is_bounded_by_memory(make, monkeypatch):
    lm = make()
    monkeypatch.setattr(lm._sizes, "vocab_size", 2**24)  # a position takes 128 MB
    counts, score = [], lm._score
    monkeypatch.setattr(lm, "_score", lambda rows, requests: counts.append(len(rows)) or score(rows, requests))
    log_likelihoods(lm, pairs(20))
    assert max(counts) <= 8


@pytest.mark.parametrize(
    ("requests", "rows"),
    [
        ([([1, 2], [3, 4]), ([1], [2]), ([5, 6, 7], [8, 9])], [Row([2], 4, 2), Row([0], 3, 2), Row([1], 1, 1)]),
        ([([1, 2, 3], [letter]) for letter in (10, 11, 12, 13)], [Row([0, 1, 2, 3], 3, 1)]),
        ([(list(range(50)), [1, 2])], [Row([0], 8, 2)]),
    ],
    ids=["sorted by length", "choices of one token share a row", "end at the model's context"],
)
def test_rows_of_requests(requests, rows):
    assert group_rows(requests, max_length=8) == rows


def test_kept_logits_reach_every_scored_token():
    # Padded on the right: a row of 4 in a batch of 10 ends 6 positions before the end.
    assert logits_to_keep([Row([0], 10, 1), Row([1], 4, 3)]) == 9
    assert logits_to_keep([Row([0], 10, 2)]) == 2


def test_batches_stay_within_each_limit():
    rows = [Row([index], length) for index, length in enumerate((9, 8, 8, 3, 2, 1))]

    def sizes(limits):
        return [len(batch) for batch in form_batches(rows, limits)]

    assert sizes(Limits(4)) == [4, 2]
    assert sizes(Limits(4, tokens=18)) == [2, 2, 2]
    assert sizes(Limits(4, tokens=1)) == [1] * 6
    assert sizes(Limits(64, bytes=30, size=lambda batch: 10 * len(batch))) == [3, 3]


def test_generated_answers_count_as_several():
    long = instances("generate_until", [("a", {"max_gen_toks": 100}), ("b", {"max_gen_toks": 100})])
    assert count_requests(long) == 2 + 2 * 20
    assert count_requests(instances("loglikelihood", [("a", "b")] * 3)) == 3


def test_another_models_answers_are_dropped(tmp_path):
    path = tmp_path / "answers.jsonl"
    cache = AnswerCache(path, "model a")
    cache.put("one", [[-1.1000000238418579, True]])
    cache.close()
    assert AnswerCache(path, "model a").get("one") == [[-1.1000000238418579, True]]
    other = AnswerCache(path, "model b")
    assert (other.num_read, other.get("one")) == (0, None)
    other.close()
    assert AnswerCache(path, "model a").num_read == 0
