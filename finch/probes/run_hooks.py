"""All hooks of a run in their order: the recipe's own, around those that a config names."""

from __future__ import annotations

from omegaconf import DictConfig

from finch.base.errors import UserError
from finch.config.instantiate import build, component_of, did_you_mean
from finch.probes.budget import ForgettingBudget
from finch.probes.probes import Probes
from finch.training import hooks
from finch.training.hooks import Hook, Hooks, Trainer
from finch.training.summary import Summary

_FINAL = {"average": "finch.evaluation.average.Average"}
"""What other rooms do at the end of a run, where the config has their key: the core imports them only then."""
_METHODS = [name for name in vars(Hook) if not name.startswith("_")]


def build_hooks(trainer: Trainer, preemption: hooks.Preemption) -> Hooks:
    """Raises UserError for probes that cannot be read, and a component that is no hook or has the name of one of the recipe's."""
    cfg = trainer.cfg
    first = {"preemption": preemption, "nonfinite": hooks.NonfiniteGuard(), "checks": hooks.StepChecks(cfg)}
    # Both follow what has just been measured, and where both end a run its model is the budget's; the summary draws what was written.
    last = {"profiler": hooks.Profiler(cfg), "validation": hooks.Validation(), "probes": Probes(trainer)}
    last |= {"early_stopping": hooks.EarlyStopping(cfg), "budget": ForgettingBudget(trainer), "summary": Summary()}
    final = {key: path for key, path in _FINAL.items() if cfg[key] is not None}
    last |= {f"final_{key}": build({"_component_": path}, key) for key, path in final.items()}
    return Hooks({**first, **_user_hooks(cfg, first.keys() | last.keys()), **last})


def _user_hooks(cfg: DictConfig, reserved: set[str]) -> dict[str, Hook]:
    """The hooks of the config, by their names there. Raises UserError if a component is not a hook, or has a name in ``reserved``."""
    found: dict[str, Hook] = {}
    for name, node in (cfg.hooks or {}).items():
        if name in reserved:
            raise UserError(f"hooks.{name} is the name of a hook of the recipe; give it another name")
        hook = build(node, f"hooks.{name}")
        if not isinstance(hook, Hook):
            raise UserError(
                f"hooks.{name}._component_={component_of(node)} is no finch.training.hooks.Hook; derive the class from it"
            )
        for method in dir(hook):  # else it would never be called
            hint = "" if method.startswith("_") or hasattr(Hook, method) else did_you_mean(method, _METHODS, 0.8)
            if hint and callable(getattr(type(hook), method, None)):
                raise UserError(
                    f"hooks.{name}: {component_of(node)} has a method {method}, which is none of a hook's{hint}"
                )
        found[str(name)] = hook
    return found
