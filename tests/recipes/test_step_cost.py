"""What a step costs besides its arithmetic: collectives are counted, and no value is read between two log steps."""

import itertools
import json

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.runs import Run, write_config
from helpers.step_cost import HostRead, HostReads, start, steps, take

from finch.training import step

COUNT = """
    import json
    from helpers.step_cost import Collectives, start, steps
    found = {}
    for name, overrides in json.loads((folder / "methods.json").read_text()).items():
        recipe = start(str(folder / "config.yaml"), f"output_dir={folder / name}", *overrides)
        for batches in steps(recipe, 3):
            with Collectives() as collectives:
                recipe.train_step(batches)
        with Collectives() as between:
            recipe.state.agree()
        found[name] = collectives.started, between.started
        recipe.close()
        torch.distributed.init_process_group = lambda *_, **__: None  # the next recipe joins the same group
    tell(found)
    torch.distributed.destroy_process_group()
"""


def test_step_of_finch_starts_the_collectives_of_plain_sft(tmp_path, tiny):
    """FSDP2's own, one all-reduce of the token counts, one of the loss, one of the gradient's norm: the same with a constant rate."""
    micro_batches, layers = 2, 2
    write_config(tmp_path, tiny(gradient_accumulation_steps=micro_batches, shuffle=False, fsdp_layers_per_group=1))
    methods = {"finch": [], "sft": ["~lr_scheduler"], "reduced once": ["fsdp_reduce_every_micro_batch=False"]}
    (tmp_path / "methods.json").write_text(json.dumps(methods))
    ranks = on_ranks(2, COUNT, tmp_path)
    assert ranks[0] == ranks[1]
    # The root's group is gathered once a micro-batch, a layer's for the forward and for the backward.
    fsdp = {"allgather_base": (1 + 2 * layers) * micro_batches, "reduce_scatter_base": (1 + layers) * micro_batches}
    for method, (started, between) in ranks[0].items():
        names = [name for name, _ in started]
        once = {"reduce_scatter_base": 1 + layers} if method == "reduced once" else {}
        assert {name: names.count(name) for name in fsdp} == {**fsdp, **once}
        small = [each for each in started if each[0] not in fsdp]
        assert small == [
            ["allreduce", 2],
            ["allreduce", 1],
            ["allreduce", 3 + 9 * layers],
        ]  # counts, loss, norms of the parameters
        assert between == [["allreduce", 4]]  # requests of signals and hooks, on the host
    assert ranks[0]["finch"] == ranks[0]["sft"]


METHODS = {
    "finch": [],
    "padded": ["padding_free=False"],
    "chunked": ["loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"],
    "flow": ["loss._component_=finch.objectives.FLOW"],
    "dft": ["loss._component_=finch.objectives.DFT"],
    "stm": ["loss._component_=finch.objectives.STM", "loss.threshold=1000"],
    "eaft": ["loss._component_=finch.objectives.EAFT"],
    "talr": ["loss._component_=finch.objectives.TALR"],
    "kl": ["kl_penalty._component_=finch.regularization.KL", "kl_penalty.strength=0.1"],
    "l2": ["regularizer._component_=finch.regularization.L2", "regularizer.strength=0.01"],
    "packed": ["dataset.packed=True", "batch_size=1"],
    "unclipped": ["clip_grad_norm=null"],
}


@pytest.mark.parametrize("method", METHODS)
def test_step_reads_no_value_between_log_steps(method, tmp_path, tiny, monkeypatch):
    """From the batches' way to the device to the end of the step. TALR's median needs a gathering on the host at each step."""
    config = tiny(log_every_n_steps=100, gradient_accumulation_steps=2)
    recipe = start(write_config(tmp_path, config), *METHODS[method])
    for group in recipe.update.optimizers[0].param_groups:
        group["lr"] = torch.tensor(group["lr"])  # as the recipe does on a GPU
    reads = HostReads()
    move = step.to_device

    def to_device(batch, device):
        moved = move(batch, device)
        reads.is_started = True  # until here tensors are on the host on any machine
        return moved

    monkeypatch.setattr(step, "to_device", to_device)
    for batches in steps(recipe, 3):
        with reads:
            if method == "talr":
                with pytest.raises(HostRead):
                    take(recipe, batches)
                break
            take(recipe, batches)
    recipe.close()
    if method != "talr":
        assert recipe.update.schedule.is_on_device
        run = Run(0, "", tmp_path / "run")
        assert run.column("step") == [1, 2, 3]
        assert min(run.column("loss")) > 0


def test_compiled_recipe_does_not_recompile(tmp_path, tiny, monkeypatch):
    """The learning rate, the EMA and the number of target tokens change at each of 50 steps."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")  # a test machine may lack a C++ compiler
    config = tiny(log_every_n_steps=100, batch_size=1, compile=True)
    recipe = start(write_config(tmp_path, config), "dataset.packed=True")
    epochs = itertools.chain.from_iterable(steps(recipe, recipe.data.steps_per_epoch, epoch) for epoch in range(60))
    for batches in itertools.islice(epochs, 3):  # the second number of targets makes that dimension dynamic
        take(recipe, batches)
    targets = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batches in itertools.islice(epochs, 50):
            targets.add(sum(batch["targets"].numel() for batch in batches))
            take(recipe, batches)
    recipe.close()
    assert recipe.state.step == 53
    assert len(targets) > 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["finch", "padded", "flow", "eaft"])
def test_step_on_a_gpu_does_not_synchronize(method, tmp_path, tiny):
    recipe = start(write_config(tmp_path, tiny(log_every_n_steps=100, device="cuda")), *METHODS[method])
    for number, batches in enumerate(steps(recipe, 4)):
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step creates the state
        try:
            take(recipe, batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    recipe.close()
