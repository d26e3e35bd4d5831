"""The check's own models, rows and configs."""

from finch.plan.gpu_check.models import TINY, step_config


def test_configs_ask_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = []
    monkeypatch.setattr("finch.base.hub._find", lambda *args: asked.append(args) or "")
    step_config(tmp_path, TINY["Q"])
    assert asked == []
