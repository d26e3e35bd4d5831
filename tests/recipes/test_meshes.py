"""HSDP, tensor parallelism and the optimizer inside the backward, through the real `tune run`: equal to one process."""

import pytest
import torch
from helpers.models import FAMILIES, save
from helpers.runs import llama_args, make_config, relative_l2, run_here, tune_run, weights

pytestmark = pytest.mark.slow

GEMMA2 = {**llama_args(), "query_pre_attn_scalar": 8, "hidden_capping_value": 50.0, "final_capping_value": 30.0}
COLUMNS = ("loss", "ema_loss", "lr", "grad_norm", "num_target_tokens")
LLAMA_PLAN = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
QWEN3_PLAN = {"_component_": "finch.models.qwen3.qwen3_tp_plan"}


def assert_equal_runs(run, expected, tolerance, columns=COLUMNS):
    assert run.returncode == 0, run.output[-3000:]
    for column in columns:
        assert run.column(column) == pytest.approx(expected.column(column), rel=tolerance), column
    last = sorted(path.name for path in expected.folder.glob("epoch_*"))[-1]
    difference = relative_l2(weights(run.folder / last), weights(expected.folder / last))
    print(f"weights differ by {difference:.1e} in relative L2")
    assert difference < tolerance


@pytest.fixture(scope="module")
def alone(tmp_path_factory, base_folder, rows_file):
    """One process, two epochs of 41 rows, 8 a step: the last step of an epoch has one row for all ranks."""
    folder = tmp_path_factory.mktemp("alone")
    config = make_config(base_folder, rows_file, folder / "run", dtype="fp64", batch_size=8, epochs=2)
    run = run_here(folder, config)
    assert run.returncode == 0, run.output
    return run, config


@pytest.mark.parametrize(
    ("ranks", "sizes", "batch"),
    [
        (4, {"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 2}, {"batch_size": 2}),
        (
            4,
            {"data_parallel_replicate_dim": 2, "tensor_parallel_dim": 2, "tensor_parallel_plan": LLAMA_PLAN},
            {"batch_size": 2, "gradient_accumulation_steps": 2},
        ),
        (
            4,
            {"tensor_parallel_dim": 2, "tensor_parallel_plan": LLAMA_PLAN, "custom_sharded_layers": ["tok_embeddings"]},
            {"batch_size": 4, "enable_activation_checkpointing": True},
        ),
        (2, {"fsdp_reshard_after_forward": False}, {"batch_size": 4}),
        (2, {"fsdp_reduce_every_micro_batch": False}, {"batch_size": 1, "gradient_accumulation_steps": 4}),
    ],
    ids=["hsdp", "replicate x tensor", "shard x tensor", "no resharding", "one reduction"],
)
def test_every_mesh_equals_one_process(ranks, sizes, batch, alone, tmp_path):
    """Loss counted once, gradients clipped by the whole norm; and a checkpoint of the mesh goes on in one process."""
    straight, config = alone
    config = {**config, "output_dir": str(tmp_path / "run"), **sizes, **batch, "epochs": 1, "debug_checks": True}
    run = tune_run(tmp_path, config, ranks=ranks)
    assert run.returncode == 0, run.output[-3000:]
    assert min(straight.column("grad_norm")) > 1.0  # so that clipping to 1 is at work
    resumed = run_here(tmp_path, {**alone[1], "output_dir": str(run.folder)}, "resume_from_checkpoint=True")
    assert "resumed from step 6" in resumed.output
    assert_equal_runs(resumed, straight, 1e-7)


def test_cosine_schedule_resumes_on_another_mesh(alone, tmp_path):
    """An optimizer has a group of parameters for each mesh they lie on: two under tensor parallelism, one without."""
    cosine = {"_component_": "finch.cosine.cosine_with_warmup", "warmup_fraction": 0.2}
    config = {**alone[1], "output_dir": str(tmp_path / "straight"), "lr_scheduler": cosine}
    straight = run_here(tmp_path, config)
    cut = {**config, "output_dir": str(tmp_path / "run"), "tensor_parallel_dim": 2, "tensor_parallel_plan": LLAMA_PLAN}
    run = tune_run(tmp_path, cut, ranks=2)
    assert_equal_runs(run, straight, 1e-7, columns=("loss", "lr", "grad_norm"))
    rates = run.column("lr")
    longer = run_here(tmp_path, {**config, "output_dir": str(run.folder), "epochs": 3}, "resume_from_checkpoint=True")
    assert longer.returncode == 0, longer.output
    assert longer.column("lr")[:12] == rates
    assert len(longer.column("lr")) == 18


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_tensor_parallel_equals_one_process(tied, tmp_path, base_folder, rows_file):
    family = FAMILIES["qwen3 tied" if tied else "qwen3"]
    save("qwen3 tied" if tied else "qwen3", tmp_path / "base")
    model = {"_component_": family.component, **family.arguments}
    config = make_config(base_folder, rows_file, tmp_path / "one", dtype="fp64", model=model, batch_size=8)
    config["checkpointer"] = {**config["checkpointer"], "checkpoint_dir": str(tmp_path / "base")}
    one = run_here(tmp_path, config)
    cut = {**config, "output_dir": str(tmp_path / "two"), "tensor_parallel_dim": 2, "tensor_parallel_plan": QWEN3_PLAN}
    assert_equal_runs(tune_run(tmp_path, cut, ranks=2), one, 1e-7)


def in_backward(config, folder, **changes):
    config = {**config, "output_dir": str(folder), "optimizer_in_bwd": True, **changes}
    return {key: value for key, value in config.items() if key != "clip_grad_norm"}


@pytest.fixture(scope="module")
def unclipped(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unclipped")
    config = in_backward(alone[1], folder / "run", optimizer_in_bwd=False, dtype="fp32")
    return run_here(folder, config)


def test_optimizer_in_bwd_with_finch_is_bitwise(alone, unclipped, tmp_path):
    """The rate is known before the backward: bit for bit the ordinary order, resume included."""
    config = in_backward(alone[1], tmp_path / "run", dtype="fp32")
    assert run_here(tmp_path, {**config, "epochs": 1}).returncode == 0
    run = run_here(tmp_path, config, "resume_from_checkpoint=True")
    assert_equal_runs(run, unclipped, 1e-300, columns=("loss", "ema_loss", "lr"))
    assert run.column("grad_norm") == [None] * 12


def test_optimizer_in_bwd_with_finch_on_hsdp(alone, unclipped, tmp_path):
    config = in_backward(alone[1], tmp_path / "run", dtype="fp32", batch_size=2, data_parallel_replicate_dim=2)
    assert_equal_runs(tune_run(tmp_path, config, ranks=4), unclipped, 1e-5, columns=("loss", "ema_loss", "lr"))


def test_optimizer_in_bwd_with_cosine_schedule(alone, tmp_path):
    cosine = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 3}
    config = in_backward(alone[1], tmp_path / "run", dtype="fp32", lr_scheduler=cosine)
    ordinary = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "ordinary"), "optimizer_in_bwd": False})
    assert run_here(tmp_path, {**config, "epochs": 1}).returncode == 0
    # A cosine over another number of epochs is another cosine: resume over the epochs it began with.
    straight = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "straight")})
    assert_equal_runs(straight, ordinary, 1e-300, columns=("loss", "lr"))


def test_optimizer_in_bwd_skips_a_nonfinite_loss(alone, tmp_path, monkeypatch):
    """With on_nonfinite: skip the backward does not run, so that no weight is updated."""
    import finch_full_finetune

    ordinary = finch_full_finetune.FinchFullFinetune._mean_loss
    seen = []

    def broken_once(recipe, raw, targets):
        loss = ordinary(recipe, raw, targets)
        if recipe.state.step == 3:
            seen.append({name: weight.clone() for name, weight in recipe._model.state_dict().items()})
            return loss * float("nan")
        if recipe.state.step == 4:
            seen.append({name: weight.clone() for name, weight in recipe._model.state_dict().items()})
        return loss

    monkeypatch.setattr(finch_full_finetune.FinchFullFinetune, "_mean_loss", broken_once)
    config = in_backward(alone[1], tmp_path / "run", epochs=1)
    run = run_here(tmp_path, config, "lr_scheduler.on_nonfinite=skip")
    assert run.returncode == 0, run.output
    before, after = seen
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_mesh_sizes_that_do_not_fit_raise(alone, tmp_path, base_folder, rows_file):
    """On two ranks, through torchrun: one sentence, message once, and no rank left waiting."""
    config = {**alone[1], "output_dir": str(tmp_path / "run")}

    def refused(**changes):
        run = tune_run(tmp_path, {**config, **changes}, ranks=2, timeout=60)
        assert run.returncode == 1
        assert not run.folder.exists()
        return run.error()

    message = refused(data_parallel_shard_dim=3)
    assert (
        "data_parallel_shard_dim=3 x data_parallel_replicate_dim=1 x tensor_parallel_dim=1 is 3, but 2 ranks started"
        in message
    )
    assert "layers.*.attn.q_norm, which the model does not have" in refused(
        tensor_parallel_dim=2, tensor_parallel_plan=QWEN3_PLAN
    )


def test_plans_that_do_not_fit_the_model_raise():
    from torchtune.models.llama2 import llama2
    from torchtune.models.llama3 import base_llama_tp_plan

    from finch.distributed.tensor_parallel import check_plan
    from finch.errors import UserError
    from finch.models.gemma2 import gemma2
    from finch.models.qwen3 import qwen3_tp_plan

    small = FAMILIES["qwen3"].build()
    check_plan(small, qwen3_tp_plan(), 2)
    with pytest.raises(UserError, match=r"leaves out layers\.0\.attn\.q_norm, which sees this rank's heads alone"):
        check_plan(small, base_llama_tp_plan(), 2)
    without = {name: style for name, style in qwen3_tp_plan().items() if "output_proj" not in name}
    with pytest.raises(UserError, match=r"leaves out layers\.\*\.attn\.output_proj; heads are sharded in all four"):
        check_plan(small, without, 2)
    with pytest.raises(UserError, match="tensor_parallel_dim=4 does not divide the model's 2 key-value heads"):
        check_plan(llama2(**llama_args()), base_llama_tp_plan(), 4)
    with pytest.raises(UserError, match="attention or output layer torchtune does not shard"):
        check_plan(gemma2(**{**GEMMA2, "head_dim": 8}), base_llama_tp_plan(), 2)


def test_mesh_options_in_one_process_raise(alone, tmp_path):
    config = {**alone[1], "output_dir": str(tmp_path / "run")}

    def refused(**changes):
        run = run_here(tmp_path, {**config, **changes})
        assert run.returncode == 1
        assert not run.folder.exists()
        return run.error()

    assert "does not divide the 1 rank that were started" in refused(data_parallel_replicate_dim=2)
    assert "tensor_parallel_dim=2 needs tensor_parallel_plan" in refused(tensor_parallel_dim=2)
    assert "data_parallel_shard_dim=0 must be -1 or int >= 1" in refused(data_parallel_shard_dim=0)
    message = refused(optimizer_in_bwd=True, clip_grad_norm=None, gradient_accumulation_steps=2)
    assert "optimizer_in_bwd=True excludes gradient_accumulation_steps=2" in message
