"""`finch evaluate --judge` against a stand-in server: known judges give known scores, nothing is sent twice, the budget holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.chat_server import chat_server, completion, finch_with_key, refusal

pytest.importorskip("openai", reason="the openai extra is not installed")
pytest.importorskip("scipy", reason="the evaluate extra is not installed")

from finch.evaluation.judge import MIN_FIRST_ANSWERS, VERDICTS, answers_definition, parse_verdict
from finch.evaluation.results import SuiteResult, TaskResult, read_result, read_samples, write_result
from finch.evaluation.statistics import paired_delta

N = 6
CALLS = 2 * N
TASK = "galician_alpaca"


@pytest.fixture
def server(monkeypatch):
    with chat_server(monkeypatch) as state:
        state.answer = prefers("tuned")
        yield state


def write_answers(folder: Path, name: str, base: str | None, n: int = N, prompt: str = "Escribe {}.") -> Path:
    """A result of `finch evaluate --suite language`: answers without scores."""
    file = f"language.{TASK}.jsonl"
    task = TaskResult("new", "win_tie_rate", "greedy, chat template", None, 0, file, others={"mean_length": 3.0})
    result = SuiteResult("language", f"/models/{name}", name, base is None, base, {"limit": None}, {}, {TASK: task})
    samples = [
        {"doc_id": i, "doc_hash": f"h{i}", "prompt": prompt.format(i), "response": f"{name} {i}", "score": None}
        for i in range(n)
    ]
    return write_result(folder, result, {TASK: samples})


@pytest.fixture
def folders(tmp_path):
    """The base model's results and a run's."""
    base, run = tmp_path / "out" / "base-0123", tmp_path / "run"
    write_answers(base, "base", None)
    write_answers(run / "evaluation", "tuned", "../../out/base-0123/language.json")
    return base, run


@pytest.fixture
def judge(server, tmp_path, folders, capsys):
    def judge(*options, results=(folders[1],), model="m"):
        command = ["evaluate", *map(str, results), "--judge", server.url, "--model", model, *options]
        return finch_with_key(capsys, tmp_path, *command)

    return judge


def answers_in(text):
    return re.findall(r"<answer_[ab]>\n(.*)\n</answer_[ab]>", text)


def prefers(word):
    """A judge that finds answers with a word much better."""

    def answer(_, text):
        first, second = (word in each for each in answers_in(text))
        return completion(f"Reasons: [[A=B]]?\n\n[[{'A=B' if first == second else 'A>>B' if first else 'B>>A'}]]\n")

    return answer


def says(text):
    return lambda *_: completion(text)


def task_of(folder):
    return read_result(folder / "language.json").tasks[TASK]


def samples_of(folder):
    return read_samples(folder, task_of(folder))


def test_parse_verdict_is_strict():
    verdicts = {f"Because.\n[[{verdict}]]": verdict for verdict in VERDICTS}
    verdicts |= {"**Verdict: [[A>B]]**\n\n": "A>B", "[[A>B]] at first, but\n[[B>A]]": "B>A"}
    none = ("", "A is better", "[[A>B]]\nThat is all.", "[[A>B]] or [[A=B]]", "[[A>B]] and [[A>B]]", "[[A<B]]")
    verdicts |= dict.fromkeys((*none, "[[A > B]]", "[A>B]", "[[A>B]] [[C]]"))
    assert {text: parse_verdict(text) for text in verdicts} == verdicts


@pytest.mark.parametrize(
    ("answer", "score", "agreement", "first"),
    [
        (prefers("tuned"), 1.0, 1.0, 0.5),
        (prefers("base"), 0.0, 1.0, 0.5),
        (says("[[A=B]]"), 0.5, 1.0, 0.5),
        (says("[[A>B]]"), 0.5, 0.0, 1.0),
    ],
    ids=["tuned", "base", "tie", "always A"],
)
def test_known_judges_give_known_scores(judge, server, folders, answer, score, agreement, first):
    server.answer = answer
    base, run = folders
    code, out, _ = judge()
    assert code == 0
    assert re.search(rf"language.json: win_tie_rate {100 * score:.1f} \([\d.]+ to [\d.]+\), n 6; strict_win_rate ", out)
    task = task_of(run / "evaluation")
    assert (task.score, task.n, task.metric, task.role) == (score, N, "win_tie_rate", "new")
    others = {"order_agreement": agreement, "first_answer_score": first, "unparsed": 0, "mean_length": 3.0}
    assert task.others.items() >= others.items()
    assert [sample["score"] for sample in samples_of(run / "evaluation")] == [score] * N
    assert (task_of(base).score, task_of(base).n) == (0.5, N)
    assert paired_delta(samples_of(base), samples_of(run / "evaluation")).mean == score - 0.5
    assert len(server.texts) == CALLS


def sign(verdict):
    """1 where the verdict is for A, -1 for B."""
    return ("A>" in verdict) - ("B>" in verdict)


def test_numbers_follow_from_the_samples(judge, server, folders):
    """Win-tie rate and the others from the verdicts, by the definition."""
    replies = ["[[A>>B]]", "[[A>B]]", "[[A=B]]", "[[B>A]]", "[[B>>A]]", "no verdict", "[[A>B]] [[B>A]]", "[[B>A]]"]
    server.answer = lambda number, _: completion(replies[number % 8])
    folder = folders[1] / "evaluation"
    assert judge("--concurrency", "1")[0] == 0
    outcomes, unparsed = [], 0
    for sample in samples_of(folder):
        tuned_first, base_first = sample["verdicts"]["tuned_first"], sample["verdicts"]["base_first"]
        unparsed += (tuned_first is None) + (base_first is None)
        if tuned_first and base_first:
            outcomes.append(("LTW"[sign(tuned_first) + 1], "LTW"[1 - sign(base_first)]))
        else:
            assert sample["score"] is None
    task, flat = task_of(folder), "".join(map("".join, outcomes))
    assert (task.n, len(flat), unparsed) == (4, 8, 2)
    assert task.score == (flat.count("W") + flat.count("T") / 2) / len(flat)
    rates = {"strict_win_rate": "W", "tie_rate": "T", "loss_rate": "L"}
    assert {name: task.others[name] for name in rates} == {name: flat.count(each) / 8 for name, each in rates.items()}
    assert len(set(flat)) == 3
    assert task.others["order_agreement"] == sum(one == other for one, other in outcomes) / 4
    assert task.others["unparsed"] == 2 / CALLS


def test_control_gives_fifty(judge, server, folders):
    base, run = folders
    server.answer = says("I like the first.\n[[A>B]]")
    code, out, _ = judge("--control")
    assert code == 0
    assert "control 50 on 6 documents; equal answers are ties in 0.0%, and the first one gets " in out
    assert len(server.texts) == N  # both orders of equal answers are one request
    task = task_of(base)
    assert (task.score, task.others["control_score"], task.others["control_first_answer_score"]) == (0.5, 0.5, 1.0)
    assert task_of(run / "evaluation").score is None
    assert judge()[0] == 0
    assert task_of(base) == task  # kept
    assert judge("--control", results=[base])[0] == 0
    assert len(server.texts) == N + CALLS
    assert task.definition.endswith("0.5 by definition; control by m with prompt 1")
    assert judge(model="another")[0] == 0
    assert task_of(base) == task  # it names its judge
    assert judge("--control", model="another")[0] == 0
    assert task_of(base).definition == task.definition.replace("by m with", "by another with")


def test_nothing_is_sent_twice(judge, server, folders):
    base, run = folders
    assert judge()[0] == 0
    files = {path: path.read_bytes() for path in (*base.iterdir(), *(run / "evaluation").iterdir())}
    for path in (run, run / "evaluation", run / "evaluation" / "language.json"):
        assert judge(results=[path])[0] == 0
    assert len(server.texts) == len(set(server.texts)) == CALLS
    assert files == {path: path.read_bytes() for path in files}


def test_another_judge_judges_again(judge, server, folders):
    assert judge()[0] == 0
    first = task_of(folders[1] / "evaluation")
    server.answer = prefers("base")
    assert judge(model="better")[0] == 0
    second = task_of(folders[1] / "evaluation")
    assert len(server.texts) == 2 * CALLS
    assert (first.score, second.score) == (1.0, 0.0)
    assert "judgements of m with prompt 1: both orders" in first.definition
    assert second.definition == first.definition.replace("of m with", "of better with")
    assert answers_definition(second.definition) == "greedy, chat template"


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("Which is {better}?", None),
        ("Which?\n=====\nOf {instruction}: {first}{second}{{}}", "Of Escribe 0.: tuned 0base 0{{}}"),
    ],
)
def test_prompt_of_a_file(judge, server, tmp_path, folders, text, turn):
    """As it is, braces and all; the definition names it."""
    server.answer = says("[[A=B]]")
    (tmp_path / "b4.txt").write_text(text)
    assert judge("--prompt", str(tmp_path / "b4.txt"), "--concurrency", "1", "--limit", "1")[0] == 0
    system, user = (message["content"] for message in server.requests[0]["messages"])
    assert system == text.partition("\n=====")[0]
    assert user == turn or (turn is None and answers_in(user) == ["tuned 0", "base 0"])
    assert re.search(
        r"judgements of m with prompt b4\.txt [0-9a-f]{8}: ", task_of(folders[1] / "evaluation").definition
    )


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read"), ("a\n=====\n{first}", "lacks {instruction}")])
def test_prompt_that_is_none(judge, server, tmp_path, text, message):
    if text is not None:
        (tmp_path / "b4.txt").write_text(text)
    code, _, err = judge("--prompt", str(tmp_path / "b4.txt"))
    assert (code, server.texts) == (1, [])
    assert "--prompt" in err
    assert message in err


def test_useless_judgements_count_as_unparsed(judge, server, folders):
    text = "Escribe 3."
    cut_off = completion("I think that", finish_reason="length")
    server.answer = lambda number, user: cut_off if text in user else prefers("tuned")(number, user)
    code, out, _ = judge("--max-answer-tokens", "64")
    assert code == 0
    assert "2 judgements count as unparsed, the first: the answer was cut off at 64 tokens" in out
    task = task_of(folders[1] / "evaluation")
    assert (task.score, task.n, task.others["unparsed"]) == (1.0, N - 1, 2 / CALLS)
    server.answer = prefers("tuned")
    server.texts.clear()
    assert judge()[0] == 0
    assert len(server.texts) == 2
    assert task_of(folders[1] / "evaluation").n == N


def test_judge_without_verdicts_is_stopped(judge, server, tmp_path, folders):
    run = tmp_path / "long"
    write_answers(folders[0], "base", None, n=60)
    write_answers(run / "evaluation", "tuned", "../../out/base-0123/language.json", n=60)
    server.answer = says("Both are nice.")
    code, _, err = judge("--concurrency", "2", results=[run])
    assert code == 1
    assert "--model=m: none of its 2" in err
    assert MIN_FIRST_ANSWERS <= len(server.texts) <= MIN_FIRST_ANSWERS + 2
    assert task_of(run / "evaluation").score is None
    server.texts.clear()
    assert judge(results=[run])[0] == 1
    assert server.texts == []


def test_dry_run_sends_nothing(judge, server, folders, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    files = sorted(folders[0].iterdir())
    code, out, _ = judge("--dry-run")
    assert code == 0
    assert out.startswith("6 documents in 1 results, 12 different calls, 0 of them made before; the other 12 take at ")
    assert int(re.search(r"at most ([\d,]+) tokens", out)[1].replace(",", "")) > 12 * 1024
    assert server.texts == []
    assert sorted(folders[0].iterdir()) == files


def test_limit_and_then_all_documents(judge, server, folders):
    folder = folders[1] / "evaluation"
    assert judge("--limit", "2")[0] == 0
    assert [sample["score"] for sample in samples_of(folder)] == [1.0, 1.0, None, None, None, None]
    assert (task_of(folder).n, len(server.texts)) == (2, 4)
    assert judge()[0] == 0
    assert (task_of(folder).n, len(server.texts)) == (N, CALLS)


def test_complete_results_are_written_before_an_error(judge, server, tmp_path, folders):
    other = tmp_path / "other"
    write_answers(other / "evaluation", "tuned too", "../../out/base-0123/language.json")
    good = prefers("tuned")
    server.answer = lambda number, text: good(number, text) if number < CALLS + 2 else refusal(401, "expired")
    code, out, err = judge("--concurrency", "1", results=[folders[1], other])
    assert code == 1
    assert "401 - expired; set OPENAI_API_KEY to a key" in err
    assert "no score, 10 judgements are missing" in out
    assert task_of(folders[1] / "evaluation").score == 1.0
    assert task_of(other / "evaluation").score is None


def test_results_that_cannot_be_judged(judge, server, tmp_path, folders):
    base, run = folders
    folder, of_base = run / "evaluation", "../../out/base-0123/language.json"
    remedy = "make them with: finch evaluate --suite language"
    assert f"{tmp_path / 'none'} has no answers of the language task; {remedy}" in judge(results=[tmp_path / "none"])[2]
    assert "is the base model's; name a tuned model's results, or add --control" in judge(results=[base])[2]
    write_answers(tmp_path / "base-2", "base", None)
    write_answers(tmp_path / "second", "tuned", "../base-2/language.json")
    assert "the results are of 2 base models" in judge(results=[run, tmp_path / "second"])[2]
    for message, path, changes in (
        ("answer different prompts (0 in common, of 6 and 6)", of_base, {"prompt": "<s>Escribe {}."}),
        ("answer different prompts (5 in common, of 5 and 6)", of_base, {"n": 5}),
        ("nowhere/language.json does not exist", "../nowhere/language.json", {}),
    ):
        write_answers(folder, "tuned", path, **changes)
        assert message in judge()[2]
    write_answers(folder, "tuned", of_base)
    file = folder / f"language.{TASK}.jsonl"
    file.write_text(file.read_text().replace('"response"', '"other"'))
    assert f"has documents without an answer; {remedy}" in judge()[2]
    assert server.texts == []
