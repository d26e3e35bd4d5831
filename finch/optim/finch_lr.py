"""FINCH's learning rate: small steps while the loss is high, larger ones as the model converges.

Prashant et al., "Fine-Tuning Without Forgetting via Loss-Adaptive Learning Rates" (2026, arXiv 2605.20005), Section 3.3:

    L_i    = token-mean cross-entropy of the complete optimizer-step batch, in nats, before the update
    Lbar_i = ema * Lbar_{i-1} + (1 - ema) * L_i
    eta_i  = min(eta_base / sqrt(Lbar_i + eps), eta_max)
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from typing import Any

import torch
from torch.optim import Optimizer

Scalar = float | torch.Tensor
ETA_MAX = 5e-5
"""The paper's cap (Section 3.3)."""

AUTO_ETA_MAX = "eta_max='auto'"
"""The remedy that warnings name, in Python."""

_AUTO_ETA_MAX_RATIO = 2.5
_NO_LOSS: Any = object()
_HYPERPARAMETERS = ("eta_base", "eta_max", "ema", "eps", "warmup_steps")
_LARGEST_LOSS = 1000.0  # nats per token; a uniform guess among 256,000 tokens has 12.5
_PATIENCE = 3  # GradScaler leaves out single updates, and FinchLR's calls before them count as one too many
_COMBINED = "SequentialLR and ChainedScheduler"
_WARM_UP = "FinchLR(optimizer, warmup_steps=100) warms up by itself"


class NonfiniteError(FloatingPointError):
    """A loss that is not finite. ``where``: the rest of the sentence, at which step and what to do; ``what`` is known to who has the gradients too."""

    def __init__(self, where: str, what: str = "loss") -> None:
        super().__init__(f"the {what} was not finite {where}")
        self.where = where


class FinchLR:
    """Sets the learning rate of one optimizer, or of several, from the loss of the current step.

    It is stepped like :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`, with the loss, but *before* the optimizer:
    the learning rate of an update comes from the loss of that very update (Section 3.3).

        schedule = FinchLR(optimizer, eta_max=5e-5, init=3.6)
        for batch in loader:
            loss = model(batch); loss.backward()
            if schedule.step(loss):
                optimizer.step()
            optimizer.zero_grad()

    With gradient accumulation step it once per optimizer step; with several ranks pass the loss of all of them, so
    that every rank computes the same learning rate.

    **Base learning rates** are read from the param groups once, here: loading an optimizer's state later does not
    change them. The first group's is eta_base, and eta_max caps the first group's rate alone: the others keep their ratio to it, at the cap
    as well, so that theirs may lie above eta_max. As with torch's schedulers a group's ``initial_lr`` is used where it has one, and set
    where it has none, so that a second FinchLR on the same optimizer starts like the first.

    **Without host synchronisation.** Where every group's ``lr`` is a 0-d tensor and every optimizer honours
    ``found_inf`` (the fused ones of ``torch.optim`` do), a tensor loss is never read by the host: EMA and learning
    rate stay on its device, ``lr`` is written in place, and a non-finite loss makes the optimizer skip its update by
    itself. In all other cases the loss is read at each step.

    **Warnings**, each once: the optimizer steps first; it is stepped once for several calls of ``step``, as where each micro-batch's loss
    is passed; a loss so large that it must be GradScaler's (where the host reads it).

    Args:
        eta_max: cap of the first group's learning rate. The paper has 5e-5 in all its experiments, for eta_base from
            5e-6 to 1e-4 (Section 3.3). ``"auto"`` is 2.5 x eta_base: finch's own rule, for other scales of learning rates.
        init: Lbar_0 in nats. A number (the authors take the pretrained model's mean loss over the training set), or
            ``"first_batch"``, which starts from the first loss seen. ``"dataset"`` is for finch's recipes and its
            callbacks, which replace it by that mean.
        eta_base: learning rate at a loss of 1 nat; None takes the first param group's ``initial_lr``, else its ``lr``.
        ema: weight of the past in the moving average, in [0, 1).
        eps: added to the loss under the root, in nats.
        warmup_steps: of these first updates the i-th takes i / warmup_steps of the rate. The paper's FINCH has none. In place of
            ``SequentialLR``, which steps without a loss.
        decay, total_steps: see :class:`Decay`; the factor is at most 1, so that the paper's bound holds. 0, the default, is the paper's.
        on_nonfinite: ``"raise"``, or ``"skip"``: leave the state unchanged, count, and raise after ``max_nonfinite`` in
            a row.

    Raises:
        ValueError: an argument is out of range.
        TypeError: the optimizer is a class, or something else.
        FloatingPointError: from ``step``, or from the next read where the state lives on a device.
    """

    def __init__(
        self,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        eta_max: float | str = ETA_MAX,
        init: float | str = "first_batch",
        eta_base: float | None = None,
        ema: float = 0.9,
        eps: float = 1e-8,
        warmup_steps: int = 0,
        decay: float = 0.0,
        total_steps: int | None = None,
        on_nonfinite: str = "raise",
        max_nonfinite: int = 10,
    ) -> None:
        groups = ParamGroups(optimizer)
        is_auto = eta_max == "auto"
        _check_arguments(ETA_MAX if is_auto else eta_max, init, eta_base, ema, eps)
        check_nonfinite_options(on_nonfinite, max_nonfinite)
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps!r} must be a number of updates, 0 or more")
        self.warmup_steps, self._decay = warmup_steps, Decay(decay, total_steps)
        self.optimizers, self._groups = groups.optimizers, groups
        self.eta_base = groups.base_lr if eta_base is None else float(eta_base)
        self.eta_max = _AUTO_ETA_MAX_RATIO * self.eta_base if is_auto else float(eta_max)
        self.ema, self.eps = float(ema), float(eps)
        self.on_nonfinite, self.max_nonfinite = on_nonfinite, int(max_nonfinite)

        # The state. On the device path these become 0-d tensors on the loss's device at the first step.
        self._ema_loss: Scalar = math.nan if isinstance(init, str) else float(init)  # NaN: no loss yet
        self._eta: Scalar = self.eta_base
        self._num_steps: int | torch.Tensor = 0
        self._num_calls = 0  # those without an update as well: a run's steps, of which the decay takes the last
        self._nonfinite: int | torch.Tensor = 0  # in all
        self._in_a_row: int | torch.Tensor = 0
        self._longest_row: int | torch.Tensor = 0  # remembered, since the host may look after a row has ended
        self._reported = 0

        self._order = _StepOrder(self.optimizers[0])
        self._warns_of_size = self._warns_of_cap = True
        self._warn_of_constant_rate(init, stacklevel=3)
        if not isinstance(init, str):
            self._write(self._eta_of(self._ema_loss))

    def step(self, loss: Scalar = _NO_LOSS, targets: Scalar | None = None) -> bool:
        """Sets the learning rate of the current step from its loss.

        Args:
            loss: [] mean cross-entropy in nats over the target tokens of the complete optimizer-step batch: all
                micro-batches, all ranks. With a reweighted objective it is still the unweighted cross-entropy. Of a DTensor the
                full tensor is taken, a collective of its mesh.
            targets: [] number of target tokens behind ``loss``. A batch without any leaves the state unchanged and is
                not an error. None: there were some.

        Returns whether to take the optimizer step; always True on the device path, where the optimizer decides by ``found_inf``.

        Raises:
            FloatingPointError: the loss is not finite and ``on_nonfinite`` is ``"raise"``, or it is the last of
                ``max_nonfinite`` in a row.
            TypeError: there is no loss, as from a trainer that steps its scheduler after the optimizer.
        """
        if loss is _NO_LOSS:
            raise TypeError(
                "FinchLR.step() needs the loss of the step, before optimizer.step(). transformers' Trainer(optimizers=...) calls it "
                "afterwards and without a loss: pass finch.integrations.transformers.FinchCallback to the Trainer instead; torch's "
                f"{_COMBINED} do as well: {_WARM_UP}"
            )
        loss, targets = full_value(loss), full_value(targets)
        is_loss = loss.is_floating_point() if isinstance(loss, torch.Tensor) else _is_float(loss)
        if not is_loss:
            raise TypeError(
                f"FinchLR.step({loss!r}): it takes the loss of the step in nats, a float or a tensor of floats, not a number of epochs or steps"
            )
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    f"FinchLR.step(loss): the loss has the shape {list(loss.shape)}; pass one number, the mean over the batch's target tokens"
                )
            # Detached: the moving average would otherwise keep the graph of every step so far.
            loss = loss.detach().reshape(())
        self._num_calls += 1
        if isinstance(loss, torch.Tensor) and self._stays_on_device():
            self._step_on_device(loss, targets)
            self._order.scheduled()
            return True
        is_taken = self._step_on_host(float(loss), 1.0 if targets is None else float(targets))
        if is_taken:
            self._order.scheduled()
        return is_taken

    def get_last_lr(self) -> list[float]:
        """The learning rate of each param group as last set, optimizer by optimizer. Reads the device."""
        self._raise_if_nonfinite()
        return self._groups.rates(float(self._eta))

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer."""
        return self.optimizers[0]

    @property
    def base_lrs(self) -> list[float]:
        """The learning rate of each param group at a loss of 1 nat, optimizer by optimizer."""
        return self._groups.rates(self.eta_base)

    @property
    def last_epoch(self) -> int:
        """How many losses have set the rate; torch's name. Reads the device."""
        return int(self._num_steps)

    @last_epoch.setter
    def last_epoch(self, value: int) -> None:
        raise TypeError(f"FinchLR cannot be a part of torch's {_COMBINED}, which step without a loss: {_WARM_UP}")

    @property
    def capped_below(self) -> float:
        """The loss in nats below which the rate is eta_max."""
        return (self.eta_base / self.eta_max) ** 2 - self.eps

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name):g}" for name in (*_HYPERPARAMETERS, "last_epoch"))
        return f"FinchLR({values}, lr={float(self._eta):g})"

    @property
    def ema_loss(self) -> float | None:
        """Lbar in nats, or None before the first loss of ``init="first_batch"``. Reads the device."""
        self._raise_if_nonfinite()
        value = float(self._ema_loss)
        return None if math.isnan(value) else value

    def metrics(self) -> dict[str, Scalar]:
        """What a training log holds of a step; [] tensors, unread, where the state lives on a device.

        ``ema_loss``: Lbar in nats, NaN before the first loss. ``lr``: the first group's. ``lr_is_capped``: whether it is eta_max.
        """
        return {"ema_loss": self._ema_loss, "lr": self._eta, "lr_is_capped": self._eta >= self.eta_max}

    @property
    def is_on_device(self) -> bool:
        """Whether the state lives on a device, so that reading it waits for the device."""
        return isinstance(self._nonfinite, torch.Tensor)

    def check(self) -> int:
        """Reads the counters of non-finite losses and raises as ``on_nonfinite`` says, see ``step``. Returns how many there were since the last call."""
        new = self._raise_if_nonfinite()
        self._reported += new
        return new

    def state_dict(self) -> dict[str, Any]:
        """The EMA, the counters and the hyper-parameters, as plain numbers. Reads the device."""
        self._raise_if_nonfinite()
        return {
            "ema_loss": self.ema_loss,
            "num_steps": int(self._num_steps),
            # Only where it counts: TorchTitan asks a checkpoint for each key of the state.
            **({"num_calls": self._num_calls} if self._decay.share else {}),
            "nonfinite": int(self._nonfinite),
            "nonfinite_in_a_row": int(self._in_a_row),
            **{name: getattr(self, name) for name in _HYPERPARAMETERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the EMA and the counters, and sets the learning rate that belongs to them. Hyper-parameters and the groups' ratios stay
        as they were built, since a resumed run may change them on purpose; a changed one is a warning.
        """
        changed = [name for name in _HYPERPARAMETERS if state.get(name, getattr(self, name)) != getattr(self, name)]
        if changed:
            texts = ", ".join(f"{name}={getattr(self, name):g} in place of {state[name]:g}" for name in changed)
            warnings.warn(f"FinchLR continues with {texts}, which its state was saved with", stacklevel=2)
        self._ema_loss = math.nan if state["ema_loss"] is None else float(state["ema_loss"])
        self._num_steps = int(state["num_steps"])
        self._num_calls = int(state.get("num_calls", self._num_steps))
        self._nonfinite = self._reported = int(state["nonfinite"])
        self._in_a_row = self._longest_row = int(state["nonfinite_in_a_row"])
        # Before the first loss there is no rate to restore: the groups keep theirs.
        if not math.isnan(self._ema_loss):
            self._write(self._eta_of(self._ema_loss))

    def _raise_if_nonfinite(self) -> int:
        """Returns how many non-finite losses ``check`` has not reported."""
        total, longest = int(self._nonfinite), int(self._longest_row)
        new = total - self._reported
        if self.on_nonfinite == "raise" and new > 0:
            # Counted as reported before it raises: a caller that catches the error hears of these losses once.
            self._reported = total
            raise NonfiniteError(
                f"at {'a step' if new == 1 else f'{new} steps'} after step {int(self._num_steps)}; EMA and learning "
                "rate are unchanged: lower eta_base, check the data, or set on_nonfinite='skip'"
            )
        if longest >= self.max_nonfinite:
            raise NonfiniteError(
                f"{longest} times in a row after step {int(self._num_steps)}: the weights or the data are broken; "
                "go back to a checkpoint and lower eta_base"
            )
        return new

    def _stays_on_device(self) -> bool:
        return are_fused(self.optimizers) and all(isinstance(group["lr"], torch.Tensor) for group in self._groups)

    def _eta_of(self, ema_loss: Scalar) -> Scalar:
        """eta_i = min(eta_base / sqrt(Lbar_i + eps), eta_max), Section 3.3; of the first ``warmup_steps`` a share, and the decay's."""
        if isinstance(ema_loss, torch.Tensor):
            eta: Scalar = (self.eta_base / (ema_loss + self.eps).sqrt()).clamp(max=self.eta_max)
        else:
            # A loss of 0 with eps=0 has the cap as its limit, which tensors reach by 1 / 0 = inf.
            under_root = ema_loss + self.eps
            eta = min(self.eta_base / math.sqrt(under_root), self.eta_max) if under_root > 0 else self.eta_max
        eta = self._decay.of(eta, self._num_calls)
        if not self.warmup_steps:
            return eta
        share = self._num_steps / self.warmup_steps
        return eta * (share.clamp(max=1) if isinstance(share, torch.Tensor) else min(share, 1.0))

    def _step_on_host(self, loss: float, targets: float) -> bool:
        for optimizer in self.optimizers:  # left by an earlier step on the device path
            for name in ("found_inf", "finch_found_inf", "grad_scale"):
                vars(optimizer).pop(name, None)
        if targets == 0:
            return False
        if not math.isfinite(loss):
            self._nonfinite += 1
            self._in_a_row += 1
            self._longest_row = max(int(self._longest_row), int(self._in_a_row))
            self._raise_if_nonfinite()
            return False
        if loss > _LARGEST_LOSS and self._warns_of_size:
            self._warns_of_size = False
            warnings.warn(
                f"FinchLR.step({loss:.4g}): no mean cross-entropy per token is that large; pass the loss before GradScaler.scale, and no sum",
                stacklevel=3,
            )
        self._in_a_row = 0
        self._num_steps += 1
        past = float(self._ema_loss)
        if math.isnan(past):
            self._warn_of_constant_rate(loss, stacklevel=4)
        self._ema_loss = loss if math.isnan(past) else self.ema * past + (1 - self.ema) * loss
        self._write(self._eta_of(self._ema_loss))
        return True

    def _step_on_device(self, loss: torch.Tensor, targets: Scalar | None) -> None:
        device = loss.device
        # float64 where the device has it: the EMA of a long run then equals the host path's to the last digits.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._to_device(device, dtype)
        loss = loss.to(dtype)
        # From here on torch.where decides, since an `if` would make the host wait for the device.
        finite = loss.isfinite()
        counted = torch.ones_like(finite) if targets is None else torch.as_tensor(targets, device=device) > 0
        used = finite & counted
        past = torch.as_tensor(self._ema_loss)
        blended = torch.where(past.isnan(), loss, self.ema * past + (1 - self.ema) * loss)
        self._ema_loss = torch.where(used, blended, past)
        self._num_steps = self._num_steps + used
        broken = counted & ~finite
        self._nonfinite = self._nonfinite + broken
        self._in_a_row = torch.where(broken, self._in_a_row + 1, torch.where(used, 0, self._in_a_row))
        self._longest_row = torch.maximum(torch.as_tensor(self._longest_row), self._in_a_row)
        self._write(torch.where(used, self._eta_of(self._ema_loss), self._eta))
        found_inf = (~used).float()
        for optimizer in self.optimizers:
            if "finch_found_inf" not in vars(optimizer) and hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(_keep_skip)
            # The protocol of torch.amp.GradScaler with fused optimizers: found_inf of 1 skips the update in the kernel.
            vars(optimizer).update(found_inf=found_inf, finch_found_inf=found_inf)

    def _to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        if isinstance(self._ema_loss, torch.Tensor) and isinstance(self._eta, torch.Tensor):
            return
        self._ema_loss = torch.tensor(float(self._ema_loss), dtype=dtype, device=device)
        self._eta = torch.tensor(float(self._eta), dtype=dtype, device=device)
        for name in ("_num_steps", "_nonfinite", "_in_a_row", "_longest_row"):
            setattr(self, name, torch.tensor(int(getattr(self, name)), device=device))

    def _write(self, eta: Scalar) -> None:
        self._eta = eta
        self._groups.set_lr(eta)

    def _warn_of_constant_rate(self, init: float | str, stacklevel: int) -> None:
        limit = self.capped_below
        # Without a first loss, 1 nat: where eta_base itself is above the cap.
        if self._warns_of_cap and (1.0 if isinstance(init, str) else init) <= limit:
            self._warns_of_cap = False
            start = "" if isinstance(init, str) else f" (it is {init:.3g})"
            warnings.warn(
                f"FINCH has no effect: eta_max={self.eta_max:g} caps the learning rate while the loss is below {limit:.3g} nats{start}; set "
                f"{AUTO_ETA_MAX}, {_AUTO_ETA_MAX_RATIO} times eta_base={self.eta_base:g}, or lower that",
                stacklevel=stacklevel,
            )


def _keep_skip(optimizer: Optimizer, *_: Any) -> None:
    """Before a step: GradScaler.step has put the ``found_inf`` of its gradients in the place of FINCH's, and either of them skips the update."""
    found, own = (getattr(optimizer, name, None) for name in ("found_inf", "finch_found_inf"))
    if found is not None and own is not None and found is not own:
        vars(optimizer)["found_inf"] = found.maximum(own.to(found.device))


class _StepOrder:
    """Warns where an optimizer and its schedule are not stepped in turn, the schedule first. Counts calls; reads no tensor after the first loss."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._losses = 0  # since the last update
        self._is_started = False
        self._first_updates = 0  # before the first loss
        self._rows = 0  # updates, one after the other, that several losses preceded
        hooks = "_optimizer_step_post_hooks"
        order = weakref.ref(self)  # an optimizer outlives the schedules of a notebook's cell

        def count(optimizer: Optimizer, *_: Any) -> None:
            # While an optimizer's step is compiled, this would break its graph.
            if not torch.compiler.is_compiling() and (live := order()) is not None:
                live._updated(optimizer)

        # Accelerate's wrapper has no hooks, and its optimizer is not stepped where the wrapper passes over a micro-batch.
        inner = optimizer if hasattr(optimizer, hooks) else getattr(optimizer, "optimizer", None)
        if inner is not None and hasattr(inner, hooks):
            inner.register_step_post_hook(count)

    def scheduled(self) -> None:
        """Called after each ``step`` that asks for an update."""
        self._losses += 1
        if not self._is_started and self._first_updates == 1:  # more are another schedule's, which has come first
            warnings.warn(
                "optimizer.step() has come before FinchLR.step(loss): a batch's loss sets the rate of its own update, step FinchLR first",
                stacklevel=3,
            )
        self._is_started = True

    def _updated(self, optimizer: Optimizer) -> None:
        if not self._is_started:  # at a rate of 0 torch.distributed.checkpoint makes the moments it loads into
            self._first_updates += any(float(group["lr"]) > 0 for group in optimizer.param_groups)
        self._rows = self._rows + 1 if self._losses > 1 else 0
        if self._rows == _PATIENCE:
            warnings.warn(
                f"FinchLR.step(loss) is called {self._losses} times for each optimizer.step(): with gradient accumulation call it once, with the "
                "mean loss over all micro-batches",
                stacklevel=3,
            )
        self._losses = 0


def full_value(value: Any) -> Any:
    """The full tensor of a DTensor, detached, a collective of its mesh; any other value as it is."""
    # As finch.base.dtensor.full_tensor, but by its method: that module imports DTensor's, which is slow and not in every build of torch.
    return value.detach().full_tensor() if hasattr(value, "full_tensor") else value


def _is_float(value: Any) -> bool:
    """Whether a value is a float of any kind, NumPy's as well."""
    return isinstance(value, Real) and not isinstance(value, Integral)


def _check_arguments(eta_max: float | str, init: float | str, eta_base: float | None, ema: float, eps: float) -> None:
    for name, value in (("ema", ema), ("eta_max", eta_max), ("eps", eps), ("eta_base", eta_base)):
        if not isinstance(value, (int, float)) and not (name == "eta_base" and value is None):
            or_auto = ", or 'auto'" if name == "eta_max" else ""
            raise ValueError(f"{name}={value!r} must be a number{or_auto}")
    # Each condition says what is allowed and is negated, so that NaN, which fails every comparison, is refused.
    if not 0 <= ema < 1:
        raise ValueError(f"ema={ema} must lie in [0, 1): it is the weight of the past losses, 0.9 in the paper")
    if not float(eta_max) > 0:
        raise ValueError(f"eta_max={eta_max} must be above 0: it is the cap of the learning rate, 5e-5 in the paper")
    if eta_base is not None and not eta_base > 0:
        raise ValueError(f"eta_base={eta_base} must be above 0: it is the learning rate at a loss of 1 nat")
    if not eps >= 0:
        raise ValueError(f"eps={eps} must not be negative: it is added to the loss under the root")
    if init == "dataset":
        raise ValueError(
            "init='dataset' is for finch's recipes and callbacks; elsewhere pass the pretrained model's mean loss over the training set, or 'first_batch'"
        )
    if not isinstance(init, (Real, torch.Tensor)) and init != "first_batch":
        raise ValueError(
            f"init={init!r} must be a loss in nats above 0, 'first_batch', or in finch's recipes 'dataset'"
        )
    if not isinstance(init, str) and not (init > 0 and math.isfinite(init)):
        raise ValueError(
            f"init={init} must be above 0: it is a loss in nats, and at 0 the learning rate would start at the cap"
        )


# For all schedules.


class Decay:
    """The last share of a run's steps goes linearly to 0, which the step after the last would have.

    ``share``: of the steps, in [0, 1); 0: none. ``total_steps``: of the complete run, those without an update included.
    Raises ValueError if the share is out of range, or above 0 and the number of steps unknown.
    """

    def __init__(self, share: float, total_steps: int | None) -> None:
        if not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise ValueError(f"decay={share!r} must lie in [0, 1): it is the last share of the steps, which goes to 0")
        if share and not (isinstance(total_steps, int) and total_steps > 0):
            raise ValueError(
                f"decay={share} needs the number of the run's steps: total_steps={total_steps} is none; give it"
            )
        self.share, total = float(share), total_steps or 0
        self._end, self._steps = total + 1, self.share * total

    def of(self, lr: Scalar, step: int | torch.Tensor) -> Scalar:
        """``lr``, [], as it is at ``step``, the first of which is 1."""
        if not self.share:
            return lr
        decayed = lr * (self._end - step) / self._steps
        if isinstance(decayed, torch.Tensor):
            return decayed.clamp(min=0).minimum(torch.as_tensor(lr))
        return max(0.0, min(lr, decayed))


class ParamGroups:
    """The param groups of some optimizers, whose learning rates keep the ratio to the first one's that they have at the start.

    A group's learning rate at the start is its ``initial_lr``, by the convention of torch's schedulers: the first schedule of
    an optimizer puts it there. A second one, as of a notebook cell that runs twice, starts from it and not from the last step's.
    The groups are looked up at each use, since ``Optimizer.load_state_dict`` replaces them. The ratios stay.

    ``base_lr``: the first group's learning rate at the start. Raises ValueError if there is no group, or it is not above 0.
    """

    def __init__(self, optimizer: Optimizer | Iterable[Optimizer]) -> None:
        if isinstance(optimizer, type):
            raise TypeError(
                f"optimizer={optimizer.__name__} is a class; pass {optimizer.__name__}(model.parameters(), lr=...)"
            )
        self.optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        for each in self.optimizers:
            if not hasattr(each, "param_groups"):
                raise TypeError(f"{type(each).__name__} is no optimizer; pass one of torch.optim, or a list of them")
        bases = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in self]
        if not bases:
            raise ValueError("optimizer holds no param group: there is no learning rate to set")
        self.base_lr = bases[0]
        if not self.base_lr > 0:
            raise ValueError(
                f"lr={self.base_lr} of the first param group must be above 0: the other groups' ratios refer to it"
            )
        self._ratios = [base / self.base_lr for base in bases]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def rates(self, lr: float) -> list[float]:
        """The learning rate of each group when the first one's is ``lr``, optimizer by optimizer."""
        return [lr * ratio for ratio in self._ratios]

    def set_lr(self, lr: Scalar) -> None:
        """Sets the first group's learning rate to ``lr``, [], and the others in proportion; reads no tensor that it need not."""
        groups = list(self)
        if len(groups) != len(self._ratios):
            raise ValueError(
                f"optimizer has {len(groups)} param groups, and had {len(self._ratios)}: build FinchLR after add_param_group"
            )
        for group, ratio in zip(groups, self._ratios, strict=True):
            set_group_lr(group, lr * ratio)


def set_group_lr(group: dict[str, Any], lr: Scalar) -> None:
    """Sets ``group["lr"]``, [], in place where it is a tensor: compiled and captured optimizers hold that very tensor."""
    if not isinstance(group["lr"], torch.Tensor):
        group["lr"] = float(lr)
    elif isinstance(lr, torch.Tensor):
        group["lr"].copy_(lr)
    else:
        group["lr"].fill_(lr)


def are_fused(optimizers: Iterable[Optimizer]) -> bool:
    """Whether their kernels take a divisor of the gradients, and whether to skip."""
    # The attribute that torch.amp.GradScaler itself asks for.
    return all(getattr(each, "_step_supports_amp_scaling", False) for each in optimizers)


def check_nonfinite_options(on_nonfinite: str, max_nonfinite: int) -> None:
    """Checks the arguments that all schedules share. Raises ValueError if one is out of range."""
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r} must be 'raise' or 'skip'")
    if not max_nonfinite >= 1:
        raise ValueError(f"max_nonfinite={max_nonfinite} must be at least 1")
