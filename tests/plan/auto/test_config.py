"""`--config auto`: what is chosen by looking, that each choice can be overridden, a run of it, and its error messages."""

import gzip
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.hub_server import hub_server
from helpers.models import save
from helpers.ranks import on_ranks
from helpers.runs import finch, run_here
from helpers.tokenizers import write_qwen3_tokenizer
from huggingface_hub import constants
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from benchmarks.tiny_text import WORDS
from finch.base import hub
from finch.base.errors import UserError
from finch.config.instantiate import build, component_of, find_config
from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.data.row_files import nodes_of
from finch.distributed import parallel
from finch.plan.auto import trial
from finch.plan.auto.config import complete, learning_rate
from finch.plan.estimate import fake_step

ROWS = "finch.data.rows.rows_dataset"
FINCH_AUTO = {"_component_": "finch.FinchLR", "eta_max": "auto", "ema": 0.9, "init": "dataset"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 of two layers with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "Tiny Qwen3"
    save("qwen3 tied", folder, vocab_size=320)
    write_qwen3_tokenizer(folder, WORDS)
    return folder


def auto(*arguments):
    return read(["--config", "auto", *arguments], FullFinetuneKeys)


def test_auto_config_names_builder_rows_and_batch(folder, rows_file):
    cfg = auto(f"model_dir={folder}", f"data_files={rows_file}", "device=cpu")
    assert cfg.model._component_ == "finch.models.qwen3.qwen3"
    assert (cfg.model.num_layers, cfg.model.embed_dim, cfg.model.tie_word_embeddings) == (2, 32, True)
    assert cfg.tokenizer == {"_component_": "finch.models.auto_tokenizer", "path": str(folder), "max_seq_len": 64}
    rows = {"_component_": "finch.data.rows.rows_dataset", "source": "json", "data_files": str(rows_file)}
    rows |= {"format": "question_answer", "validation_fraction": 0.1, "split_seed": 0}
    assert OmegaConf.to_container(cfg.dataset, resolve=True) == {**rows, "part": "train"}
    assert OmegaConf.to_container(cfg.dataset_validation, resolve=True) == {**rows, "part": "validation"}
    assert (cfg.dtype, cfg.batch_size, cfg.gradient_accumulation_steps) == ("fp32", 4, 4)
    assert cfg.output_dir == "out/auto/Tiny_Qwen3-rows"
    assert (cfg.optimizer.lr, cfg.lr_scheduler.eta_max, cfg.epochs) == (5e-4, "auto", 5)


@pytest.mark.parametrize(
    ("num_parameters", "num_steps", "rate"),
    [
        (8e9, 10, 2e-5),
        (4e9, 1000, 2e-5),
        (1.7e9, 60, 2e-5),
        (135e6, 60, 4e-5),
        (135e6, None, 4e-5),
        (0.29e6, 60, 5e-4),
        (0.29e6, 300, 1e-4),
        (1e5, 60, 5e-4),
        (135e6, 5000, 2e-5),
    ],
)
def test_learning_rate_is_the_measured_one(num_parameters, num_steps, rate):
    assert learning_rate(num_parameters, num_steps) == rate


def test_auto_config_takes_the_kind_of_files_with_other_names(folder, rows_file, tmp_path):
    file = tmp_path / "rows [1].data"
    file.write_bytes(rows_file.read_bytes())
    for key in ("source", "dataset.source"):
        cfg = auto(f"model_dir={folder}", f"data_files={file}", f"{key}=json", "device=cpu")
        assert (cfg.dataset.source, cfg.dataset.data_files) == ("json", str(file))


def test_auto_config_measures_what_is_forgotten(folder, rows_file, monkeypatch, caplog):
    """Where finch's prompts fit into the context."""
    given = f"model_dir={folder}", f"data_files={rows_file}", "device=cpu"
    assert auto(*given).probes is None
    monkeypatch.setattr("finch.auto.config._MIN_CONTEXT", 64)
    probe = auto(*given).probes.own
    assert (probe.kind, probe.rows, probe.data_files) == ("self", 24, None)
    assert "probes.own" in caplog.text
    caplog.clear()
    assert auto(*given, "~probes").probes is None
    assert "probes.own" not in caplog.text


def test_auto_config_preserves_unless_a_method_is_named(folder, rows_file, tmp_path, monkeypatch, caplog):
    """With as many own answers as take half of the training's time, by the bytes of what is read of the rows."""
    given = f"model_dir={folder}", "device=cpu"
    assert auto(*given, f"data_files={rows_file}").self_replay is None  # a context of 64 tokens
    monkeypatch.setattr("finch.auto.config._MIN_CONTEXT", 64)
    many = tmp_path / "many.jsonl"
    many.write_bytes(rows_file.read_bytes() * (10_000 // rows_file.stat().st_size + 1))
    few, lines = (path.read_text().count("\n") for path in (rows_file, many))  # a tenth of them is held out
    some = many.stat().st_size * 5 // 480
    with_id = tmp_path / "with_id.jsonl.gz"  # the same rows, in another file
    rows_with_id = [json.dumps({**json.loads(line), "id": "x" * 99}) for line in many.read_text().splitlines()]
    with_id.write_bytes(gzip.compress("\n".join(rows_with_id).encode()))
    for rows, epochs, number, share in (
        (rows_file, 1, 16, 16 / (few - few // 10)),
        (many, 5, some, max(0.25, some / 5 / (lines - lines // 10))),
        (with_id, 5, some, max(0.25, some / 5 / (lines - lines // 10))),
        (many, 2000, 1024, 0.25),
    ):
        caplog.clear()
        cfg = auto(*given, f"data_files={rows}", f"epochs={epochs}")
        assert (cfg.self_replay.rows, cfg.self_replay.share) == (number, pytest.approx(share, abs=0.005))
        assert (cfg.self_replay.strength, cfg.average, cfg.lr_scheduler) == (1.0, "auto", None)
        assert "and a constant learning rate" in caplog.text
        assert (f"self_replay: {number} own answers" in caplog.text, "rows are few" in caplog.text) == (
            True,
            number < 1024,
        )
    for word in (
        "method=finch",
        "method=sft",
        "~self_replay",
        "dataset.packed=True",
        "tokenizer.max_seq_len=32",
        "max_seq_len=32",
        "loss=finch.objectives.DFT",
    ):
        caplog.clear()
        cfg = auto(*given, f"data_files={rows_file}", word)
        assert (cfg.self_replay, cfg.average) == (None, None), word
        assert ("no self_replay, which needs rows of 64 tokens, not 32" in caplog.text) == word.endswith(
            "max_seq_len=32"
        )
        if word != "method=sft":
            assert cfg.lr_scheduler == FINCH_AUTO, word
    caplog.clear()
    cfg = auto(*given, f"data_files={rows_file}", "lr_scheduler.ema=0.8")
    assert (cfg.self_replay.strength, cfg.lr_scheduler) == (1.0, {**FINCH_AUTO, "ema": 0.8})
    assert ", and the learning rate of lr_scheduler; method=finch" in caplog.text
    assert "constant" not in caplog.text
    assert auto(*given, f"data_files={rows_file}", "lr_scheduler.decay=0.3").lr_scheduler == {"decay": 0.3}
    assert auto(*given, f"data_files={rows_file}", "method=preserve").self_replay.rows == 1024
    assert auto(*given, f"data_files={rows_file}", "self_replay.rows=7").self_replay.rows == 7
    run = tmp_path / "run"  # of other epochs, or another version's choices
    run.mkdir()
    earlier = {"self_replay": {"rows": 9}, "optimizer": {"lr": 3e-4}, "lr_scheduler": FINCH_AUTO}
    (run / "config.yaml").write_text(yaml.safe_dump(earlier))
    more = auto(*given, f"data_files={rows_file}", f"output_dir={run}", "resume_from_checkpoint=True", "epochs=8")
    assert (more.self_replay.rows, more.average, more.optimizer.lr, more.lr_scheduler) == (9, None, 3e-4, FINCH_AUTO)


def test_auto_config_ranks_share_one_global_batch(folder, rows_file, monkeypatch):
    """Those that are to be started, or that are."""
    for ranks, batch, *words in (
        (2, (4, 2)),
        (8, (2, 1)),
        (16, (1, 1)),
        (1, (1, 16), "batch_size=1"),
        (1, (16, 1), "batch_size=16"),
        (2, (2, 4), "gradient_accumulation_steps=4"),
        (1, (16, 1), "gradient_accumulation_steps=1"),
        (2, (3, 2), "batch_size=3", "gradient_accumulation_steps=2"),
        (4, (4, 2), "tensor_parallel_dim=2"),
    ):
        given = ["--config", "auto", f"model_dir={folder}", f"data_files={rows_file}", "device=cpu", *words]
        with monkeypatch.context() as patch:
            planned = read(given, ranks=ranks)
            for name, value in (("LOCAL_RANK", 0), ("RANK", 0), ("WORLD_SIZE", ranks)):
                patch.setenv(name, str(value))
            for cfg in (planned, read(given)):
                assert (cfg.batch_size, cfg.gradient_accumulation_steps) == batch


def test_auto_config_takes_the_rate_of_its_own_steps(folder, rows_file):
    given = f"model_dir={folder}", f"data_files={rows_file}", "device=cpu", "epochs=60"
    rate, same, of_many = (
        auto(*given, *words).optimizer.lr
        for words in ([], ["batch_size=1"], ["batch_size=4", "gradient_accumulation_steps=1"])
    )
    assert (same, of_many) == (rate, pytest.approx(rate / 4, rel=0.5))


def test_auto_config_refuses_a_misspelt_key_of_the_file(folder, rows_file, tmp_path):
    config = yaml.safe_load(find_config("auto").read_text())
    config |= {"model_dir": str(folder), "data_files": str(rows_file)}
    file = tmp_path / "own.yaml"
    for wrong, message in (
        ({"epoch": 2}, "unknown key epoch=2, did you mean epochs?"),
        ({"_rows": 3}, "unknown key _rows=3"),
    ):
        file.write_text(yaml.safe_dump({**config, **wrong}))
        with pytest.raises(UserError, match=re.escape(message)):
            read(["--config", str(file)], FullFinetuneKeys)
    # What auto reads is no mistake where nothing else refers to it.
    file.write_text(yaml.safe_dump({**config, "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"}}))
    assert read(["--config", str(file)], FullFinetuneKeys).data_files == str(rows_file)


@pytest.fixture
def on_gpu(folder, rows_file, tmp_path, monkeypatch):
    """What is chosen for a GPU of so many bytes, which this machine need not have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("a launcher makes no context"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)

    def chosen(memory, *arguments):
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        cfg = auto(f"model_dir={folder}", f"data_files={rows_file}", *arguments)
        keys = (
            "batch_size",
            "gradient_accumulation_steps",
            "enable_activation_checkpointing",
            "fsdp_reshard_after_forward",
        )
        chosen.dtype = cfg.dtype
        return tuple(cfg[key] for key in keys)

    return chosen


def test_auto_config_counts_what_a_rank_holds(on_gpu, tmp_path, monkeypatch):
    """Of a state that is sharded over some of the ranks; a run that goes on keeps its dtype."""
    monkeypatch.setattr(trial.Trial, "choose", lambda self, candidates: (candidates[0], ""))
    number = 16 * 10_000  # bytes of about as many parameters
    found = []
    monkeypatch.setattr(parallel, "launched_ranks", lambda: 8)
    for words in ([], ["data_parallel_replicate_dim=8"]):
        on_gpu(number, *words)
        found.append(on_gpu.dtype)
    assert found == ["bf16_mixed", "bf16"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"dtype": "bf16", "optimizer": {"lr": 1e-4}}))
    on_gpu(number, f"output_dir={tmp_path}/run", "resume_from_checkpoint=auto")
    assert on_gpu.dtype == "bf16"


def test_auto_config_takes_fp32_where_a_gpu_has_no_bf16(on_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert (on_gpu(10**9)[:2], on_gpu.dtype) == ((4, 4), "fp32")


def test_auto_config_takes_the_batch_that_fits_a_gpu(on_gpu, monkeypatch, caplog):
    """By the real estimate, which a later start finds; a sweep's rates do not ask again."""
    monkeypatch.setattr(trial, "LIMIT_S", 600.0)  # of a busy machine
    assert on_gpu(10**9) == (16, 1, False, False)
    assert re.search(r"rows of \d+ tokens take [\d.]+ [kM]B of 0.9 GB by `finch check --exact`", caplog.text)
    assert not torch.distributed.is_initialized()
    monkeypatch.setattr(fake_step, "estimate_step", None)
    assert on_gpu(10**9, "optimizer.lr=1e-4", "seed=7") == (16, 1, False, False)
    assert on_gpu(10**9, "batch_size=2")[0] == 2  # nothing is to be chosen


@pytest.mark.parametrize(
    ("answers", "expected", "message"),
    [
        ([2e9, 5e8], (4, 4, True, True), "take 500.00 MB of 0.9 GB"),
        (
            [2e9, 2e9, 2e9],
            (1, 16, True, True),
            "take 2.00 GB of 0.9 GB by `finch check --exact`: too much; batch_size=1",
        ),
        ([2e9, "late"], (1, 16, True, True), "the estimate was not done in 30 s"),
        ([UserError("it needs values")], (1, 16, True, True), "no estimate (it needs values)"),
        ([RuntimeError(".numpy() is not supported")], (1, 16, True, True), "no estimate (.numpy() is not supported)"),
    ],
)
def test_auto_config_tries_three_batches(answers, expected, message, on_gpu, tmp_path, monkeypatch, caplog):
    asked = []

    def estimate_step(recipe, cfg, *, ranks, rows):
        answer = answers[len(asked)]
        asked.append((recipe, ranks, cfg.batch_size))
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(device_peak=answer)

    clock = SimpleNamespace(monotonic=lambda: 31.0 if answers[len(asked) :] == ["late"] else 0.0)
    monkeypatch.setattr(trial, "time", clock)
    monkeypatch.setattr(fake_step, "estimate_step", estimate_step)
    assert on_gpu(10**9) == expected
    assert message in caplog.text
    assert (tmp_path / "cache").exists() == message.startswith("take")  # a later start may have an estimate
    number = len(answers) - (answers[-1] == "late")
    assert asked == [("finch_full_finetune", 1, batch_size) for batch_size in (16, 4, 1)[:number]]


def test_auto_config_ranks_take_the_batch_of_the_first(folder, rows_file, tmp_path):
    """As `tune run` starts them: there they have no process group yet."""
    code = f"""
        from types import SimpleNamespace
        from finch.config.parser import read
        from finch.config.schema import FullFinetuneKeys
        from finch.distributed import parallel
        from finch.plan.estimate import fake_step
        os.environ["XDG_CACHE_HOME"] = str(folder / os.environ["RANK"])
        asked = []
        def estimate_step(recipe, cfg, *, ranks, rows):
            asked.append(ranks)
            return SimpleNamespace(device_peak=10**9 if len(asked) == 1 else 10**8)
        fake_step.estimate_step = estimate_step
        torch.cuda.is_available = torch.cuda.is_bf16_supported = lambda **_: True
        torch.cuda.device_count = lambda: 2
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=10**9)
        given = ["--config", "auto", "model_dir={folder}", "data_files={rows_file}"]
        cfg = read(given, FullFinetuneKeys)
        parallel.start(device, shard=False)
        tell([asked, cfg.batch_size, cfg.enable_activation_checkpointing])
        parallel.stop()
    """
    assert on_ranks(2, code, tmp_path) == [[[2, 2], 4, True], [[], 4, True]]


def test_auto_config_overrides_reach_every_block(folder, rows_file):
    changes = ["model.max_seq_len=32", "tokenizer.max_seq_len=16", "dtype=bf16"]
    changes += ["dataset.validation_fraction=0.2", "dataset.train_on_input=True"]
    cfg = auto(f"model_dir={folder}", f"data_files={rows_file}", "batch_size=1", "output_dir=out/x", *changes)
    assert (cfg.model.max_seq_len, cfg.tokenizer.max_seq_len, cfg.dtype, cfg.batch_size) == (32, 16, "bf16", 1)
    held_out = cfg.dataset_validation
    assert (held_out.validation_fraction, held_out.train_on_input, held_out.part) == (0.2, True, "validation")
    assert cfg.metric_logger.log_dir == "out/x/logs"
    model = {"_component_": "finch.models.auto", "path": str(folder)}
    dataset = {"_component_": "torchtune.datasets.alpaca_dataset"}
    words = ("model=finch.models.auto", "model.path=${model_dir}", f"dataset._component_={dataset['_component_']}")
    own = auto(f"model_dir={folder}", *words)
    assert (own.model, own.dataset, own.dataset_validation) == (model, dataset, None)


@pytest.mark.parametrize("word", ["~dataset_validation", "save_last_epoch_only=True", "early_stopping=null"])
def test_auto_config_stops_early_where_it_can_keep_the_best(word, folder, rows_file):
    words = (f"model_dir={folder}", f"data_files={rows_file}", "device=cpu")
    assert [auto(*words).early_stopping, auto(*words, word).early_stopping] == [{"patience": 2}, None]


def rows_of(cfg):
    """Questions that a run trains on, and those that it validates on."""
    tokenizer = build(cfg.tokenizer, "tokenizer")
    blocks = (cfg.dataset, cfg.dataset_validation)
    sets = [[] if block is None else build(block, "dataset", tokenizer) for block in blocks]
    return [{tuple(row["tokens"]) for row in rows} for rows in sets]


def test_auto_config_holds_rows_out_only_to_validate_on_them(folder, rows_file, tmp_path):
    words = (f"model_dir={folder}", f"data_files={rows_file}", "device=cpu", "tokenizer.max_seq_len=64")
    (trained, held_out), (every, none) = (rows_of(auto(*words, *more)) for more in ((), ("~dataset_validation",)))
    assert (len(trained), len(held_out), every, none) == (37, 4, trained | held_out, set())
    assert rows_of(auto(*words, "dataset_validation=null")) == [every, set()]
    own = tmp_path / "own.csv"
    own.write_text("prompt,response\n" + "a red bird,a blue bird\n" + "a small cat,a big dog\n")
    cfg = auto(*words, f"dataset_validation.data_files={own}", "dataset.train_on_input=True")
    assert (rows_of(cfg)[0], len(rows_of(cfg)[1]), cfg.dataset_validation.train_on_input) == (every, 2, True)
    cfg = auto(*words, "dataset.split=train[:30]", "dataset_validation.split=train[30:]")
    assert tuple(map(len, rows_of(cfg))) == (30, 11)
    cfg = auto(
        *words, "dataset_validation._component_=finch.data.rows.rows_dataset", f"dataset_validation.data_files={own}"
    )
    assert (rows_of(cfg)[0], len(rows_of(cfg)[1]), cfg.early_stopping) == (every, 2, {"patience": 2})


@pytest.mark.parametrize(
    ("block", "sizes"),
    [
        ({"dataset_validation": {"data_files": "OWN", "format": "question_answer"}}, (41, 41)),
        ({"dataset_validation": {name: {"_component_": ROWS, "data_files": "OWN"} for name in "ab"}}, (41,)),
        ({"dataset_validation": {"new_system_prompt": "Be brief."}, "dataset": {"train_on_input": True}}, (37, 4)),
        ({"dataset": [{"_component_": ROWS, "data_files": "OWN"}], "data_files": None}, (41,)),
    ],
)
def test_auto_config_takes_blocks_of_a_file(block, sizes, folder, rows_file, tmp_path):
    config = yaml.safe_load(find_config("auto").read_text()) | {"model_dir": str(folder), "data_files": str(rows_file)}
    config |= json.loads(json.dumps(block).replace("OWN", str(rows_file)))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**config, "device": "cpu"}))
    cfg = read(["--config", str(tmp_path / "own.yaml")], FullFinetuneKeys)
    blocks = [each for each in (*nodes_of(cfg.dataset), cfg.dataset_validation) if component_of(each)]
    tokenizer = build(cfg.tokenizer, "tokenizer")
    assert tuple(len(build(each, "dataset", tokenizer)) for each in blocks) == sizes


def test_auto_config_says_how_many_rows_are_left(folder, rows_file):
    words = (f"model_dir={folder}", f"data_files={rows_file}", "device=cpu")
    found = [
        complete(yaml.safe_load(find_config("auto").read_text()), [*words, *more])[1][1]
        for more in ((), ("dataset.validation_fraction=0.5",), ("dataset.split=train[:8]",), ("~dataset_validation",))
    ]
    assert [line.partition("answer, ")[2] for line in found] == [
        "4 held out for validation",
        "20 held out for validation",
        "too few to hold out some for validation",
        "none held out",
    ]
    few = auto(*words, "dataset.split=train[:8]", "dataset.validation_fraction=0.25")
    assert tuple(map(len, rows_of(few))) == (6, 2)


def test_auto_config_few_rows_are_not_split(folder, tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text('{"text": "a red bird"}\n' * 3)
    cfg = auto(f"model_dir={folder}", f"data_files={file}", "device=cpu")
    assert (cfg.dataset.format, cfg.dataset_validation, cfg.early_stopping) == ("text", None, None)
    assert (cfg.batch_size, cfg.gradient_accumulation_steps) == (3, 1)


def test_auto_config_trains_says_what_it_chose_and_saves_it(folder, rows_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(find_config("auto").read_text())
    config |= {"model_dir": str(folder), "data_files": str(rows_file), "output_dir": str(tmp_path / "run")}
    done = run_here(tmp_path, {**config, "device": "cpu", "epochs": 1})
    assert done.returncode == 0, done.output
    for words in ("finch.models.qwen3.qwen3", "41 rows of question/answer, 4 held out", "dtype=fp32 batch_size=4"):
        assert words in done.output
    AutoModelForCausalLM.from_pretrained(done.folder / "best")
    written = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert "auto" not in written
    assert written["model"]["num_layers"] == 2
    written["output_dir"] = str(tmp_path / "again")
    again = run_here(tmp_path, json.loads(json.dumps(written).replace("${output_dir}", str(tmp_path / "again"))))
    assert again.column("loss") == done.column("loss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model_dir is not set: add model_dir=DIR"),
        (["model_dir=/nowhere"], "model_dir=/nowhere is not a folder"),
        (["model_dir=Acme/Tiny"], "model_dir=Acme/Tiny is no folder here, and "),
        (["model_dir=DIR"], "data_files is not set: add data_files=ROWS.jsonl"),
        (["model_dir=DIR", "data_files=/nowhere.jsonl"], "data_files=/nowhere.jsonl does not exist"),
        (["model_dir=DIR", "data_files=ROWS", "epochs=x"], "epochs=x must be int >= 1"),
        (["model_dir=DIR", "data_files=MIXED"], "row 2 is prompt/completion"),
        (["model_dir=EMPTY", "data_files=MIXED"], "has no config.json"),
        (["model_dir=UNKNOWN", "data_files=MIXED"], "holds a model of type 'mamba'"),
        (["model_dir=HALF", "data_files=MIXED"], "lists model-2.safetensors, which is not in"),
    ],
)
def test_auto_config_mistakes_are_one_line(arguments, message, folder, rows_file, tmp_path):
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    shutil.copytree(folder, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-2.safetensors"}}')
    rows = tmp_path / "mixed.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n{"prompt": "a", "completion": "b"}\n')
    paths = {"DIR": folder, "MIXED": rows, "EMPTY": tmp_path, "UNKNOWN": tmp_path / "mamba", "HALF": tmp_path / "half"}
    paths["ROWS"] = rows_file
    given = [f"{key}={paths.get(value, value)}" for key, value in (text.split("=") for text in arguments)]
    with pytest.raises(UserError) as error:
        auto(*given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_configs_show_prints_the_complete_auto_config(folder, rows_file, capsys):
    printed = finch(capsys, "list", "--show", "auto", f"model_dir={folder}", f"data_files={rows_file}")[1]
    shown = yaml.safe_load(printed)
    assert (shown["model"]["num_layers"], shown["dataset"]["format"]) == (2, "question_answer")
    assert finch(capsys, "list", "--show", "auto")[0] == 0  # the template


@pytest.fixture
def server(folder, rows_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub._find.cache_clear()
    with hub_server(monkeypatch, tmp_path / "cache") as server:
        server.add("models/Acme/Tiny", folder)
        server.add("datasets/Acme/Rows", {"rows.jsonl": rows_file.read_bytes()})
        yield server
    hub._find.cache_clear()


def test_names_on_the_hub_become_commits(server, rows_file):
    model, rows = server.main("models/Acme/Tiny"), server.main("datasets/Acme/Rows")
    cfg = auto("model_dir=Acme/Tiny", "data_files=hf://datasets/Acme/Rows/rows.jsonl", "device=cpu")
    assert cfg.checkpointer.checkpoint_dir.endswith(f"/models--Acme--Tiny/snapshots/{model}")
    assert cfg.tokenizer.path == cfg.checkpointer.checkpoint_dir
    assert cfg.dataset.data_files.endswith(f"/datasets--Acme--Rows/snapshots/{rows}/rows.jsonl")
    assert (cfg.dataset.format, cfg.output_dir) == ("question_answer", "out/auto/Tiny-rows")
    cfg = auto("model_dir=Acme/Tiny", "dataset.source=Acme/Rows", "device=cpu")
    assert cfg.dataset.source == cfg.dataset_validation.source == f"Acme/Rows@{rows}"
    assert cfg.output_dir == "out/auto/Tiny-Rows"
    # A data set of the paper reads local files in place of its source.
    server.refusal = "down"
    words = ["dataset._component_=finch.data.tofu.tofu_dataset", "dataset.source=Acme/Rows"]
    assert auto("model_dir=Acme/Tiny", *words, f"dataset.data_files={rows_file}").dataset.source == "Acme/Rows"
    with pytest.raises(UserError, match=r"^dataset\.source=Acme/Rows@main: .* fails \(Server error '503"):
        auto("model_dir=Acme/Tiny", *words[:1], "dataset.source=Acme/Rows@main")


@pytest.mark.slow
def test_run_keeps_the_commits_and_goes_on_with_them_alone(server, folder, tmp_path, monkeypatch):
    config = yaml.safe_load(find_config("auto").read_text())
    config |= {"output_dir": str(tmp_path / "run"), "device": "cpu", "epochs": 1, "model_dir": "Acme/Tiny"}
    # A light run that has ended is not continued.
    config |= {"data_files": "hf://datasets/Acme/Rows/rows.jsonl", "save_best_only": False}
    model, rows = server.main("models/Acme/Tiny"), server.main("datasets/Acme/Rows")
    done = run_here(tmp_path, config)
    assert f"model_dir=Acme/Tiny@{model}: " in done.output
    assert {model, rows} <= set(re.findall("[0-9a-f]{40}", (done.folder / "config.yaml").read_text()))
    server.add("models/Acme/Tiny", {**{file.name: file.read_bytes() for file in folder.iterdir()}, "x.jinja": b""})
    hub._find.cache_clear()
    assert model in run_here(tmp_path, config, "resume_from_checkpoint=True").error()
    # Of the same commit in another place.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "moved"))
    hub._find.cache_clear()
    config["model_dir"] = f"Acme/Tiny@{model}"
    assert run_here(tmp_path, config, "resume_from_checkpoint=True", "epochs=2").returncode == 0
    assert str(tmp_path / "moved") in (done.folder / "config.yaml").read_text()
